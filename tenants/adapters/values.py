"""The numbers in an upload's tensors, looked at in bounded chunks: finite, of a sane size, and not all zero."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, TypeAlias

import numpy as np

from tenants.adapters.header import TensorEntry

CHUNK_BYTES = 1 << 20
MAX_MAGNITUDE = 1e4  # trained values are below 10; beyond this, products could leave fp32
MAX_DELTA_NORM = 1e6  # of scale · B · A, which trained adapters have below 1e3

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


@dataclass(frozen=True, slots=True)
class Magnitude:
    """Of a tensor: its largest magnitude (inf when any value is NaN or infinite) and its Frobenius norm."""

    largest: float
    norm: float


def measure(file: BinaryIO, entry: TensorEntry) -> Magnitude:
    largest = squares = 0.0
    for data in chunks(file, entry):
        with np.errstate(invalid="ignore"):  # a signalling NaN is a NaN
            values = _floats(data, entry.dtype)
            magnitude = float(np.abs(values).max())  # NaN wins over every number
            squares += float(np.square(values, dtype=np.float64).sum())
        largest = max(largest, magnitude if np.isfinite(magnitude) else np.inf)
    return Magnitude(largest, squares**0.5)


def _floats(data: bytes, dtype: str) -> Array:
    if dtype == "F32":
        return np.frombuffer(data, "<f4")
    if dtype == "F16":
        return np.frombuffer(data, "<f2").astype(np.float32)
    return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)  # bfloat16: float32's upper half
