"""What was judged by one version of an objective, by minute: an hour of minutes in a row, since alerts look at each."""

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias

import msgspec

from tenants.slo.objectives import MINUTE_S

HOUR_S = 3600
Minutes: TypeAlias = dict[int, tuple[int, int]]  # minute of the hour → valid, good
Counted: TypeAlias = tuple[int, int, int]  # Unix seconds of a start, valid, good

encode_minutes = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Minutes).decode
NO_MINUTES = encode_minutes({})


def added(kept: bytes, counts: Mapping[int, Iterable[int]]) -> Minutes:
    """What is kept of an hour, and ``counts`` like it."""
    minutes = _decode(kept)
    for minute, (valid, good) in counts.items():
        known_valid, known_good = minutes.get(minute, (0, 0))
        minutes[minute] = (known_valid + valid, known_good + good)
    return minutes


def counted(hour_s: int, kept: bytes) -> Iterator[Counted]:
    for minute, (valid, good) in _decode(kept).items():
        yield hour_s + minute * MINUTE_S, valid, good
