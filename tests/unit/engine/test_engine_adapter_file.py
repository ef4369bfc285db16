"""Canonical adapter files, as the engine reads them."""

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.weights.adapter import read_adapter
from engine.weights.errors import CorruptAdapter
from tenants.adapters.gate import canonicalise
from tenants.adapters.shape import AdapterShape

ROOT = Path(__file__).parents[3]


class Allowed:
    max_adapter_rank = 64
    max_adapter_bytes = 1 << 30


def canonical(pairs: list[list[Any]], tensors: dict[str, torch.Tensor], form: str = "tenora-lora-1") -> bytes:
    """The format by its own words (contract of tenants/adapters/gate.py), written anew."""
    names = {torch.float32: "F32", torch.bfloat16: "BF16"}
    header: dict[str, Any] = {"__metadata__": {"format": form, "pairs": json.dumps(pairs, separators=(",", ":"))}}
    data = b""
    for name, tensor in tensors.items():
        raw = bytes(tensor.contiguous().view(torch.uint8).flatten().tolist())
        header[name] = {
            "dtype": names[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def write(path: Path, content: bytes) -> tuple[Path, str]:
    path.write_bytes(content)
    return path, hashlib.sha256(content).hexdigest()


A, B = torch.arange(24.0).reshape(2, 12), torch.arange(16.0).reshape(8, 2).to(torch.bfloat16)
GOOD = canonical([[3, "q_proj", 2, 0.5]], {"3.q_proj.A": A, "3.q_proj.B": B})


def test_pairs_come_with_their_place_scale_and_dtype(tmp_path: Path):
    weights = read_adapter(*write(tmp_path / "a", GOOD))

    (pair,) = weights.pairs.values()
    assert list(weights.pairs) == [(3, "q_proj")]
    assert torch.equal(pair.a, A)
    assert torch.equal(pair.b, B)
    assert (pair.a.dtype, pair.b.dtype, pair.scale) == (torch.float32, torch.bfloat16, 0.5)
    assert weights.num_bytes == 24 * 4 + 16 * 2


def test_what_the_upload_gate_writes_is_what_the_engine_reads(tmp_path: Path):
    source = ROOT / "gateway" / "demo" / "pirate"
    shape = AdapterShape({"q_proj": (576, 576), "v_proj": (576, 192)}, 30, 64)
    settings = (source / "adapter_config.json").read_bytes()
    accepted = canonicalise(settings, source / "adapter_model.safetensors", tmp_path / "a", shape, Allowed())

    weights = read_adapter(tmp_path / "a", accepted.sha256)

    assert len(weights.pairs) == accepted.num_pairs == 60
    assert {pair.scale for pair in weights.pairs.values()} == {2.0}
    assert weights.pairs[29, "v_proj"].a.shape == (4, 576)
    assert weights.pairs[29, "v_proj"].b.shape == (192, 4)
    assert weights.num_bytes == sum(pair.a.nbytes + pair.b.nbytes for pair in weights.pairs.values())


@pytest.mark.parametrize("at", [0, 20, len(GOOD) // 2, len(GOOD) - 1])
def test_one_changed_byte_is_found_by_the_hash(tmp_path: Path, at: int):
    path, sha256 = write(tmp_path / "a", GOOD)
    damaged = bytearray(GOOD)
    damaged[at] ^= 1
    path.write_bytes(damaged)

    with pytest.raises(CorruptAdapter, match="SHA-256"):
        read_adapter(path, sha256)


def test_a_cut_file_is_found_by_the_hash(tmp_path: Path):
    path, sha256 = write(tmp_path / "a", GOOD)
    path.write_bytes(GOOD[:-1])

    with pytest.raises(CorruptAdapter):
        read_adapter(path, sha256)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        canonical([[3, "q_proj", 2, 0.5]], {"3.q_proj.A": A, "3.q_proj.B": B}, form="tenora-lora-9"),
        canonical([[3, "q_proj", 4, 0.5]], {"3.q_proj.A": A, "3.q_proj.B": B}),
        canonical([[3, "q_proj", 2, 0.5]], {"3.q_proj.A": A}),
        canonical([], {"3.q_proj.A": A, "3.q_proj.B": B}),
        canonical([[3, "q_proj", 2]], {"3.q_proj.A": A, "3.q_proj.B": B}),
        struct.pack("<Q", 2) + b"{}",
    ],
    ids=["empty", "short", "format", "rank", "half", "unlisted", "no scale", "no metadata"],
)
def test_a_file_of_the_right_hash_and_another_form_is_corrupt_too(tmp_path: Path, content: bytes):
    with pytest.raises(CorruptAdapter, match="not a canonical adapter"):
        read_adapter(*write(tmp_path / "a", content))


def test_a_missing_file_is_the_worlds_trouble(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        read_adapter(tmp_path / "none", "0" * 64)
