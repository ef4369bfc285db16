"""Adapter uploads: the gate, and the canonical file whose hash is the version.

An upload (PEFT's adapter_config.json + adapter_model.safetensors) is taken whole or refused with all reasons. The
canonical file holds exactly the pairs that will be computed: one safetensors file, metadata ``format``
= ``tenora-lora-1`` and ``pairs`` = JSON list of [layer, module, rank, scale]; tensors ``{layer}.{module}.A`` [r, in]
and ``.B`` [out, r] in that order, dtypes as uploaded.
"""

import hashlib
import json
import os
import stat
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from tenants.adapter_config import AdapterSettings, read_config
from tenants.adapter_header import BadHeader, TensorEntry, read_header
from tenants.adapter_json import clip, clip_all
from tenants.adapter_keys import Pair, bind
from tenants.adapter_patterns import Patterns
from tenants.adapter_values import MAX_MAGNITUDE, chunks, largest
from tenants.errors import TenantsError

FORMAT = "tenora-lora-1"


@dataclass(frozen=True, slots=True)
class AdapterShape:
    """What the base model can take: ``modules`` maps each adaptable linear to (in, out).

    ``served_models`` are the names the base model goes by; an adapter trained on another name gets a warning.
    """

    modules: dict[str, tuple[int, int]]
    num_layers: int
    max_lora_rank: int
    served_models: frozenset[str] = frozenset()

    @property
    def max_tensors(self) -> int:
        return 2 * self.num_layers * len(self.modules)


class UploadLimits(Protocol):
    """What the tenant may upload (``tenants.directory.AdapterLimits`` has it)."""

    @property
    def max_adapter_rank(self) -> int: ...
    @property
    def max_adapter_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class CanonicalAdapter:
    """An accepted upload. ``num_pairs`` is both what the file held and what will be computed."""

    sha256: str
    size_bytes: int
    lora_rank: int  # the largest
    target_modules: tuple[str, ...]
    num_pairs: int
    warnings: tuple[str, ...] = ()


class InvalidAdapter(TenantsError):
    """An upload that is refused; ``reasons`` are all there are, in words for the uploader."""

    def __init__(self, reasons: list[str]) -> None:
        super().__init__("; ".join(reasons))
        self.reasons = reasons


@dataclass(slots=True)
class _Plan:
    """What an upload comes to: the pairs with their scales, or the reasons against it."""

    pairs: list[tuple[Pair, float]] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def canonicalise(
    config_json: bytes, weights: Path, out: Path, shape: AdapterShape, limits: UploadLimits
) -> CanonicalAdapter:
    """Checks an upload and writes its canonical form to ``out``, in memory bounded by the header.

    The same config and tensors give the same bytes. Raises InvalidAdapter, with ``out`` removed; blocks: use a
    thread or a worker.
    """
    try:
        with _open_regular(weights) as file:
            plan = _plan(config_json, file, shape, limits)
            if plan.reasons:
                raise InvalidAdapter(plan.reasons)
            sha256, size_bytes = _write(out, file, plan)
    except BaseException:
        out.unlink(missing_ok=True)
        raise
    modules = {pair.module for pair, _ in plan.pairs}
    return CanonicalAdapter(
        sha256=sha256,
        size_bytes=size_bytes,
        lora_rank=max(pair.rank for pair, _ in plan.pairs),
        target_modules=tuple(name for name in shape.modules if name in modules),
        num_pairs=len(plan.pairs),
        warnings=tuple(plan.warnings),
    )


def _open_regular(path: Path) -> BinaryIO:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise InvalidAdapter([f"adapter_model.safetensors can't be opened: {error.strerror}"]) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise InvalidAdapter(["adapter_model.safetensors isn't a regular file"])
    return os.fdopen(descriptor, "rb")


def _plan(config_json: bytes, file: BinaryIO, shape: AdapterShape, limits: UploadLimits) -> _Plan:
    """All reasons of config and tensors together; values are read only where the header is sound."""
    settings = read_config(config_json)
    plan = _Plan(reasons=list(settings.reasons))
    size = os.fstat(file.fileno()).st_size
    if size > limits.max_adapter_bytes:
        plan.reasons.append(f"adapter_model.safetensors has {size} bytes, {limits.max_adapter_bytes} are allowed")
        return plan
    try:
        entries = read_header(file, size, shape.max_tensors)
    except BadHeader as error:
        plan.reasons += error.reasons
        return plan
    binding = bind(entries, shape.modules, shape.num_layers)
    plan.reasons += binding.reasons + _size_reasons(binding.pairs, shape)
    if not plan.reasons:  # shapes are those of matrices from here on
        plan.reasons += _rank_reasons(binding.pairs, min(shape.max_lora_rank, limits.max_adapter_rank))
    plan.reasons += _value_reasons(file, entries, binding.pairs)
    if not plan.reasons:
        _set_scales(plan, binding.pairs, settings)
        plan.warnings += _model_warnings(settings, shape)
    return plan


