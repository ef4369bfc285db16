"""Tiny models of every dense family that is served, and the same models as transformers and PEFT compute them.

Sizes are chosen so that a mistake shows: head sizes other than hidden / heads, multi-query and grouped heads, tied
and untied heads, biases that matter, norms far from one, rope stretched within the test's positions, a window that
the prompts cross.
"""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.models.config import (
    FAMILIES,
    AttentionConfig,
    FrequencyDivisors,
    Llama3Scaling,
    ModelConfig,
    RopeConfig,
)
from tests.tiny import Adapter, hf_config, tiny_adapter, tiny_config, tiny_weights, write_peft_dir

WINDOW = 40  # no multiple of a block or a tile, shorter than half of the prompts
_LLAMA3 = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context_tokens=64)
_TINY = replace(tiny_config(), hidden_size=48, intermediate_size=80)


def _config(family: str, attention: AttentionConfig, **changes: Any) -> ModelConfig:
    known = FAMILIES[family]
    biases = {"bias": bool(known.qkv_bias), "output_bias": bool(known.output_bias), "head_norms": known.head_norms}
    return replace(_TINY, family=family, attention=replace(attention, **biases), **changes)


DENSE: dict[str, ModelConfig] = {
    "smollm2": _config("llama", AttentionConfig(3, 1, 64), tie_word_embeddings=True),
    "llama3": _config("llama", AttentionConfig(4, 2, 64), rope=RopeConfig(500.0, _LLAMA3)),
    "llama-biases": replace(_TINY, attention=AttentionConfig(4, 4, 12, bias=True, output_bias=True)),
    "mistral": _config("mistral", AttentionConfig(4, 2, 96, sliding_window=WINDOW)),
    "qwen2": _config("qwen2", AttentionConfig(6, 2, 64), tie_word_embeddings=True, rope=RopeConfig(1e6)),
    "qwen2-window": _config("qwen2", AttentionConfig(2, 1, 80, sliding_window=WINDOW)),
    "qwen3": _config("qwen3", AttentionConfig(4, 2, 128), tie_word_embeddings=True, rope=RopeConfig(1e6)),
    "qwen3-256": _config("qwen3", AttentionConfig(2, 2, 256)),
}


def family_weights(config: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Random weights by Hugging Face name."""
    draw = torch.Generator().manual_seed(77 + seed)
    attention = config.attention
    weights = tiny_weights(seed, dtype, replace(config, attention=replace(attention, bias=False)))
    for name, weight in list(weights.items()):
        module = name.removesuffix(".weight").rpartition(".")[2]
        if (attention.bias and module in ("q_proj", "k_proj", "v_proj")) or (
            attention.output_bias and module == "o_proj"
        ):
            bias = torch.randn(len(weight), generator=draw) * 0.3
            weights[name.replace(".weight", ".bias")] = bias.to(dtype)
    if attention.head_norms or attention.whole_norms:
        sizes = (attention.num_heads, attention.num_kv_heads) if attention.whole_norms else (1, 1)
        for layer in range(config.num_layers):
            for part, num_heads in zip(("q_norm", "k_norm"), sizes, strict=True):
                norm = 1 + 0.3 * torch.randn(num_heads * attention.head_dim, generator=draw)
                weights[f"model.layers.{layer}.self_attn.{part}.weight"] = norm.to(dtype)
    return weights


def family_adapters(config: ModelConfig) -> dict[str, Adapter]:
    """Four of other ranks, scales and targets; "d" leaves a layer out."""
    adapters = {
        "a": tiny_adapter(1, rank=4, config=config),
        "b": tiny_adapter(2, rank={"q_proj": 4, "v_proj": 8}, modules=("q_proj", "v_proj"), config=config),
        "c": tiny_adapter(3, rank=16, modules=("gate_proj", "down_proj"), config=config),
        "d": tiny_adapter(4, rank=2, modules=("k_proj", "o_proj", "up_proj"), layers=(1,), config=config),
    }
    scales = {"a": 0.5, "b": 2.0, "c": 0.5, "d": 1.0}
    return {
        name: {place: (low, high, scales[name]) for place, (low, high, _) in adapter.items()}
        for name, adapter in adapters.items()
    }


def family_config(config: ModelConfig, dtype: torch.dtype = torch.float32, spelling: int = 4) -> dict[str, Any]:
    """``config.json`` as transformers 4 or 5 writes it."""
    raw = hf_config(config, dtype)
    raw |= {"attention_bias": config.attention.output_bias, "use_sliding_window": bool(config.attention.sliding_window)}
    raw["max_window_layers"] = 0
    scaling = config.rope.scaling
    assert not isinstance(scaling, FrequencyDivisors)
    rope = {} if scaling is None else {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_context_tokens,
    }  # fmt: skip
    if spelling == 4:
        return raw | ({"rope_scaling": rope} if rope else {})
    raw["rope_parameters"] = {"rope_type": "default", **rope, "rope_theta": raw.pop("rope_theta")}
    raw["dtype"] = raw.pop("torch_dtype")
    return raw


class HfModel:
    """transformers' model of the same weights in fp32 on the CPU, with PEFT's adapters on it."""

    def __init__(self, raw_config: Mapping[str, Any], weights: Mapping[str, Tensor], adapters: Mapping[str, Path]):
        import transformers  # takes seconds: only the tests that need it pay

        known = {key: value for key, value in raw_config.items() if key not in ("model_type", "architectures")}
        config = transformers.AutoConfig.for_model(raw_config["model_type"], **known)
        config._attn_implementation = "eager"
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        state = {name: weight.float() for name, weight in weights.items()}
        if config.tie_word_embeddings:
            state["lm_head.weight"] = state["model.embed_tokens.weight"]
        model.load_state_dict(state, assign=True)
        model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its frequencies are no weights
        self._model = model.eval()
        self._peft = None
        for name, path in adapters.items():
            self._add(name, path)

    def _add(self, name: str, path: Path) -> None:
        import peft

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT finds no base model of that name: there is none
            if self._peft is None:
                self._peft = peft.PeftModel.from_pretrained(self._model, str(path), adapter_name=name).eval()
            else:
                self._peft.load_adapter(str(path), adapter_name=name)

    @torch.inference_mode()
    def logits(self, tokens: list[int], adapter: str = "") -> Tensor:
        """Of all positions, [T, V]; ``adapter`` '' = the base model."""
        ids = torch.tensor([tokens])
        if self._peft is None:
            assert not adapter
            return self._model(input_ids=ids, use_cache=False).logits[0]
        if not adapter:
            with self._peft.disable_adapter():
                return self._peft(input_ids=ids, use_cache=False).logits[0]
        self._peft.set_adapter(adapter)
        return self._peft(input_ids=ids, use_cache=False).logits[0]


def peft_dirs(folder: Path, adapters: Mapping[str, Adapter]) -> dict[str, Path]:
    """The adapters as PEFT stores them."""
    return {name: write_peft_dir(folder / name, adapter) for name, adapter in adapters.items()}
