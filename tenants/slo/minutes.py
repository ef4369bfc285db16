"""What was judged by one version of an objective, by minute: an hour of minutes in a row, since alerts look at each."""

from collections.abc import Iterable, Mapping
from typing import TypeAlias

import msgspec

from tenants.slo.burn import Tally
from tenants.slo.objectives import MINUTE_S

HOUR_S = 3600
Minutes: TypeAlias = dict[int, tuple[int, int]]  # minute of the hour → valid, good

encode_minutes = msgspec.msgpack.Encoder().encode
decode_minutes = msgspec.msgpack.Decoder(Minutes).decode
NO_MINUTES = encode_minutes({})


def added(kept: bytes, counts: Mapping[int, Iterable[int]]) -> Minutes:
    """What is kept of an hour, and ``counts`` like it."""
    minutes = decode_minutes(kept)
    for minute, (valid, good) in counts.items():
        known_valid, known_good = minutes.get(minute, (0, 0))
        minutes[minute] = (known_valid + valid, known_good + good)
    return minutes


def tally_hour(tally: Tally, hour_s: int, kept: bytes, start_s: int, end_s: int) -> None:
    """Adds what is kept of an hour, as far as it is in [start_s, end_s)."""
    minutes = decode_minutes(kept)
    if not start_s <= hour_s <= end_s - HOUR_S:
        minutes = {each: minutes[each] for each in minutes if start_s <= hour_s + each * MINUTE_S < end_s}
    if minutes:
        tally.add([hour_s + each * MINUTE_S for each in minutes], *zip(*minutes.values(), strict=True))
