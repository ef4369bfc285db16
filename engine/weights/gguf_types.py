"""The tensor types of GGUF files: blocks of bytes → float32, as ggml computes them.

Block layouts are those of ggml's ``ggml-common.h``; a further type is one more entry of TENSOR_TYPES.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class TensorType:
    """One ggml type: ``decode`` turns [blocks, block_bytes] uint8 into [blocks, block_weights] float32 of its own."""

    name: str
    block_weights: int
    block_bytes: int
    decode: Callable[[Array], Array]


def _decode_f32(blocks: Array) -> Array:
    return blocks.view("<f4").astype(np.float32)


def _decode_f16(blocks: Array) -> Array:
    return blocks.view("<f2").astype(np.float32)


def _decode_bf16(blocks: Array) -> Array:
    """The upper half of a float32."""
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _decode_q8_0(blocks: Array) -> Array:
    """Block: f16 d, 32 × int8 q; weight = d·q."""
    weights = blocks[:, 2:].view(np.int8).astype(np.float32)
    weights *= _half(blocks, 0)
    return weights


def _decode_q4_0(blocks: Array) -> Array:
    """Block: f16 d, 16 bytes of two nibbles; weight = d·(q - 8)."""
    weights = _nibbles(blocks[:, 2:]).astype(np.float32)
    weights -= 8
    weights *= _half(blocks, 0)
    return weights


def _decode_q4_1(blocks: Array) -> Array:
    """Block: f16 d, f16 m, 16 bytes of two nibbles; weight = d·q + m."""
    weights = _nibbles(blocks[:, 4:]).astype(np.float32)
    weights *= _half(blocks, 0)
    weights += _half(blocks, 2)
    return weights


def _decode_q5_0(blocks: Array) -> Array:
    """Block: f16 d, 32 fifth bits, 16 bytes of two nibbles; weight = d·(q - 16)."""
    weights = (_nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])).astype(np.float32)
    weights -= 16
    weights *= _half(blocks, 0)
    return weights


def _decode_q5_1(blocks: Array) -> Array:
    """Block: f16 d, f16 m, 32 fifth bits, 16 bytes of two nibbles; weight = d·q + m."""
    weights = (_nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])).astype(np.float32)
    weights *= _half(blocks, 0)
    weights += _half(blocks, 2)
    return weights


def _decode_q4_k(blocks: Array) -> Array:
    """Block of 8 × 32: f16 d, f16 dmin, 8 × (6-bit scale, 6-bit minimum) in 12 bytes, 128 bytes of two nibbles.

    weight = d·scale·q - dmin·minimum. Each 32 bytes hold two of the 8 groups, the first in the low nibbles.
    """
    scales, minimums = _six_bit_pairs(blocks[:, 4:16])
    pairs = blocks[:, 16:].reshape(len(blocks), 4, 1, 32)
    weights = np.concatenate((pairs & 15, pairs >> 4), axis=2).reshape(len(blocks), 8, 32).astype(np.float32)
    weights *= (_half(blocks, 0) * scales)[:, :, None]
    weights -= (_half(blocks, 2) * minimums)[:, :, None]
    return weights.reshape(len(blocks), 256)


def _six_bit_pairs(packed: Array) -> tuple[Array, Array]:
    """12 bytes → 8 scales and 8 minimums. The first four of each are the low 6 bits of bytes 0–3 and 4–7; the others
    have their low nibbles in bytes 8–11 and their high two bits on top of bytes 0–7."""
    first, second, low = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate((first & 63, (low & 15) | (first >> 6 << 4)), axis=1)
    minimums = np.concatenate((second & 63, (low >> 4) | (second >> 6 << 4)), axis=1)
    return scales.astype(np.float32), minimums.astype(np.float32)


def _decode_q6_k(blocks: Array) -> Array:
    """Block of 16 × 16: 128 bytes of low nibbles, 64 bytes of high bit pairs, 16 × int8 scale, f16 d.

    weight = d·scale·(q - 32). Each half of the block has 64 + 32 bytes for its 4 × 32 weights.
    """
    low = blocks[:, :128].reshape(len(blocks), 2, 1, 64)
    low = np.concatenate((low & 15, low >> 4), axis=2).reshape(len(blocks), 2, 4, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = blocks[:, 128:192].reshape(len(blocks), 2, 1, 32) >> shifts & 3
    weights = (low | high << 4).reshape(len(blocks), 16, 16).astype(np.float32)
    weights -= 32
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    weights *= (_half(blocks, 208) * scales)[:, :, None]
    return weights.reshape(len(blocks), 256)


def _nibbles(pairs: Array) -> Array:
    """16 bytes → 32 values: the low nibbles first, then the high ones."""
    nibbles = np.empty((len(pairs), 32), np.uint8)
    np.bitwise_and(pairs, 15, out=nibbles[:, :16])
    np.right_shift(pairs, 4, out=nibbles[:, 16:])
    return nibbles


def _fifth_bits(packed: Array) -> Array:
    """4 bytes → 32 values of 0 or 16, the lowest bit first."""
    return np.unpackbits(packed, axis=1, bitorder="little") << np.uint8(4)


def _half(blocks: Array, start: int) -> Array:
    return blocks[:, start : start + 2].copy().view("<f2").astype(np.float32)


TENSOR_TYPES = {
    0: TensorType("F32", 1, 4, _decode_f32),
    1: TensorType("F16", 1, 2, _decode_f16),
    2: TensorType("Q4_0", 32, 18, _decode_q4_0),
    3: TensorType("Q4_1", 32, 20, _decode_q4_1),
    6: TensorType("Q5_0", 32, 22, _decode_q5_0),
    7: TensorType("Q5_1", 32, 24, _decode_q5_1),
    8: TensorType("Q8_0", 32, 34, _decode_q8_0),
    12: TensorType("Q4_K", 256, 144, _decode_q4_k),
    14: TensorType("Q6_K", 256, 210, _decode_q6_k),
    30: TensorType("BF16", 1, 2, _decode_bf16),
}
OTHER_NAMES = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 13: "Q5_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip
