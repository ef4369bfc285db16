"""``adapter_config.json`` of an upload: a closed schema. Nothing of it is ever given to PEFT.

Every key that PEFT 0.21 writes is named here. What would change the computation and isn't served is refused by
name; what only steered training is ignored; an unknown key must have an empty value.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tenants.adapters.bounded_json import clip, clip_all, parse_object
from tenants.adapters.patterns import are_few, is_simple

MAX_CONFIG_BYTES = 1 << 20
MAX_ALPHA = 65_536.0
DEFAULT_ALPHA = DEFAULT_RANK = 8  # PEFT's, for files that leave them out

_READ = {
    "peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias", "task_type",
    "init_lora_weights", "base_model_name_or_path", "target_modules", "layers_to_transform", "target_parameters",
    "peft_version",
}  # fmt: skip
_IGNORED = {  # training, provenance, or said by the tensors' own keys
    "auto_mapping", "ensure_weight_tying", "eva_config", "exclude_modules", "inference_mode", "layers_pattern",
    "lora_dropout", "megatron_core", "qalora_group_size", "revision", "runtime_config",
}  # fmt: skip
_REFUSED = {  # unless empty: what it would need
    "alora_invocation_tokens": "activated LoRA",
    "arrow_config": "Arrow routing",
    "corda_config": "CorDA changes the base weights",
    "fan_in_fan_out": "transposed weights",
    "kasa_config": "KaSA",
    "layer_replication": "replicated layers",
    "loftq_config": "LoftQ changes the base weights",
    "lora_bias": "biases of LoRA layers",
    "lora_ga_config": "LoRA-GA changes the base weights",
    "megatron_config": "Megatron layers",
    "modules_to_save": "full weights in an adapter",
    "monteclora_config": "MonteCLoRA",
    "trainable_token_indices": "trained token embeddings",
    "use_bdlora": "block-diagonal LoRA",
    "use_dora": "DoRA",
    "use_qalora": "QALoRA",
    "velora_config": "VeLoRA",
}
_PLAIN_INITS = (True, False, None, "gaussian", "orthogonal", "eva")  # those that leave the base weights alone


@dataclass(slots=True)
class AdapterSettings:
    """What of the config counts; ``reasons`` speak against the upload.

    ``target_modules`` and ``layers_to_transform`` are None where the config leaves them to a rule or says nothing:
    they never decide what is loaded. ``is_swapped``: whether fused experts are as PEFT wrote them before 0.20; None =
    unknown.
    """

    alpha: float = DEFAULT_ALPHA
    rank: int = DEFAULT_RANK
    use_rslora: bool = False
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    base_model: str = ""
    target_modules: list[str] | None = None
    layers_to_transform: list[int] | None = None
    target_parameters: list[str] = field(default_factory=list)
    is_swapped: bool | None = None
    reasons: list[str] = field(default_factory=list)


def read_config(data: bytes) -> AdapterSettings:
    """Never raises for what an uploader wrote: all that is wrong stands in ``reasons``."""
    try:
        raw = parse_object(data, MAX_CONFIG_BYTES, max_depth=8)
    except (ValueError, RecursionError) as error:
        return AdapterSettings(reasons=[f"adapter_config.json: {error}"])
    settings = AdapterSettings()
    settings.reasons += _kind_reasons(raw) + _refused_reasons(raw) + _unknown_reasons(raw)
    settings.rank = _field(settings, raw, "r", DEFAULT_RANK, _is_rank)
    settings.alpha = _field(settings, raw, "lora_alpha", DEFAULT_ALPHA, _is_alpha)
    settings.use_rslora = bool(
        _field(settings, raw, "use_rslora", None, lambda value: type(value) in (bool, type(None)))
    )
    settings.rank_pattern = _pattern(settings, raw, "rank_pattern", _is_rank)
    settings.alpha_pattern = _pattern(settings, raw, "alpha_pattern", _is_alpha)
    base_model = raw.get("base_model_name_or_path")
    settings.base_model = base_model if isinstance(base_model, str) else ""
    _read_targets(settings, raw)
    return settings


def _read_targets(settings: AdapterSettings, raw: dict[str, Any]) -> None:
    """What the config says of the places; a regex or "all-linear" is a rule of the trainer's, never run."""
    targets = _field(settings, raw, "target_modules", None, lambda value: isinstance(value, str) or _is_names(value))
    settings.target_modules = targets if targets and isinstance(targets, list) else None
    layers = _field(settings, raw, "layers_to_transform", None, _are_layers)
    settings.layers_to_transform = [layers] if isinstance(layers, int) else layers or None
    settings.target_parameters = _field(settings, raw, "target_parameters", None, _is_names) or []
    settings.is_swapped = _is_swapped(raw.get("peft_version"))


