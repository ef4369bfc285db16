"""The numbers in an upload's tensors, looked at in bounded chunks: finite, of a sane size, and not all zero."""

from collections.abc import Iterator
from typing import Any, BinaryIO, TypeAlias

import numpy as np

from tenants.adapter_header import TensorEntry

CHUNK_BYTES = 1 << 20
MAX_MAGNITUDE = 1e4  # trained values are below 10; beyond this, products could leave fp32

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]


def chunks(file: BinaryIO, entry: TensorEntry) -> Iterator[bytes]:
    """A tensor's bytes, at most CHUNK_BYTES at a time. Raises OSError when the file became shorter."""
    file.seek(entry.start)
    left = entry.num_bytes
    while left > 0:
        data = file.read(min(left, CHUNK_BYTES))
        if not data:
            raise OSError("the file became shorter while it was read")
        left -= len(data)
        yield data


def largest(file: BinaryIO, entry: TensorEntry) -> float:
    """The largest magnitude in a tensor; inf when any value is NaN or infinite."""
    most = 0.0
    for data in chunks(file, entry):
        magnitude = float(np.abs(_floats(data, entry.dtype)).max())  # NaN wins over every number
        most = max(most, magnitude if np.isfinite(magnitude) else np.inf)
    return most


def _floats(data: bytes, dtype: str) -> Array:
    if dtype == "F32":
        return np.frombuffer(data, "<f4")
    if dtype == "F16":
        return np.frombuffer(data, "<f2").astype(np.float32)
    return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)  # bfloat16: float32's upper half
