"""What an upload comes to: the pairs that will be computed with their scales, or all that speaks against it."""

import os
from collections import Counter
from dataclasses import dataclass, field
from typing import BinaryIO, Protocol, TypeAlias

from tenants.adapters.bounded_json import clip, clip_all
from tenants.adapters.config import AdapterSettings, read_config
from tenants.adapters.experts import ExpertPair, Fused, expert_pairs, read_fused
from tenants.adapters.header import BadHeader, read_header
from tenants.adapters.scales import Scales
from tenants.adapters.shape import AdapterShape
from tenants.adapters.tensor_names import Binding, Pair, bind, canonical_order
from tenants.adapters.values import MAX_DELTA_NORM, MAX_MAGNITUDE, Magnitude, measure

Scaled: TypeAlias = tuple[Pair | ExpertPair, float]


class UploadLimits(Protocol):
    """What the tenant may upload (``tenants.directory.AdapterLimits`` has it)."""

    @property
    def max_adapter_rank(self) -> int: ...
    @property
    def max_adapter_bytes(self) -> int: ...


_HOW_TO_SERVE = "(its engine has no --expert-adapter-slots)"


@dataclass(slots=True)
class Plan:
    """``pairs`` are in canonical order; ``num_pairs`` counts those of the file (one for a parameter of all experts)."""

    pairs: list[Scaled] = field(default_factory=list)
    num_pairs: int = 0
    reasons: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Read:
    """An upload as it was read, each part for itself."""

    settings: AdapterSettings
    binding: Binding
    magnitudes: dict[str, Magnitude]


def make_plan(config_json: bytes, file: BinaryIO, shape: AdapterShape, limits: UploadLimits) -> Plan:
    """All reasons of config and tensors together; tensors are looked at only where the header is sound."""
    settings = read_config(config_json)
    plan = Plan(reasons=list(settings.reasons))
    size = os.fstat(file.fileno()).st_size
    if size > limits.max_adapter_bytes:
        plan.reasons.append(f"adapter_model.safetensors has {size} bytes, {limits.max_adapter_bytes} are allowed")
        return plan
    try:
        entries = read_header(file, size, shape.max_tensors)
    except BadHeader as error:
        plan.reasons += error.reasons
        return plan
    if len(entries) > shape.max_tensors:
        plan.reasons.append(f"safetensors: {len(entries)} tensors, the model can take {shape.max_tensors}")
    binding = bind(entries, shape)
    _set_pairs(plan, file, _Read(settings, binding, {entry.name: measure(file, entry) for entry in entries}), shape)
    plan.reasons += _rank_reasons(plan.pairs, min(shape.max_lora_rank, limits.max_adapter_rank))
    plan.warnings += _target_warnings(settings, binding) + _model_warnings(settings, shape)
    return plan


def _set_pairs(plan: Plan, file: BinaryIO, read: _Read, shape: AdapterShape) -> None:
    """The pairs that fit, with their scales; reasons for the others."""
    scales, fused = Scales(read.settings), read_fused(read.binding.fused, read.settings, shape)
    misfits = {pair.path: _misfits(pair, shape) for pair in read.binding.pairs}
    wrong = [text for texts in misfits.values() for text in texts]
    found = [pair for pair in read.binding.pairs if not misfits[pair.path]] + fused.fused
    scaled = [(each, scales.of(each.path, each.lora_rank)) for each in found]
    for each, scale in scaled:
        parts = expert_pairs(file, each, shape) if isinstance(each, Fused) else [each]
        plan.pairs += [(part, scale) for part in parts]
    plan.pairs.sort(key=lambda pair: canonical_order(pair[0].layer, pair[0].module))
    plan.num_pairs = len(read.binding.pairs) + len(read.binding.fused)
    plan.reasons += read.binding.reasons + fused.reasons
    plan.reasons += [f"shapes that don't fit the model: {clip_all(wrong)}"] if wrong else []
    plan.reasons += _expert_reasons(plan.pairs, shape) + _value_reasons(read) + _norm_reasons(read, scaled)
    plan.warnings += fused.warnings + scales.warnings()


def _misfits(pair: Pair, shape: AdapterShape) -> list[str]:
    in_size, out_size = shape.size_of(pair.module)
    a, b = pair.halves["A"], pair.halves["B"]
    wrong = []
    if len(a.shape) != 2 or a.shape[1] != in_size:
        wrong.append(f"{a.name} {list(a.shape)} instead of [r, {in_size}]")
    if len(b.shape) != 2 or b.shape[0] != out_size or b.shape[1] != a.shape[0]:
        wrong.append(f"{b.name} {list(b.shape)} instead of [{out_size}, r]")
    return wrong


