"""GGUF v3 files, read through mmap and numpy (spec: ggml-org/ggml docs/gguf.md).

Block layouts are those of ggml's ``ggml-common.h``; a further tensor type is one more entry of TENSOR_TYPES.
"""

import math
import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from engine.weights.errors import UnsupportedModel

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

MAX_STRING_BYTES = 16 << 20
MAX_COUNT = 1 << 24  # tensors, metadata entries, array members
DEFAULT_ALIGNMENT = 32
_DECODED_AT_ONCE = 8192  # blocks; what a decoder makes on the way stays in the cache

_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_GGML_NAMES = {
    2: "Q4_0", 6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K",
    15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S",
    23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16", 34: "TQ1_0",
    35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorType:
    """One ggml type: ``decode`` turns [blocks, block_bytes] uint8 into [blocks, block_weights] float32 of its own."""

    name: str
    block_weights: int
    block_bytes: int
    decode: Callable[[Array], Array]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies: shape with the slowest dimension first, offset in bytes from the file's start."""

    shape: tuple[int, ...]
    type: TensorType
    offset: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) // self.type.block_weights * self.type.block_bytes


def _decode_f32(blocks: Array) -> Array:
    return blocks.view("<f4").astype(np.float32)


def _decode_f16(blocks: Array) -> Array:
    return blocks.view("<f2").astype(np.float32)


def _decode_q8_0(blocks: Array) -> Array:
    """Block: f16 d, 32 × int8 q; weight = d·q."""
    weights = blocks[:, 2:].view(np.int8).astype(np.float32)
    weights *= _half(blocks, 0)
    return weights


def _decode_q4_1(blocks: Array) -> Array:
    """Block: f16 d, f16 m, 16 bytes of two nibbles (low = weights 0–15, high = 16–31); weight = d·q + m."""
    pairs = blocks[:, 4:]
    nibbles = np.empty((len(blocks), 32), np.uint8)
    np.bitwise_and(pairs, 15, out=nibbles[:, :16])
    np.right_shift(pairs, 4, out=nibbles[:, 16:])
    weights = nibbles.astype(np.float32)
    weights *= _half(blocks, 0)
    weights += _half(blocks, 2)
    return weights


def _half(blocks: Array, start: int) -> Array:
    return blocks[:, start : start + 2].copy().view("<f2").astype(np.float32)


TENSOR_TYPES = {
    0: TensorType("F32", 1, 4, _decode_f32),
    1: TensorType("F16", 1, 2, _decode_f16),
    3: TensorType("Q4_1", 32, 20, _decode_q4_1),
    8: TensorType("Q8_0", 32, 34, _decode_q8_0),
}


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

    @property
    def content(self) -> mmap.mmap:
        """The file's bytes."""
        return self._map

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
                f"{self._name}: tensor {name} has type {_GGML_NAMES.get(kind, kind)}; supported are {known}"
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
