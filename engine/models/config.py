"""What a decoder is made of: sizes and choices, read from a Hugging Face ``config.json``.

Accepts the spellings of transformers 4 and 5 (``rope_theta`` or ``rope_parameters``). Anything that this
decoder would compute wrongly is refused by name, never ignored.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

ATTENTION_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_MODULES = ("gate_proj", "up_proj", "down_proj")
MODULES = (*ATTENTION_MODULES, *MLP_MODULES)
EXPERT = "experts."  # begins the name of what each expert has one of; of one expert: experts.3.gate_proj
SCALE = "_scale"  # behind the name of a weight of 8 bits: its scales, fp32, as QuantisedWeight has them


class UnsupportedConfig(ValueError):
    """The configuration asks for something that the decoder does not compute; the message names it."""


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's stretch of the long rope wavelengths (``rope_type: llama3``)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_tokens: int


@dataclass(frozen=True, slots=True)
class FrequencyDivisors:
    """What each of the D/2 inverse frequencies is divided by: how GGUF files write Llama 3.1's stretch."""

    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    theta: float = 10_000.0
    scaling: Llama3Scaling | FrequencyDivisors | None = None


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """``bias`` is that of q, k and v, ``output_bias`` that of o. ``sliding_window`` counts the visible positions, a
    token's own among them; None = all. ``head_norms``: q and k are normalised by head before rope; ``whole_norms``:
    each over all of its heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    bias: bool = False
    sliding_window: int | None = None
    output_bias: bool = False
    head_norms: bool = False
    whole_norms: bool = False


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Experts in ``layers``; the others are dense. Weights of the chosen sum to 1 where ``renormalize``.
    ``shared_intermediate_size`` 0 = no shared expert."""

    num_experts: int
    top_k: int
    intermediate_size: int
    renormalize: bool
    layers: tuple[int, ...]
    shared_intermediate_size: int = 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes of one model. ``family`` is Hugging Face's ``model_type``, a key of the decoder's table of parts."""

    family: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    vocab_size: int
    context_tokens: int
    attention: AttentionConfig
    rope: RopeConfig
    rms_norm_eps: float
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None = None
    moe: MoeConfig | None = None


def module_sizes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """The adaptable linears, which every layer has: name → (in, out), in the order of MODULES.

    With experts they are those of attention: an adapter's module is one of all layers, and dense MLPs are in some
    layers only, or none.
    """
    attention = config.attention
    query, key_value = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    sizes = (
        (hidden, query),
        (hidden, key_value),
        (hidden, key_value),
        (query, hidden),
        (hidden, inner),
        (hidden, inner),
        (inner, hidden),
    )
    adaptable = MODULES if config.moe is None else ATTENTION_MODULES
    return {name: size for name, size in zip(MODULES, sizes, strict=True) if name in adaptable}


def expert_sizes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """The linears that each expert of ``config.moe.layers`` has: EXPERT + name → (in, out). Empty without experts."""
    if config.moe is None:
        return {}
    hidden, inner = config.hidden_size, config.moe.intermediate_size
    sizes = (hidden, inner), (hidden, inner), (inner, hidden)
    return {EXPERT + name: size for name, size in zip(MLP_MODULES, sizes, strict=True)}


def _no_window(raw: Mapping[str, Any]) -> int | None:
    """Llama has none: transformers ignores the key, its author did not."""
    if raw.get("sliding_window"):
        raise UnsupportedConfig(f"sliding_window {raw['sliding_window']} in a {raw['model_type']} model")
    return None


def _window_of_all(raw: Mapping[str, Any]) -> int | None:
    return raw.get("sliding_window")


def _window_if_used(raw: Mapping[str, Any]) -> int | None:
    """Qwen: the layers of that type or else those from ``max_window_layers`` on, if ``use_sliding_window`` says so."""
    window = raw.get("sliding_window") if raw.get("use_sliding_window") else None
    num_layers = _required(raw, "num_hidden_layers")
    first = min(raw["max_window_layers"], num_layers)
    if raw.get("layer_types"):
        first = 0 if "sliding_attention" in raw["layer_types"] else num_layers
    if window is None or first == num_layers:
        return None
    if first == 0:
        return window
    raise UnsupportedConfig(f"max_window_layers {first}: a sliding window in some of the layers")


def _window_of_all_if_used(raw: Mapping[str, Any]) -> int | None:
    return raw.get("sliding_window") if raw.get("use_sliding_window") else None


def _window_not_used(raw: Mapping[str, Any]) -> int | None:
    if raw.get("use_sliding_window"):
        raise UnsupportedConfig("use_sliding_window: a sliding window in some of the layers")
    return None


@dataclass(frozen=True, slots=True)
class ExpertKeys:
    """What config.json calls the width of an expert. ``renormalize`` None = as ``norm_topk_prob`` says."""

    width: str = "moe_intermediate_size"
    renormalize: bool | None = None


@dataclass(frozen=True, slots=True)
class Family:
    """What a ``model_type`` means where config.json does not say: as transformers' classes have it.

    ``qkv_bias`` and ``output_bias``: True, False, or None = as ``attention_bias`` says (``bias_key`` for q, k and v).
    ``defaults`` are keys that a config.json may leave out and that are not those of Llama. ``experts`` None = dense.
    """

    qkv_bias: bool | None = None
    output_bias: bool | None = None
    head_norms: bool = False
    window: Callable[[Mapping[str, Any]], int | None] = _no_window
    defaults: Mapping[str, Any] = field(default_factory=dict)
    bias_key: str = "attention_bias"
    whole_norms: bool = False
    experts: ExpertKeys | None = None


# by model_type; decoder.py has the parts of each
FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "mistral": Family(False, False, window=_window_of_all, defaults={"num_key_value_heads": 8, "sliding_window": 4096}),
    "qwen2": Family(
        True, False, window=_window_if_used,
        defaults={"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
    ),
    "qwen3": Family(
        head_norms=True, window=_window_if_used,
        defaults={"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096, "max_window_layers": 28},
    ),
    "mixtral": Family(
        False, False, window=_window_of_all, experts=ExpertKeys("intermediate_size", True),
        defaults={"num_key_value_heads": 8, "rope_theta": 1e6, "rms_norm_eps": 1e-5},
    ),
    "qwen2_moe": Family(
        bias_key="qkv_bias", output_bias=False, window=_window_not_used, experts=ExpertKeys(),
        defaults={"num_key_value_heads": 16, "qkv_bias": True},
    ),
    "qwen3_moe": Family(
        head_norms=True, window=_window_of_all_if_used, experts=ExpertKeys(),
        defaults={"num_key_value_heads": 4, "sliding_window": 4096},
    ),
    "olmoe": Family(
        whole_norms=True, experts=ExpertKeys("intermediate_size"), defaults={"rms_norm_eps": 1e-5},
    ),
}  # fmt: skip


def from_hf(raw: dict[str, Any]) -> ModelConfig:
    """``config.json`` as a dict → ModelConfig. Raises UnsupportedConfig, which names the key."""
    if _required(raw, "model_type") not in FAMILIES:
        raise UnsupportedConfig(f"model_type {raw['model_type']!r}: computed are {', '.join(FAMILIES)}")
    family = FAMILIES[raw["model_type"]]
    raw = {**family.defaults, **raw}
    _refuse_unknown_choices(raw)
    return ModelConfig(
        family=_required(raw, "model_type"),
        hidden_size=_required(raw, "hidden_size"),
        intermediate_size=_required(raw, "intermediate_size"),
        num_layers=_required(raw, "num_hidden_layers"),
        vocab_size=_required(raw, "vocab_size"),
        context_tokens=_required(raw, "max_position_embeddings"),
        attention=_attention(raw, family),
        rope=_rope(raw),
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
        tie_word_embeddings=raw.get("tie_word_embeddings", False),
        eos_token_ids=_token_ids(raw.get("eos_token_id")),
        bos_token_id=raw.get("bos_token_id"),
        moe=_moe(raw, family.experts) if family.experts else None,
    )


def _refuse_unknown_choices(raw: dict[str, Any]) -> None:
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise UnsupportedConfig(f"hidden_act {raw['hidden_act']!r}: only silu is computed")
    if raw.get("mlp_bias"):
        raise UnsupportedConfig("mlp_bias: biases of the MLP are not computed")
    if raw.get("clip_qkv") is not None:
        raise UnsupportedConfig(f"clip_qkv {raw['clip_qkv']}: clipping of q, k and v is not computed")
    if raw.get("pretraining_tp", 1) not in (None, 1):
        raise UnsupportedConfig(f"pretraining_tp {raw['pretraining_tp']}: only 1 is computed")
    if len(set(raw.get("layer_types") or ())) > 1:
        raise UnsupportedConfig(f"layer_types {sorted(set(raw['layer_types']))}: layers of several kinds")


def _attention(raw: dict[str, Any], family: Family) -> AttentionConfig:
    num_heads = _required(raw, "num_attention_heads")
    num_kv_heads = raw.get("num_key_value_heads") or num_heads
    if num_heads % num_kv_heads:
        raise UnsupportedConfig(f"num_key_value_heads {num_kv_heads} does not divide num_attention_heads {num_heads}")
    head_dim = raw.get("head_dim") or _required(raw, "hidden_size") // num_heads
    if head_dim % 2:
        raise UnsupportedConfig(f"head_dim {head_dim}: rope rotates pairs, an even size is needed")
    said = bool(raw.get("attention_bias"))
    return AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        bias=bool(raw.get(family.bias_key)) if family.qkv_bias is None else family.qkv_bias,
        sliding_window=family.window(raw),
        output_bias=said if family.output_bias is None else family.output_bias,
        head_norms=family.head_norms,
        whole_norms=family.whole_norms,
    )


def _rope(raw: dict[str, Any]) -> RopeConfig:
    parameters = raw.get("rope_parameters") or {}
    scaling = raw.get("rope_scaling") or {}
    theta = float(parameters.get("rope_theta", raw.get("rope_theta", 10_000.0)))
    chosen = {**scaling, **parameters}
    if chosen.get("partial_rotary_factor", raw.get("partial_rotary_factor") or 1.0) != 1.0:
        raise UnsupportedConfig("partial_rotary_factor: rope over a part of each head")
    kind = chosen.get("rope_type") or chosen.get("type") or "default"
    if kind == "default":
        return RopeConfig(theta)
    if kind != "llama3":
        raise UnsupportedConfig(f"rope_type {kind!r}: default and llama3 are computed")
    return RopeConfig(theta, _llama3(chosen))


def _llama3(chosen: dict[str, Any]) -> Llama3Scaling:
    return Llama3Scaling(
        factor=float(_required(chosen, "factor")),
        low_freq_factor=float(_required(chosen, "low_freq_factor")),
        high_freq_factor=float(_required(chosen, "high_freq_factor")),
        original_context_tokens=int(_required(chosen, "original_max_position_embeddings")),
    )


def _moe(raw: dict[str, Any], keys: ExpertKeys) -> MoeConfig:
    # Mixtral's word; transformers 5 writes it for Qwen3-MoE too
    num_experts = raw.get("num_local_experts") or _required(raw, "num_experts")
    top_k = _required(raw, "num_experts_per_tok")
    if not 1 <= top_k <= num_experts:
        raise UnsupportedConfig(f"num_experts_per_tok {top_k} of {num_experts} experts")
    return MoeConfig(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=_required(raw, keys.width),
        renormalize=bool(raw.get("norm_topk_prob")) if keys.renormalize is None else keys.renormalize,
        layers=_moe_layers(raw),
        shared_intermediate_size=raw.get("shared_expert_intermediate_size") or 0,
    )


def _moe_layers(raw: dict[str, Any]) -> tuple[int, ...]:
    every, dense = raw.get("decoder_sparse_step") or 1, raw.get("mlp_only_layers") or ()
    layers = tuple(i for i in range(_required(raw, "num_hidden_layers")) if (i + 1) % every == 0 and i not in dense)
    if not layers:
        raise UnsupportedConfig(f"decoder_sparse_step {every} and mlp_only_layers leave no layer with experts")
    return layers


def _token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _required(raw: Mapping[str, Any], key: str) -> Any:
    if raw.get(key) is None:
        raise UnsupportedConfig(f"config lacks {key}")
    return raw[key]
