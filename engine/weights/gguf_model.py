"""A GGUF file as Hugging Face would have written it: config keys, tensor names, and the order of q and k rows."""

import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from engine.models.config import FrequencyDivisors, ModelConfig, from_hf
from engine.weights.errors import UnsupportedModel
from engine.weights.gguf import GgufFile
from engine.weights.gguf_types import Array

_TOP = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight"}  # fmt: skip
_IN_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "attn_q.bias": "self_attn.q_proj.bias",
    "attn_k.bias": "self_attn.k_proj.bias",
    "attn_v.bias": "self_attn.v_proj.bias",
    "attn_output.bias": "self_attn.o_proj.bias",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
}
_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_ROPE_DIVISORS = "rope_freqs.weight"  # Llama 3.1's stretch, worked out by llama.cpp's converter


@dataclass(frozen=True, slots=True)
class Architecture:
    """``reordered``: llama.cpp stores the rows of q and k in the order of its own rope."""

    family: str
    reordered: bool


ARCHITECTURES = {  # by general.architecture; Mistral and SmolLM2 files say "llama"
    "llama": Architecture("llama", reordered=True),
    "qwen2": Architecture("qwen2", reordered=False),
    "qwen3": Architecture("qwen3", reordered=False),
}


def model_config(file: GgufFile) -> ModelConfig:
    """Raises UnsupportedModel for an architecture or a feature not served, UnsupportedConfig for an odd size."""
    config = from_hf(_hf_config(file))
    if _ROPE_DIVISORS not in file.tensors:
        return config
    divisors = file.read(_ROPE_DIVISORS)
    if divisors.shape != (config.attention.head_dim // 2,):
        raise UnsupportedModel(f"{_ROPE_DIVISORS} has shape {divisors.shape}")
    scaling = FrequencyDivisors(tuple(divisors.tolist()))
    return replace(config, rope=replace(config.rope, scaling=scaling))


def _architecture(file: GgufFile) -> str:
    name = file.metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        raise UnsupportedModel(f"GGUF architecture {name!r}; supported are {', '.join(ARCHITECTURES)}")
    return name


def _hf_config(file: GgufFile) -> dict[str, Any]:
    """``config.json`` of the same model."""
    metadata, architecture = file.metadata, _architecture(file)
    _refuse_features(metadata, architecture)

    def field(name: str, default: Any = None) -> Any:
        value = metadata.get(f"{architecture}.{name}", default)
        if value is None:
            raise UnsupportedModel(f"the GGUF metadata has no {architecture}.{name}")
        if isinstance(value, np.ndarray):
            raise UnsupportedModel(f"{architecture}.{name} differs by layer")
        return value

    num_heads = field("attention.head_count")
    head_dim = field("attention.key_length", field("embedding_length") // num_heads)
    for other in ("rope.dimension_count", "attention.value_length"):
        if field(other, head_dim) != head_dim:
            raise UnsupportedModel(f"{architecture}.{other} {field(other)}: heads of {head_dim} that are not all alike")
    return {
        "model_type": ARCHITECTURES[architecture].family,
        "hidden_size": field("embedding_length"),
        "intermediate_size": field("feed_forward_length"),
        "num_hidden_layers": field("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": field("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "vocab_size": file.tensors["token_embd.weight"].shape[0] if "token_embd.weight" in file.tensors else 0,
        "max_position_embeddings": field("context_length"),
        "rms_norm_eps": _decimal(field("attention.layer_norm_rms_epsilon")),
        "rope_theta": _decimal(field("rope.freq_base", 10_000.0)),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _end_tokens(metadata),
    }


def _end_tokens(metadata: dict[str, Any]) -> list[int]:
    """End of sequence and, where a model has one, end of turn."""
    ids = {metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot")}
    return sorted(index for index in ids if index is not None)


def _refuse_features(metadata: dict[str, Any], architecture: str) -> None:
    if metadata.get(f"{architecture}.expert_count", 0):
        raise UnsupportedModel(f"{architecture}.expert_count: experts in GGUF files")
    if metadata.get(f"{architecture}.rope.scaling.type", "none") != "none":
        raise UnsupportedModel(f"{architecture}.rope.scaling.type {metadata[f'{architecture}.rope.scaling.type']!r}")
    if metadata.get(f"{architecture}.attention.sliding_window", 0):
        raise UnsupportedModel(f"{architecture}.attention.sliding_window in a GGUF file")
    if metadata.get("split.count", 1) > 1:
        raise UnsupportedModel("split.count: a GGUF model in several files")


def _decimal(value: float) -> float:
    """A float32's shortest decimal: what config.json had before it became 32 bits."""
    return float(str(np.float32(value)))


def read_weights(file: GgufFile, config: ModelConfig, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """All tensors by Hugging Face name, in ``dtype``. Raises UnsupportedModel for a tensor without such a name."""
    names = {name: hf_name(name) for name in file.tensors if name != _ROPE_DIVISORS}
    heads = {"q_proj": config.attention.num_heads, "k_proj": config.attention.num_kv_heads}
    reordered = heads if ARCHITECTURES[_architecture(file)].reordered else {}
    weights = {}
    for name, hugging_face in names.items():
        values = file.read(name)
        module = hugging_face.split(".")[-2]
        if module in reordered:
            values = unpermute(values, heads[module])
        weights[hugging_face] = torch.from_numpy(values).to(dtype)
    return weights


def hf_name(name: str) -> str:
    """``blk.3.attn_q.weight`` → ``model.layers.3.self_attn.q_proj.weight``. Raises UnsupportedModel."""
    if name in _TOP:
        return _TOP[name]
    match = _LAYER.fullmatch(name)
    if match is None or match[2] not in _IN_LAYER:
        raise UnsupportedModel(f"GGUF tensor {name}")
    return f"model.layers.{match[1]}.{_IN_LAYER[match[2]]}"


def unpermute(rows: Array, num_heads: int) -> Array:
    """Undoes llama.cpp's reordering of q and k rows (a weight's or a bias's): [pair, half] within a head back to
    [half, pair]. Raises UnsupportedModel for a number of rows that no such heads have."""
    if len(rows) % (2 * num_heads):
        raise UnsupportedModel(f"{len(rows)} rows of q or k in {num_heads} heads")
    halves = rows.reshape(num_heads, len(rows) // num_heads // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)
