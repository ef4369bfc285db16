"""The decoder: embedding, layers, final norm, head. Families differ by the parts in one table, never by an ``if``."""

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.batch import Batch
from engine.models.attention import Attention, KVCache, WholeNorms, inverse_frequencies
from engine.models.config import SCALE, ModelConfig
from engine.models.linear import Linear, LoraStep
from engine.models.lora_slots import LoraSlots
from engine.models.mlp import GatedMlp
from engine.models.moe import MoeMlp, expert_uses, moe_mlp
from kernels.linear import LinearWeight, linear
from kernels.qk_rope_kv import HeadNorms
from kernels.quantised_linear import QuantisedWeight
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rope import rope_table
from kernels.timing import timed

Weights = Mapping[str, Tensor]


class RmsNorm:
    def __init__(self, config: ModelConfig, weight: Tensor) -> None:
        self.weight = weight
        self.eps = config.rms_norm_eps

    def __call__(self, x: Tensor | None, residual: Tensor) -> Tensor:
        """Of ``residual``, to which x is added first, in place."""
        if x is None:
            return rms_norm(residual, self.weight, self.eps)
        return add_rms_norm(x, residual, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class Parts:
    """How a family builds each part of a layer from the weights under a prefix."""

    norm: Callable[[ModelConfig, Tensor], RmsNorm]
    attention: Callable[[ModelConfig, Weights, int], Attention]
    mlp: Callable[[ModelConfig, Weights, int], GatedMlp | MoeMlp]


def _fused(weights: Weights, layer: int, parent: str, modules: tuple[str, ...]) -> Linear:
    names = [f"model.layers.{layer}.{parent}.{module}" for module in modules]
    biases = [weights[f"{name}.bias"] for name in names if f"{name}.bias" in weights]
    scales = [weights[f"{name}.weight{SCALE}"] for name in names if f"{name}.weight{SCALE}" in weights]
    return Linear(layer, modules, [weights[f"{name}.weight"] for name in names], biases, scales)


def _attention(config: ModelConfig, weights: Weights, layer: int, **norms: Any) -> Attention:
    fused = partial(_fused, weights, layer, "self_attn")
    return Attention(config, layer, fused(("q_proj", "k_proj", "v_proj")), fused(("o_proj",)), **norms)


def _attention_with_head_norms(config: ModelConfig, weights: Weights, layer: int) -> Attention:
    query, key = (weights[f"model.layers.{layer}.self_attn.{part}_norm.weight"] for part in "qk")
    return _attention(config, weights, layer, head_norms=HeadNorms(query, key, config.rms_norm_eps))


def _attention_with_whole_norms(config: ModelConfig, weights: Weights, layer: int) -> Attention:
    query, key = (weights[f"model.layers.{layer}.self_attn.{part}_norm.weight"] for part in "qk")
    return _attention(config, weights, layer, whole_norms=WholeNorms(config, query, key))


def _gated_mlp(config: ModelConfig, weights: Weights, layer: int) -> GatedMlp:
    fused = partial(_fused, weights, layer, "mlp")
    return GatedMlp(fused(("gate_proj", "up_proj")), fused(("down_proj",)))


_LLAMA = Parts(norm=RmsNorm, attention=_attention, mlp=_gated_mlp)
_LLAMA_MOE = replace(_LLAMA, mlp=moe_mlp)
PARTS: dict[str, Parts] = {  # biases, windows and rope's stretch follow from the config
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": replace(_LLAMA, attention=_attention_with_head_norms),
    "mixtral": _LLAMA_MOE,
    "qwen2_moe": _LLAMA_MOE,
    "qwen3_moe": replace(_LLAMA_MOE, attention=_attention_with_head_norms),
    "olmoe": replace(_LLAMA_MOE, attention=_attention_with_whole_norms),
}


class Layer:
    """x + attention(norm(x)), then x + mlp(norm(x)). The sum stands in ``residual`` and lacks the last term: whoever
    comes next adds it in its norm."""

    def __init__(self, config: ModelConfig, weights: Weights, layer: int) -> None:
        parts = PARTS[config.family]
        prefix = f"model.layers.{layer}"
        self.attention_norm = parts.norm(config, weights[f"{prefix}.input_layernorm.weight"])
        self.attention = parts.attention(config, weights, layer)
        self.mlp_norm = parts.norm(config, weights[f"{prefix}.post_attention_layernorm.weight"])
        self.mlp = parts.mlp(config, weights, layer)

    def queries(
        self, x: Tensor | None, residual: Tensor, batch: Batch, kv: KVCache, lora: LoraStep, table: Tensor
    ) -> Tensor:
        """The part before attention. x: what ``residual`` lacks (``finish``), None: nothing; it grows in place."""
        return self.attention.queries(self.attention_norm(x, residual), batch, kv, lora, table)

    def finish(self, seen: Tensor, residual: Tensor, lora: LoraStep) -> Tensor:
        """The part behind attention: seen [T, N_q, D] → what ``residual`` lacks then, see ``Linear.onto``."""
        x = self.attention.output.onto(residual, seen.flatten(1), lora)
        return self.mlp.onto(residual, self.mlp_norm(x, residual), lora)

    def linears(self) -> tuple[Linear | MoeMlp, ...]:
        return self.attention.qkv, self.attention.output, *self.mlp.linears()


class Decoder:
    """A Llama-like decoder on one device.

    ``weights`` go by Hugging Face's names, all of one dtype but those of 8 bits, whose scales stand under their names
    with SCALE. What is fused or packed is copied, the rest (the embedding, norms) is kept by reference; none is ever
    written. A missing weight is a KeyError.
    """

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self.embedding = weights["model.embed_tokens.weight"]
        self.layers = [Layer(config, weights, layer) for layer in range(config.num_layers)]
        self.norm = PARTS[config.family].norm(config, weights["model.norm.weight"])
        head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
        self.head = LinearWeight(weights[head])
        frequencies = inverse_frequencies(config.rope, config.attention.head_dim).to(self.embedding.device)
        self.rope_table = rope_table(frequencies, config.context_tokens)
        self._num_head_calls = 0
        self._choices: Tensor | None = None  # of experts, [layers with some, most tokens, K]
        self.num_bytes = sum(tensor.nbytes for name, tensor in weights.items() if name != "model.embed_tokens.weight")
        self.num_bytes += self.embedding.nbytes if config.tie_word_embeddings else 0

    def with_one_layer_of_each_kind(self) -> "Decoder":
        """Launches all that this one launches, in fewer layers: for rehearsals. The weights are the same."""
        thin = copy(self)
        thin.layers = list({type(layer.mlp): layer for layer in self.layers}.values())
        return thin

    @property
    def is_quantised(self) -> bool:
        """Whether it has weights of 8 bits."""
        linears = [linear for layer in self.layers for linear in layer.linears() if isinstance(linear, Linear)]
        return any(isinstance(linear.weight, QuantisedWeight) for linear in linears)

    @property
    def num_linear_calls(self) -> int:
        """Products with base weights so far, the head's among them."""
        return self._num_head_calls + sum(linear.num_calls for layer in self.layers for linear in layer.linears())

    def expert_tokens(self) -> list[list[int]]:
        """Tokens of each expert so far, by layer with experts. Waits for the device."""
        return [mlp.num_tokens_of.tolist() for mlp in self._expert_mlps()]

    def expert_uses(self, owners: Tensor, num_owners: int) -> Tensor:
        """As ``engine.models.moe.expert_uses``, of the last step's tokens."""
        moe = self.config.moe
        assert moe is not None, self.config.family
        chosen = self._choices
        if chosen is None:
            chosen = torch.stack([mlp.chosen for mlp in self._expert_mlps()])
        return expert_uses(chosen[:, : len(owners)], owners, num_owners, moe.num_experts)

    def keep_choices(self, most_tokens: int) -> None:
        """From now on the experts of a step's tokens stand where they stood in the step before, so that a captured
        step's are found too. No step has more than ``most_tokens`` rows; who asks for more later makes earlier captures
        void, for less does not."""
        moe, mlps = self.config.moe, self._expert_mlps()
        if moe is None or (self._choices is not None and self._choices.shape[1] >= most_tokens):
            return
        self._choices = self.embedding.new_zeros(len(mlps), most_tokens, moe.top_k, dtype=torch.int32)
        for mlp, own in zip(mlps, self._choices, strict=True):
            mlp.keep_choices(own)

    def _expert_mlps(self) -> list[MoeMlp]:
        return [layer.mlp for layer in self.layers if isinstance(layer.mlp, MoeMlp)]

    def forward(
        self, batch: Batch, kv: KVCache, lora: LoraSlots, most_ranks: int = 0, *, has_experts: bool = False
    ) -> Tensor:
        """One step → hidden [T, H] after the final norm. Writes the step's keys and values into ``kv``. ``most_ranks``,
        ``has_experts``: see LoraStep."""
        step = LoraStep(lora, batch.lora, most_ranks, batch.num_tokens, has_experts)
        residual = F.embedding(batch.token_ids, self.embedding)
        x = None
        for layer in self.layers:
            queries = layer.queries(x, residual, batch, kv, step, self.rope_table)
            x = layer.finish(layer.attention.attend(queries, batch.attention, kv), residual, step)
        return self.norm(x, residual)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, H] → [R, V] fp32."""
        return self.product_with_head(hidden).float()

    @timed("head")
    def product_with_head(self, hidden: Tensor) -> Tensor:
        """hidden [R, H] → logits [R, V] in the weights' dtype."""
        self._num_head_calls += 1
        return linear(hidden, self.head)
