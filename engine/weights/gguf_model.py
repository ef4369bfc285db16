"""A GGUF file as Hugging Face would have written it: config keys, tensor names, and the order of q and k rows."""

import re
from typing import Any

import numpy as np
import torch

from engine.weights.errors import UnsupportedModel
from engine.weights.gguf import Array, GgufFile

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
}
_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
ARCHITECTURES = ("llama",)


def hf_config(file: GgufFile) -> dict[str, Any]:
    """``config.json`` of the same model. Raises UnsupportedModel for an architecture or a feature not served."""
    metadata = file.metadata
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise UnsupportedModel(f"GGUF architecture {architecture!r}; supported are {', '.join(ARCHITECTURES)}")
    _refuse_features(metadata, architecture)

    def field(name: str, default: Any = None) -> Any:
        value = metadata.get(f"{architecture}.{name}", default)
        if value is None:
            raise UnsupportedModel(f"the GGUF metadata has no {architecture}.{name}")
        return value

    num_heads = field("attention.head_count")
    head_dim = field("rope.dimension_count", field("embedding_length") // num_heads)
    if metadata.get(f"{architecture}.attention.key_length", head_dim) != head_dim:
        raise UnsupportedModel(f"{architecture}.rope.dimension_count {head_dim}: rotating part of a head")
    return {
        "model_type": architecture,
        "hidden_size": field("embedding_length"),
        "intermediate_size": field("feed_forward_length"),
        "num_hidden_layers": field("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": field("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
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
    if metadata.get("split.count", 1) > 1:
        raise UnsupportedModel("split.count: a GGUF model in several files")


def _decimal(value: float) -> float:
    """A float32's shortest decimal: what config.json had before it became 32 bits."""
    return float(str(np.float32(value)))


def read_weights(file: GgufFile, config: dict[str, Any], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """All tensors by Hugging Face name, in ``dtype``. Raises UnsupportedModel for a tensor without such a name."""
    names = {name: hf_name(name) for name in file.tensors}
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    weights = {}
    for name, hugging_face in names.items():
        values = file.read(name)
        module = hugging_face.removesuffix(".weight").rpartition(".")[2]
        if module in heads:
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


def unpermute(weight: Array, num_heads: int) -> Array:
    """Undoes llama.cpp's reordering of q and k rows: [pair, half] within a head back to [half, pair]."""
    rows, columns = weight.shape
    halves = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows, columns)
