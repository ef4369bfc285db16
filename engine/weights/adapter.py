"""Canonical adapter files (``tenants/adapters/gate.py`` writes them) → LoRA pairs.

One safetensors file: metadata ``format`` = ``tenora-lora-1`` and ``pairs`` = JSON list of [layer, module, rank,
scale]; tensors ``{layer}.{module}.A`` [r, in] and ``.B`` [out, r]. Its SHA-256 is the adapter version.
"""

import hashlib
import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from engine.models.config import EXPERT
from engine.weights.errors import CorruptAdapter

FORMAT = "tenora-lora-1"


@dataclass(frozen=True)
class LoraPair:
    """ΔW = scale · B·A, with A [r, in] and B [out, r] in the dtype of the upload."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float


@dataclass(frozen=True)
class AdapterWeights:
    """Pairs by (layer, module); ``num_bytes`` is what their tensors take in host memory."""

    pairs: dict[tuple[int, str], LoraPair]
    num_bytes: int

    @property
    def has_experts(self) -> bool:
        """Whether it has pairs of single experts."""
        return any(module.startswith(EXPERT) for _, module in self.pairs)


def read_adapter(path: Path, sha256: str) -> AdapterWeights:
    """Reads the file whole and checks its hash before it parses anything. Raises CorruptAdapter, or OSError."""
    content = path.read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise CorruptAdapter(f"the file's SHA-256 is {found}, expected {sha256}")
    try:
        pairs = _pairs(_metadata(content), load(content))
    except (SafetensorError, KeyError, ValueError, TypeError, struct.error) as error:
        raise CorruptAdapter(f"not a canonical adapter: {error!r}") from error
    num_bytes = sum(pair.a.nbytes + pair.b.nbytes for pair in pairs.values())
    return AdapterWeights(pairs, num_bytes)


def _metadata(content: bytes) -> list[list[Any]]:
    (size,) = struct.unpack_from("<Q", content)
    metadata = json.loads(content[8 : 8 + size])["__metadata__"]
    if metadata["format"] != FORMAT:
        raise ValueError(f"format {metadata['format']!r}")
    return json.loads(metadata["pairs"])


def _pairs(listed: list[list[Any]], tensors: dict[str, torch.Tensor]) -> dict[tuple[int, str], LoraPair]:
    pairs = {}
    for layer, module, rank, scale in listed:
        a, b = tensors.pop(f"{layer}.{module}.A"), tensors.pop(f"{layer}.{module}.B")
        if a.shape[0] != rank or b.shape[1] != rank:
            raise ValueError(f"{layer}.{module} isn't of rank {rank}")
        pairs[layer, module] = LoraPair(a, b, float(scale))
    if tensors:
        raise ValueError(f"{len(tensors)} tensors without an entry")
    return pairs
