"""How messages and token ids are written as bytes: length-prefixed frames, little-endian int32.

A frame is a 4-byte big-endian length and that many bytes of msgpack. Token ids travel as int32 bytes (``pack_ids``),
so that a step's deltas cost one copy and no per-token object.
"""

import struct
from array import array
from collections.abc import Iterable, Iterator

MAX_FRAME_BYTES = 64 << 20

_LENGTH = struct.Struct(">I")


class WireError(Exception):
    """The peer sent bytes that are not our protocol; the connection ends."""


def pack_ids(ids: Iterable[int]) -> bytes:
    """Token ids → int32 bytes. Raises OverflowError for an id that is no int32."""
    return array("i", ids).tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """int32 bytes → token ids."""
    ids = array("i")
    ids.frombytes(data)
    return ids.tolist()


def frame(body: bytes) -> bytes:
    """A body with its length first."""
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Cuts a byte stream into frame bodies. Feed it what arrived; iterate what is whole.

    Raises WireError for a frame over ``max_bytes``: the peer is broken or not ours.
    """

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._buffer = bytearray()
        self._max_bytes = max_bytes

    def feed(self, data: bytes) -> Iterator[bytes]:
        self._buffer += data
        while len(self._buffer) >= 4:
            (size,) = _LENGTH.unpack_from(self._buffer)
            if size > self._max_bytes:
                raise WireError(f"frame of {size} bytes, {self._max_bytes} allowed")
            if len(self._buffer) < 4 + size:
                return
            body = bytes(self._buffer[4 : 4 + size])
            del self._buffer[: 4 + size]
            yield body
