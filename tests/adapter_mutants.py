"""Adapters changed at random, from the slightly odd to the hostile; one (seed, index) is always the same upload.

What people do to their files happens to a ``Draft``, before it is bytes (adapter_mutations.py). What only an attacker
does happens to its header and its bytes, here.
"""

import json
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.adapter_drafts import Draft, dense_draft, expert_draft
from tests.adapter_files import encode
from tests.adapter_mutations import CHANGES, ODDITIES, USUAL


@dataclass(frozen=True)
class Mutant:
    """An upload and what was done to it."""

    config: bytes
    weights: bytes
    has_experts: bool
    steps: tuple[str, ...]


def mutant(seed: int, index: int) -> Mutant:
    rng = random.Random(f"{seed}:{index}")
    draft, steps = (expert_draft if rng.random() < 0.15 else dense_draft)(rng), []
    # a third stays an adapter that someone might send; another third has one thing wrong with it
    kinds = [USUAL] * rng.randint(0, 3) + [CHANGES] * rng.choice([0, 0, 1, 2]) + [ODDITIES] * rng.choice([0, 0, 1])
    for kind in kinds:
        change = rng.choice(kind)
        change(rng, draft)
        steps.append(change.__name__)
    header, data = _layout(draft)
    for damage in rng.sample(HEADER_DAMAGES, rng.choice([0, 0, 0, 1, 2])):
        damage(rng, header)
        steps.append(damage.__name__)
    text, weights = json.dumps(draft.config).encode(), _file(json.dumps(header).encode(), data)
    if rng.random() < 0.25:
        damage = rng.choice(FILE_DAMAGES)
        weights = damage(rng, weights)
        steps.append(damage.__name__)
    if rng.random() < 0.12:
        damage = rng.choice(TEXT_DAMAGES)
        text = damage(rng, text)
        steps.append(damage.__name__)
    return Mutant(text, weights, draft.has_experts, tuple(steps))


# ── to bytes, and what can be done to them ───────────────────────────────────────────────────────


def _layout(draft: Draft) -> tuple[dict[str, Any], bytes]:
    header: dict[str, Any] = {"__metadata__": draft.metadata} if draft.metadata is not None else {}
    data = b""
    for name, (dtype, values) in draft.tensors.items():
        raw = encode(values, dtype)
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    return header, data


def _file(text: bytes, data: bytes) -> bytes:
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def _entry(rng: random.Random, header: dict[str, Any]) -> dict[str, Any]:
    """One that no damage has torn yet."""
    whole = [entry for entry in header.values() if isinstance(entry, dict) and set(entry) >= FIELDS]
    whole = [entry for entry in whole if all(isinstance(entry[name], list) for name in ("shape", "data_offsets"))]
    whole = [entry for entry in whole if len(entry["data_offsets"]) == 2 and entry["shape"]]
    return rng.choice(whole) if whole else {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


FIELDS = {"dtype", "shape", "data_offsets"}
WEIRD = (-1, 0, 1, 2, 3, True, None, 1.5, "4", [], {}, 2**31, 2**53, 2**63, 2**64, 10**30, [1], "F64", "I8", "bf16")


def offsets_moved(rng: random.Random, header: dict[str, Any]) -> None:
    entry = _entry(rng, header)
    by = rng.choice([-8, -4, 4, 8, 1 << 40])
    entry["data_offsets"][1] += by
    entry["data_offsets"][0] += by * rng.choice([0, 1])


def offsets_swapped(rng: random.Random, header: dict[str, Any]) -> None:
    one, other = _entry(rng, header), _entry(rng, header)
    one["data_offsets"], other["data_offsets"] = other["data_offsets"], one["data_offsets"]


def shape_turned(rng: random.Random, header: dict[str, Any]) -> None:
    _entry(rng, header)["shape"].reverse()


def shape_weird(rng: random.Random, header: dict[str, Any]) -> None:
    shape = _entry(rng, header)["shape"]
    shape[rng.randrange(len(shape))] = rng.choice(WEIRD)


def field_weird(rng: random.Random, header: dict[str, Any]) -> None:
    _entry(rng, header)[rng.choice(["dtype", "shape", "data_offsets", "more"])] = rng.choice(WEIRD)


def field_gone(rng: random.Random, header: dict[str, Any]) -> None:
    del _entry(rng, header)[rng.choice(["dtype", "shape", "data_offsets"])]


def entry_weird(rng: random.Random, header: dict[str, Any]) -> None:
    header[rng.choice(list(header))] = rng.choice(WEIRD)


def many_entries(rng: random.Random, header: dict[str, Any]) -> None:
    header |= {f"w{index}": _entry(rng, header) for index in range(rng.choice([10, 200, 2000]))}


HEADER_DAMAGES: tuple[Callable[[random.Random, dict[str, Any]], None], ...] = (
    offsets_swapped, shape_turned, shape_weird, offsets_moved, field_weird, many_entries, field_gone, entry_weird,
)  # fmt: skip


def bytes_changed(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randint(1, 8)):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def header_bytes_changed(rng: random.Random, data: bytes) -> bytes:
    (size,) = struct.unpack_from("<Q", data)
    return bytes_changed(rng, data[: 8 + size]) + data[8 + size :]


def cut(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data))]


def extended(rng: random.Random, data: bytes) -> bytes:
    return data + rng.randbytes(rng.choice([1, 8, 4096]))


def length_changed(rng: random.Random, data: bytes) -> bytes:
    (size,) = struct.unpack_from("<Q", data)
    return struct.pack("<Q", rng.choice([0, 1, size - 1, size + 1, size + 8, 2**31, 2**63, 2**64 - 1])) + data[8:]


def key_doubled(rng: random.Random, data: bytes) -> bytes:
    (size,) = struct.unpack_from("<Q", data)
    text = data[8 : 8 + size].rstrip()
    return _file(text[:-1] + b"," + text[1:], data[8 + size :])


def another_file(rng: random.Random, data: bytes) -> bytes:
    return rng.choice([b"PK\x03\x04", b"\x80\x04cos\nsystem\n.", b"GGUF", b"{", b""]) + data[: rng.randrange(200)]


def deep_header(rng: random.Random, data: bytes) -> bytes:
    depth = rng.choice([4, 1000, 100_000])
    return _file(b'{"__metadata__":' + b"[" * depth + b"]" * depth + b"}", b"")


FILE_DAMAGES: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    bytes_changed, header_bytes_changed, header_bytes_changed, cut, extended, length_changed, key_doubled,
    another_file, deep_header,
)  # fmt: skip


def text_key_doubled(rng: random.Random, text: bytes) -> bytes:
    return text[:-1] + b', "r": 4}'


def text_constant(rng: random.Random, text: bytes) -> bytes:
    return text[:-1] + b', "lora_dropout": ' + rng.choice([b"NaN", b"Infinity", b"-Infinity", b"1e999"]) + b"}"


def text_deep(rng: random.Random, text: bytes) -> bytes:
    depth = rng.choice([9, 1000, 100_000])
    return text[:-1] + b', "revision": ' + b"[" * depth + b"]" * depth + b"}"


def text_long(rng: random.Random, text: bytes) -> bytes:
    return text[:-1] + b', "revision": "' + b"a" * rng.choice([1000, 1 << 20]) + b'"}'


def text_with_mark(rng: random.Random, text: bytes) -> bytes:
    return b"\xef\xbb\xbf" + text


TEXT_DAMAGES: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    bytes_changed, cut, extended, text_key_doubled, text_constant, text_deep, text_long, text_with_mark,
)  # fmt: skip