def _size_reasons(pairs: list[Pair], shape: AdapterShape) -> list[str]:
    wrong = []
    for pair in pairs:
        in_size, out_size = shape.modules[pair.module]
        a, b = pair.halves["A"], pair.halves["B"]
        if len(a.shape) != 2 or a.shape[1] != in_size:
            wrong.append(f"{a.name} {list(a.shape)} instead of [r, {in_size}]")
        if len(b.shape) != 2 or b.shape[0] != out_size or b.shape[1] != a.shape[0]:
            wrong.append(f"{b.name} {list(b.shape)} instead of [{out_size}, r]")
    return [f"shapes that don't fit the model: {clip_all(wrong)}"] if wrong else []


def _rank_reasons(pairs: list[Pair], limit: int) -> list[str]:
    over = [pair for pair in pairs if pair.rank > limit]
    if not over:
        return []
    rank = max(pair.rank for pair in over)
    return [f"LoRA rank {rank} is over the limit of {limit} (in {len(over)} of {len(pairs)} pairs)"]


def _value_reasons(file: BinaryIO, entries: list[TensorEntry], pairs: list[Pair]) -> list[str]:
    sizes = {entry.name: largest(file, entry) for entry in entries}
    endless = [name for name, size in sizes.items() if size == float("inf")]
    large = [name for name, size in sizes.items() if MAX_MAGNITUDE < size < float("inf")]
    reasons = [f"values that are NaN or infinite: {clip_all(endless)}"] if endless else []
    if large:
        reasons.append(f"values over {MAX_MAGNITUDE:g} in magnitude: {clip_all(large)}")
    if pairs and not any(all(sizes[half.name] for half in pair.halves.values()) for pair in pairs):
        reasons.append("every pair has a half that is all zero: the adapter would change nothing")
    return reasons


def _set_scales(plan: _Plan, pairs: list[Pair], settings: AdapterSettings) -> None:
    """Alpha by pattern, the rank always from the tensor (a config can be wrong about it: a warning)."""
    ranks, alphas = Patterns(list(settings.rank_pattern)), Patterns(list(settings.alpha_pattern))
    other_ranks = set()
    for pair in pairs:
        rank_key, alpha_key = ranks.find(pair.path), alphas.find(pair.path)
        declared = settings.rank if rank_key is None else settings.rank_pattern[rank_key]
        alpha = settings.alpha if alpha_key is None else settings.alpha_pattern[alpha_key]
        plan.pairs.append((pair, settings.scale(float(alpha), pair.rank)))
        if declared != pair.rank:
            other_ranks.add((declared, pair.rank))
    for declared, rank in sorted(other_ranks):
        plan.warnings.append(f"the config says rank {declared} where tensors have {rank}; the tensors count")
    for name, patterns in (("rank_pattern", ranks), ("alpha_pattern", alphas)):
        if patterns.unused():
            plan.warnings.append(f"{name}: no module matches {clip_all(patterns.unused())}")


def _model_warnings(settings: AdapterSettings, shape: AdapterShape) -> list[str]:
    trained_on = settings.base_model.rstrip("/").rpartition("/")[2].lower()
    served = {name.lower() for name in shape.served_models}
    if not trained_on or not served or trained_on in served:
        return []
    return [f"trained on {clip(settings.base_model)}, served on {clip_all(sorted(shape.served_models))}"]


def _write(out: Path, file: BinaryIO, plan: _Plan) -> tuple[str, int]:
    """The canonical file, its hash and size. Bytes are copied from ``file``, never decoded."""
    digest, size_bytes = hashlib.sha256(), 0
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(out, flags, 0o600), "wb") as target:
        for piece in _pieces(file, plan):
            target.write(piece)
            digest.update(piece)
            size_bytes += len(piece)
    return digest.hexdigest(), size_bytes


def _pieces(file: BinaryIO, plan: _Plan) -> Iterator[bytes]:
    halves = [(pair, side) for pair, _ in plan.pairs for side in ("A", "B")]
    yield _header(halves, [[pair.layer, pair.module, pair.rank, scale] for pair, scale in plan.pairs])
    for pair, side in halves:
        yield from chunks(file, pair.halves[side])


def _header(halves: Iterable[tuple[Pair, str]], pairs: list[list[Any]]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": FORMAT, "pairs": json.dumps(pairs, separators=(",", ":"))}}
    offset = 0
    for pair, side in halves:
        entry = pair.halves[side]
        end = offset + entry.num_bytes
        header[f"{pair.layer}.{pair.module}.{side}"] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