def _is_swapped(version: Any) -> bool | None:
    """PEFT 0.20 changed it; what was built between 0.19 and 0.20 may be either."""
    match = re.match(r"(\d{1,4})\.(\d{1,4})\b", version, re.ASCII) if isinstance(version, str) else None
    if match is None:
        return None
    release = int(match[1]), int(match[2])
    return None if "dev" in version and (0, 19) <= release <= (0, 20) else release < (0, 20)


def _kind_reasons(raw: dict[str, Any]) -> list[str]:
    reasons = []
    if raw.get("peft_type") != "LORA":
        reasons.append(f"peft_type: {_shown(raw.get('peft_type'))} is not supported, only LORA")
    if raw.get("bias", "none") not in ("none", None):
        reasons.append(f"bias: {_shown(raw['bias'])} is not supported (trained biases), only none")
    if raw.get("task_type") not in ("CAUSAL_LM", None):
        reasons.append(f"task_type: {_shown(raw['task_type'])} is not supported, only CAUSAL_LM")
    init = raw.get("init_lora_weights")
    if not any(init is each or (isinstance(init, str) and init == each) for each in _PLAIN_INITS):
        reasons.append(f"init_lora_weights: {_shown(init)} is not supported (it changes the base weights)")
    return reasons


def _refused_reasons(raw: dict[str, Any]) -> list[str]:
    found = [key for key in raw if key in _REFUSED and not _is_empty(raw[key])]
    return [f"{key}: {_shown(raw[key])} is not supported ({_REFUSED[key]})" for key in sorted(found)]


def _unknown_reasons(raw: dict[str, Any]) -> list[str]:
    unknown = [key for key in raw if key not in _READ | _IGNORED | _REFUSED.keys() and not _is_empty(raw[key])]
    return [f"adapter_config.json: unknown keys: {clip_all(sorted(unknown))}"] if unknown else []


def _field(settings: AdapterSettings, raw: dict[str, Any], key: str, default: Any, check: Callable[[Any], bool]) -> Any:
    value = raw.get(key, default)
    if check(value):
        return value
    settings.reasons.append(f"{key}: {_shown(value)} is out of range")
    return default


def _pattern(settings: AdapterSettings, raw: dict[str, Any], key: str, check: Callable[[Any], bool]) -> dict[str, Any]:
    value = raw.get(key) or {}
    if not isinstance(value, dict):
        settings.reasons.append(f"{key}: must be an object")
        return {}
    complex_forms = [pattern for pattern in value if not is_simple(pattern)]
    if complex_forms:
        settings.reasons.append(
            f"{key}: only literal suffixes and simple forms are read, not {clip_all(complex_forms)}"
        )
    elif not are_few(value):
        settings.reasons.append(f"{key}: patterns of too many different forms")
        return {}
    out_of_range = [pattern for pattern in value if not check(value[pattern])]
    if out_of_range:
        settings.reasons.append(f"{key}: values out of range at {clip_all(out_of_range)}")
    return {} if complex_forms or out_of_range else value


def _is_rank(value: Any) -> bool:
    return type(value) is int and 1 <= value <= 1 << 20


def _is_alpha(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value <= MAX_ALPHA


def _is_names(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(isinstance(each, str) for each in value))


def _are_layers(value: Any) -> bool:
    listed = value if isinstance(value, list) else [value]
    return value is None or all(type(each) is int for each in listed)


def _is_empty(value: Any) -> bool:
    return value is None or value is False or value in ("", [], {})


def _shown(value: Any) -> str:
    return clip(str(value), 60)
