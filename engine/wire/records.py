"""What an engine's journal holds: what a request used, and where the time of the engine went."""

import msgspec
from msgspec import Struct

_MSGPACK_ARRAY = 0x90  # the high half of the first byte of an array of up to 15 items; 0xDC begins longer ones
_MSGPACK_ARRAY_16 = 0xDC


class UsageRecord(Struct, frozen=True):
    """What the journal keeps of one request, written once, after Close or when its gateway is lost.

    ``outcome`` is Close's, or 0 for *lost*. ``queue_ns`` includes Close's ``admit_ns``; the five phases sum
    to the request's total. ``gpu_ns`` and ``load_ns`` are what it cost; ``recompute_ns`` is what preempting it cost,
    which isn't its doing.
    """

    request_id: str
    context: bytes
    outcome: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    queue_ns: int
    prefill_ns: int
    decode_ns: int
    post_ns: int
    network_ns: int
    first_token_ns: int
    gpu_ns: int
    finished_unix_ns: int
    load_ns: int = 0
    recompute_ns: int = 0


class TimeRecord(Struct, frozen=True, array_like=True):
    """Where the time of an engine process went since the record before, once a second or so.

    ``number`` counts from 0 in a process, which ``incarnation_unix_ns`` tells apart from others of that engine: none is
    missing between two. ``wall_ns`` is monotonic. The accounts sum to it but for a step in the air, which is in the
    record after it landed. ``error_ppm`` and ``r2_ppm`` are the cost model's (``metering.cost_fit``), in millionths.
    """

    engine_id: str
    incarnation_unix_ns: int
    number: int
    model: str
    until_unix_ns: int
    wall_ns: int
    attributed_ns: int
    load_ns: int
    recompute_ns: int
    lost_ns: int
    idle_ns: int
    overhead_ns: int
    error_ppm: int = 0
    r2_ppm: int = 0


_usage = msgspec.msgpack.Decoder(UsageRecord)
_time = msgspec.msgpack.Decoder(TimeRecord)


def is_time(payload: bytes) -> bool:
    """A journal entry's payload: a map is a UsageRecord, an array a TimeRecord."""
    first = payload[0] if payload else 0
    return first & 0xF0 == _MSGPACK_ARRAY or first == _MSGPACK_ARRAY_16


def read_record(payload: bytes) -> UsageRecord | TimeRecord:
    """A journal entry's payload. Raises msgspec's errors."""
    return _time.decode(payload) if is_time(payload) else _usage.decode(payload)
