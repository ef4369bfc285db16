"""Adapter files as uploaders write them, byte by byte: no library stands between a test and what it sends."""

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Allowed:
    max_adapter_rank: int = 16
    max_adapter_bytes: int = 1 << 20


def container(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def safetensors(tensors: dict[str, np.ndarray], dtype: str = "F32") -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, values in tensors.items():
        raw = encode(values, dtype)
        header[name] = {
            "dtype": dtype,
            "shape": list(values.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    return container(header, data)


def encode(values: np.ndarray, dtype: str) -> bytes:
    if dtype == "BF16":
        return (values.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
    with np.errstate(over="ignore"):  # beyond F16: infinite, as any writer has it
        return values.astype({"F32": "<f4", "F16": "<f2"}[dtype]).tobytes()


def config(**change: Any) -> bytes:
    values = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM", "init_lora_weights": True}
    return json.dumps(values | change).encode()


def listed(path: Path) -> list[list[Any]]:
    content = path.read_bytes()
    (size,) = struct.unpack_from("<Q", content)
    return json.loads(json.loads(content[8 : 8 + size])["__metadata__"]["pairs"])


def scales(path: Path) -> dict[tuple[int, str], float]:
    return {(layer, module): scale for layer, module, _, scale in listed(path)}


def canonical_pairs(path: Path) -> dict[tuple[int, str], tuple[np.ndarray, np.ndarray, float]]:
    """A canonical file's pairs: (layer, module) → A [r, in], B [out, r], scale, read by its own words."""
    content = path.read_bytes()
    (size,) = struct.unpack_from("<Q", content)
    header, data = json.loads(content[8 : 8 + size]), content[8 + size :]

    def values(name: str) -> np.ndarray:
        entry = header[name]
        first, last = entry["data_offsets"]
        return decode(data[first:last], entry["dtype"]).reshape(entry["shape"])

    return {
        (layer, module): (values(f"{layer}.{module}.A"), values(f"{layer}.{module}.B"), scale)
        for layer, module, _, scale in listed(path)
    }


def decode(raw: bytes, dtype: str) -> np.ndarray:
    if dtype == "BF16":
        return (np.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4")
    return np.frombuffer(raw, {"F32": "<f4", "F16": "<f2"}[dtype]).astype(np.float32)
