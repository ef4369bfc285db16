"""GGUF v2 and v3 files, read through mmap and numpy (spec: ggml-org/ggml docs/gguf.md)."""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine.weights.errors import UnsupportedModel
from engine.weights.gguf_types import OTHER_NAMES, TENSOR_TYPES, Array, TensorType

MAX_STRING_BYTES = 16 << 20
MAX_COUNT = 1 << 24  # tensors, metadata entries, array members
DEFAULT_ALIGNMENT = 32
_DECODED_AT_ONCE = 8192  # blocks; what a decoder makes on the way stays in the cache

_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies: shape with the slowest dimension first, offset in bytes from the file's start."""

    shape: tuple[int, ...]
    type: TensorType
    offset: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) // self.type.block_weights * self.type.block_bytes


class GgufFile:
    """An open GGUF file: ``metadata`` as plain Python values (numeric arrays as numpy), ``tensors`` by GGUF name.

    Raises UnsupportedModel for another format version, a tensor type without a decoder, or a file that ends early.
    """

    def __init__(self, path: Path) -> None:
        self._name = path.name
        with path.open("rb") as file:
            if path.stat().st_size < 24:
                raise UnsupportedModel(f"{self._name}: not a GGUF file")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._at = 0
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        try:
            self._parse()
        except (struct.error, UnicodeDecodeError, ValueError, IndexError) as error:
            raise UnsupportedModel(f"{self._name}: broken GGUF structure ({error})") from error

    def read(self, name: str) -> Array:
        """The tensor as float32, in memory of its own."""
        info = self.tensors[name]
        raw = np.frombuffer(self._map, np.uint8, info.num_bytes, info.offset).reshape(-1, info.type.block_bytes)
        weights = np.empty((len(raw), info.type.block_weights), np.float32)
        for start in range(0, len(raw), _DECODED_AT_ONCE):
            part = slice(start, start + _DECODED_AT_ONCE)
            weights[part] = info.type.decode(raw[part])
        return weights.reshape(info.shape)

    def _parse(self) -> None:
        magic, version = self._map[:4], self._scalar_at("<I", 4)
        if magic != b"GGUF":
            raise UnsupportedModel(f"{self._name}: not a GGUF file")
        if version not in {2, 3}:
            raise UnsupportedModel(f"{self._name}: GGUF version {version}")
        self._at = 8
        num_tensors, num_entries = self._count(), self._count()
        for _ in range(num_entries):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("<I"))
        infos = [self._tensor_info() for _ in range(num_tensors)]
        alignment = int(self.metadata.get("general.alignment", DEFAULT_ALIGNMENT))
        start = -(-self._at // alignment) * alignment
        for name, shape, kind, offset in infos:
            self._add_tensor(name, TensorInfo(shape, kind, start + offset))

    def _tensor_info(self) -> tuple[str, tuple[int, ...], TensorType, int]:
        name = self._string()
        num_dimensions = self._scalar("<I")
        if num_dimensions > 4:
            raise ValueError(f"{name} has {num_dimensions} dimensions")
        shape = tuple(self._scalar("<Q") for _ in range(num_dimensions))[::-1]  # stored fastest first
        kind = self._scalar("<I")
        if kind not in TENSOR_TYPES:
            known = ", ".join(each.name for each in TENSOR_TYPES.values())
            raise UnsupportedModel(
                f"{self._name}: tensor {name} has type {OTHER_NAMES.get(kind, kind)}; supported are {known}"
            )
        return name, shape, TENSOR_TYPES[kind], self._scalar("<Q")

    def _add_tensor(self, name: str, info: TensorInfo) -> None:
        if name in self.tensors:
            raise ValueError(f"two tensors are named {name}")
        if not info.shape or info.shape[-1] % info.type.block_weights:
            raise ValueError(f"{name} has rows of no whole {info.type.name} blocks")
        if info.offset + info.num_bytes > len(self._map):
            raise ValueError(f"the file ends inside {name}")
        self.tensors[name] = info

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise ValueError(f"metadata type {kind}")
        return self._scalar(_SCALARS[kind])

    def _array(self) -> Any:
        kind, count = self._scalar("<I"), self._count()
        if kind == _STRING:
            return [self._string() for _ in range(count)]
        if kind not in _SCALARS:
            raise ValueError(f"array of metadata type {kind}")
        dtype = np.dtype(_SCALARS[kind])
        values = np.frombuffer(self._map, dtype, count, self._at).copy()
        self._at += values.nbytes
        return values

    def _string(self) -> str:
        size = self._scalar("<Q")
        if size > MAX_STRING_BYTES or self._at + size > len(self._map):
            raise ValueError(f"string of {size} bytes")
        self._at += size
        return self._map[self._at - size : self._at].decode()

    def _count(self) -> int:
        count = self._scalar("<Q")
        if count > MAX_COUNT:
            raise ValueError(f"count of {count}")
        return count

    def _scalar(self, form: str) -> Any:
        value = self._scalar_at(form, self._at)
        self._at += struct.calcsize(form)
        return value

    def _scalar_at(self, form: str, at: int) -> Any:
        return struct.unpack_from(form, self._map, at)[0]
