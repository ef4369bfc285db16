"""Adapter uploads: the gate, and the canonical file whose hash is the version.

An upload (PEFT's adapter_config.json + adapter_model.safetensors) is taken whole or refused with all reasons. The
canonical file holds exactly the pairs that will be computed: one safetensors file, metadata ``format``
= ``tenora-lora-1`` and ``pairs`` = JSON list of [layer, module, rank, scale]; tensors ``{layer}.{module}.A`` [r, in]
and ``.B`` [out, r] in that order, dtypes as uploaded. A module is a linear of the layer ("q_proj") or of one of its
experts ("experts.3.gate_proj"), however the upload had these.
"""

import hashlib
import json
import os
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from tenants.adapters.experts import Slice
from tenants.adapters.plan import Plan, UploadLimits, make_plan
from tenants.adapters.shape import PARTS, AdapterShape
from tenants.adapters.values import chunks
from tenants.errors import TenantsError

FORMAT = "tenora-lora-1"


@dataclass(frozen=True, slots=True)
class CanonicalAdapter:
    """An accepted upload. ``num_pairs`` is how many A/B pairs the file held: all of them will be computed."""

    sha256: str
    size_bytes: int
    lora_rank: int  # the largest
    target_modules: tuple[str, ...]  # "experts.gate_proj" for those of experts
    num_pairs: int
    warnings: tuple[str, ...] = ()


class InvalidAdapter(TenantsError):
    """An upload that is refused; ``reasons`` are all there are, in words for the uploader."""

    def __init__(self, reasons: list[str]) -> None:
        super().__init__("; ".join(reasons))
        self.reasons = reasons


def canonicalise(
    config_json: bytes, weights: Path, out: Path, shape: AdapterShape, limits: UploadLimits
) -> CanonicalAdapter:
    """Checks an upload and writes its canonical form to ``out``, in memory bounded by the header.

    The same config and tensors give the same bytes. Raises InvalidAdapter, with ``out`` removed; blocks: use a
    thread or a worker. Nobody may write to ``weights`` meanwhile.
    """
    try:
        with _open_regular(weights) as file:
            plan = make_plan(config_json, file, shape, limits)
            if plan.reasons:
                raise InvalidAdapter(plan.reasons)
            sha256, size_bytes = _write(out, file, plan)
    except BaseException:
        out.unlink(missing_ok=True)
        raise
    return CanonicalAdapter(
        sha256=sha256,
        size_bytes=size_bytes,
        lora_rank=max(pair.lora_rank for pair, _ in plan.pairs),
        target_modules=_target_modules(plan, shape),
        num_pairs=plan.num_pairs,
        warnings=tuple(plan.warnings),
    )


def _target_modules(plan: Plan, shape: AdapterShape) -> tuple[str, ...]:
    found = {pair.module for pair, _ in plan.pairs}
    parts = {module.rpartition(".")[2] for module in found if module.startswith("experts.")}
    plain = (name for name in shape.modules if name in found)
    return (*plain, *(f"experts.{part}" for part in PARTS if part in parts))


def _open_regular(path: Path) -> BinaryIO:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise InvalidAdapter([f"adapter_model.safetensors can't be opened: {error.strerror}"]) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise InvalidAdapter(["adapter_model.safetensors isn't a regular file"])
    return os.fdopen(descriptor, "rb")


def _write(out: Path, file: BinaryIO, plan: Plan) -> tuple[str, int]:
    """The canonical file, its hash and size. Bytes are copied from ``file``, never decoded."""
    digest, size_bytes = hashlib.sha256(), 0
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(out, flags, 0o600), "wb") as target:
        for piece in _pieces(file, plan):
            target.write(piece)
            digest.update(piece)
            size_bytes += len(piece)
    return digest.hexdigest(), size_bytes


def _pieces(file: BinaryIO, plan: Plan) -> Iterator[bytes]:
    yield _header(plan)
    for pair, _ in plan.pairs:
        for side in ("A", "B"):
            half = pair.halves[side]
            if isinstance(half, Slice):
                yield half.items.tobytes()
            else:
                yield from chunks(file, half)


def _header(plan: Plan) -> bytes:
    pairs = [[pair.layer, pair.module, pair.lora_rank, scale] for pair, scale in plan.pairs]
    header: dict[str, Any] = {"__metadata__": {"format": FORMAT, "pairs": json.dumps(pairs, separators=(",", ":"))}}
    offset = 0
    for pair, _ in plan.pairs:
        for side in ("A", "B"):
            half = pair.halves[side]
            end = offset + half.num_bytes
            header[f"{pair.layer}.{pair.module}.{side}"] = {
                "dtype": half.dtype,
                "shape": list(half.shape),
                "data_offsets": [offset, end],
            }
            offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
