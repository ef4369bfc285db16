"""ggml's block types one weight at a time, written from ggml-quants.c's ``dequantize_row_*``: slow, and independent of
engine/weights. Every step is rounded to float32, as ggml computes."""

import struct
from collections.abc import Callable, Iterator

import numpy as np

f32 = np.float32


def _half(block: bytes, at: int) -> np.float32:
    return f32(struct.unpack_from("<e", block, at)[0])


def f32_(block: bytes) -> Iterator[np.float32]:
    yield f32(struct.unpack("<f", block)[0])


def f16(block: bytes) -> Iterator[np.float32]:
    yield _half(block, 0)


def bf16(block: bytes) -> Iterator[np.float32]:
    yield f32(struct.unpack("<f", b"\0\0" + block)[0])


def q4_0(block: bytes) -> Iterator[np.float32]:
    d = _half(block, 0)
    for i in range(32):
        byte = block[2 + i % 16]
        yield f32((byte >> 4 if i >= 16 else byte & 15) - 8) * d


def q4_1(block: bytes) -> Iterator[np.float32]:
    d, m = _half(block, 0), _half(block, 2)
    for i in range(32):
        byte = block[4 + i % 16]
        yield f32(byte >> 4 if i >= 16 else byte & 15) * d + m


def _five_bits(block: bytes, high_at: int, low_at: int, i: int) -> int:
    high = int.from_bytes(block[high_at : high_at + 4], "little") >> i & 1
    byte = block[low_at + i % 16]
    return (byte >> 4 if i >= 16 else byte & 15) + 16 * high


def q5_0(block: bytes) -> Iterator[np.float32]:
    d = _half(block, 0)
    for i in range(32):
        yield f32(_five_bits(block, 2, 6, i) - 16) * d


def q5_1(block: bytes) -> Iterator[np.float32]:
    d, m = _half(block, 0), _half(block, 2)
    for i in range(32):
        yield f32(_five_bits(block, 4, 8, i)) * d + m


def q8_0(block: bytes) -> Iterator[np.float32]:
    d = _half(block, 0)
    for q in struct.unpack_from("<32b", block, 2):
        yield f32(q) * d


def _scale_and_minimum(q: bytes, j: int) -> tuple[int, int]:
    """get_scale_min_k4 of ggml-quants.c."""
    if j < 4:
        return q[j] & 63, q[j + 4] & 63
    return (q[j + 4] & 15) | ((q[j - 4] >> 6) << 4), (q[j + 4] >> 4) | ((q[j] >> 6) << 4)


def q4_k(block: bytes) -> Iterator[np.float32]:
    d, dmin, scales = _half(block, 0), _half(block, 2), block[4:16]
    for group in range(8):
        scale, minimum = _scale_and_minimum(scales, group)
        for i in range(32):
            byte = block[16 + group // 2 * 32 + i]
            q = byte >> 4 if group % 2 else byte & 15
            yield d * f32(scale) * f32(q) - dmin * f32(minimum)


def q6_k(block: bytes) -> Iterator[np.float32]:
    d = _half(block, 208)
    for i in range(256):
        half, quarter, place = i // 128, i % 128 // 32, i % 32
        byte = block[64 * half + 32 * (quarter % 2) + place]
        low = byte >> 4 if quarter >= 2 else byte & 15
        high = block[128 + 32 * half + place] >> (2 * quarter) & 3
        (scale,) = struct.unpack_from("<b", block, 192 + 8 * half + 2 * quarter + place // 16)
        yield d * f32(scale) * f32((low | high << 4) - 32)


# name → ggml's number, weights and bytes of a block, places of its halves, decoder
TYPES: dict[str, tuple[int, int, int, tuple[int, ...], Callable[[bytes], Iterator[np.float32]]]] = {
    "F32": (0, 1, 4, (), f32_),
    "F16": (1, 1, 2, (0,), f16),
    "BF16": (30, 1, 2, (), bf16),
    "Q4_0": (2, 32, 18, (0,), q4_0),
    "Q4_1": (3, 32, 20, (0, 2), q4_1),
    "Q5_0": (6, 32, 22, (0,), q5_0),
    "Q5_1": (7, 32, 24, (0, 2), q5_1),
    "Q8_0": (8, 32, 34, (0,), q8_0),
    "Q4_K": (12, 256, 144, (0, 2), q4_k),
    "Q6_K": (14, 256, 210, (208,), q6_k),
}


def random_rows(kind: str, num_rows: int, num_columns: int, draw: np.random.Generator) -> np.ndarray:
    """uint8 [rows, bytes of a row]: any bits in the integers, weights of about one in the whole."""
    _, weights, size, halves, _ = TYPES[kind]
    if not kind.startswith("Q"):
        values = draw.normal(size=(num_rows, num_columns)).astype("<f4")
        if kind == "BF16":
            return (values.view("<u4") >> 16).astype("<u2").view(np.uint8)
        return (values.astype("<f2") if kind == "F16" else values).view(np.uint8)
    blocks = draw.integers(0, 256, (num_rows, num_columns // weights, size), dtype=np.uint8)
    step = {"Q8_0": 0.01, "Q4_K": 0.003, "Q6_K": 0.0005}.get(kind, 0.1)
    for at in halves:
        values = draw.uniform(-step, step, blocks.shape[:2]).astype("<f2")
        blocks[..., at : at + 2] = values.view(np.uint8).reshape(*blocks.shape[:2], 2)
    return blocks.reshape(num_rows, -1)


def decode(kind: str, rows: np.ndarray) -> np.ndarray:
    """uint8 [rows, bytes] → float32 [rows, columns]."""
    _, _, size, _, decoder = TYPES[kind]
    data = rows.tobytes()
    values = [value for at in range(0, len(data), size) for value in decoder(data[at : at + size])]
    return np.array(values, np.float32).reshape(len(rows), -1)