def _expert_reasons(pairs: list[Scaled], shape: AdapterShape) -> list[str]:
    modules = [(pair.layer, pair.module) for pair, _ in pairs if pair.module.startswith("experts.")]
    twice = [f"{layer}.{module}" for (layer, module), count in Counter(modules).items() if count > 1]
    reasons = [f"two pairs for one place: {clip_all(twice)}"] if twice else []
    if modules and shape.experts is not None and not shape.experts.served:
        parts = sorted({module.rpartition(".")[2] for _, module in modules})
        layers = len({layer for layer, _ in modules})
        where = f"{', '.join(parts)} in {layers} layers"
        reasons.append(f"LoRA on experts ({where}) is not served with this model {_HOW_TO_SERVE}")
    elif shape.experts is not None and shape.experts.max_lora_rank:
        reasons += _expert_rank_reasons(pairs, shape.experts.max_lora_rank)
    return reasons


def _expert_rank_reasons(pairs: list[Scaled], limit: int) -> list[str]:
    over = [pair.lora_rank for pair, _ in pairs if pair.module.startswith("experts.") and pair.lora_rank > limit]
    if not over:
        return []
    return [
        f"LoRA on experts has rank {max(over)}, over the limit of {limit} (--max-expert-adapter-rank; in {len(over)} "
        "pairs)"
    ]


def _rank_reasons(pairs: list[Scaled], limit: int) -> list[str]:
    over = [pair.lora_rank for pair, _ in pairs if pair.lora_rank > limit]
    if not over:
        return []
    return [f"LoRA rank {max(over)} is over the limit of {limit} (in {len(over)} of {len(pairs)} pairs)"]


def _value_reasons(read: _Read) -> list[str]:
    sizes = {name: magnitude.largest for name, magnitude in read.magnitudes.items()}
    endless = [name for name, size in sizes.items() if size == float("inf")]
    large = [name for name, size in sizes.items() if MAX_MAGNITUDE < size < float("inf")]
    reasons = [f"values that are NaN or infinite: {clip_all(endless)}"] if endless else []
    if large:
        reasons.append(f"values over {MAX_MAGNITUDE:g} in magnitude: {clip_all(large)}")
    pairs = read.binding.pairs + read.binding.fused
    if pairs and not any(all(sizes[half.name] for half in pair.halves.values()) for pair in pairs):
        reasons.append("every pair has a half that is all zero: the adapter would change nothing")
    return reasons


def _norm_reasons(read: _Read, scaled: list[tuple[Pair | Fused, float]]) -> list[str]:
    """‖scale · B · A‖ ≤ scale · ‖B‖ · ‖A‖, which is bounded; of an expert by its share of the fused norms."""
    over = []
    for each, scale in scaled:
        first, second = (read.magnitudes[half.name].norm for half in each.halves.values())
        if MAX_DELTA_NORM * each.num_experts < scale * first * second < float("inf"):
            over.append(each.path)
    return [f"scale · ‖B‖ · ‖A‖ is over {MAX_DELTA_NORM:g} at {clip_all(over)}"] if over else []


def _target_warnings(settings: AdapterSettings, binding: Binding) -> list[str]:
    """Where a list of targets and the tensors disagree: the tensors count, but a part of the file may be missing."""
    endings = {pair.path: _endings(pair.path) for pair in binding.pairs}
    layers = {pair.layer for pair in binding.pairs + binding.fused}
    warnings = []
    if settings.target_modules is not None:
        named, held = set(settings.target_modules), set().union(*endings.values())
        absent = [name for name in settings.target_modules if name not in held]
        strange = sorted({path.rpartition(".")[2] for path, ends in endings.items() if not ends & named})
        warnings += [f"target_modules: the file has nothing of {clip_all(absent)}"] if absent else []
        warnings += [f"target_modules doesn't name {clip_all(strange)}; the tensors count"] if strange else []
    if settings.layers_to_transform is not None and not layers <= set(settings.layers_to_transform):
        strange = sorted(layers - set(settings.layers_to_transform))
        warnings.append(f"layers_to_transform doesn't name {clip_all([str(layer) for layer in strange])}")
    return warnings


def _endings(path: str) -> set[str]:
    parts = path.split(".")
    return {".".join(parts[start:]) for start in range(len(parts))}


def _model_warnings(settings: AdapterSettings, shape: AdapterShape) -> list[str]:
    trained_on = settings.base_model.rstrip("/").rpartition("/")[2].lower()
    served = {name.lower() for name in shape.served_models}
    if not trained_on or not served or trained_on in served:
        return []
    return [f"trained on {clip(settings.base_model)}, served on {clip_all(sorted(shape.served_models))}"]
