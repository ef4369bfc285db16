"""Self-attention over the paged cache."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from engine.batch import Batch
from engine.memory import lazy_zeros
from engine.models.config import FrequencyDivisors, Llama3Scaling, ModelConfig, RopeConfig
from engine.models.linear import Linear, LoraStep
from kernels.paged_attention import AttentionPlan, paged_attention
from kernels.qk_rope_kv import HeadNorms, qk_rope_kv
from kernels.rms_norm import rms_norm
from kernels.sgmv import Low


class KVCache:
    """Keys and values of every layer, each [num_blocks, block_size, N_kv, D]; zeros until written."""

    def __init__(self, config: ModelConfig, num_blocks: int, block_size: int, like: Tensor) -> None:
        attention = config.attention
        shape = (config.num_layers, num_blocks, block_size, attention.num_kv_heads, attention.head_dim)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.itemsize = like.itemsize
        self.keys = lazy_zeros(shape, like).unbind()
        self.values = lazy_zeros(shape, like).unbind()


class WholeNorms:
    """All query heads of a token normalised as one vector, and so its key heads (OLMoE)."""

    def __init__(self, config: ModelConfig, query: Tensor, key: Tensor) -> None:
        self.weights = query, key  # [N_q · D], [N_kv · D]
        self.sizes = config.attention.num_heads, config.attention.num_kv_heads, config.attention.num_kv_heads
        self.eps = config.rms_norm_eps

    def __call__(self, heads: Tensor) -> Tensor:
        """heads [T, N_q + 2 N_kv, D] as ``qk_rope_kv`` takes them → the same, the values as they were."""
        *turned, values = heads.split(self.sizes, dim=1)
        parts = zip(turned, self.weights, strict=True)
        normed = [rms_norm(part.flatten(1), weight, self.eps).view_as(part) for part, weight in parts]
        return torch.cat([*normed, values], 1)


class Attention:
    """q, k, v in one product, norms of q and k where a family has them, rope, paged attention, o.

    ``whole_norms`` sees all heads of q and k, ``head_norms`` each by itself.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        qkv: Linear,
        output: Linear,
        whole_norms: WholeNorms | None = None,
        head_norms: HeadNorms | None = None,
    ) -> None:
        attention = config.attention
        self.layer = layer
        self.num_heads, self.num_kv_heads, self.head_dim = (
            attention.num_heads,
            attention.num_kv_heads,
            attention.head_dim,
        )
        self.qkv = qkv
        self.output = output
        self.whole_norms = whole_norms
        self.head_norms = head_norms

    def queries(self, x: Tensor, batch: Batch, kv: KVCache, lora: LoraStep, rope_table: Tensor) -> Tensor:
        """x [T, H] → turned queries [T, N_q, D]; writes the keys and values of the T tokens."""
        heads, low = self._heads(x, lora)
        places = batch.positions, rope_table, (kv.keys[self.layer], kv.values[self.layer]), batch.slot_mapping
        return qk_rope_kv(heads, *places, self.head_norms, low)

    def _heads(self, x: Tensor, lora: LoraStep) -> tuple[Tensor, Low | None]:
        """[T, N_q + 2 N_kv, D], and what adapters are yet to add to them: nothing where all are normalised as one."""
        shape = self.num_heads + 2 * self.num_kv_heads, self.head_dim
        if self.whole_norms is not None:
            return self.whole_norms(self.qkv(x, lora).unflatten(-1, shape)), None
        y, low = self.qkv.apart(x, lora)
        return y.unflatten(-1, shape), low

    def attend(self, queries: Tensor, plan: AttentionPlan, kv: KVCache) -> Tensor:
        """queries [T, N_q, D] → what they see, [T, N_q, D]."""
        keys, values = kv.keys[self.layer], kv.values[self.layer]
        return paged_attention(queries, keys, values, plan, scale=self.head_dim**-0.5)


def inverse_frequencies(rope_config: RopeConfig, head_dim: int) -> Tensor:
    """[D/2] fp32, as transformers computes them."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / rope_config.theta**exponents
    return plain if rope_config.scaling is None else _STRETCHES[type(rope_config.scaling)](plain, rope_config.scaling)


def _divide(plain: Tensor, scaling: FrequencyDivisors) -> Tensor:
    return plain / torch.tensor(scaling.values, dtype=torch.float32)


def _stretch(plain: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Llama 3.1: long wavelengths by the whole factor, short ones not at all, a ramp between."""
    wavelengths = 2 * math.pi / plain
    turns = scaling.original_context_tokens / wavelengths
    ramp = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    ramp = ramp.clamp(0.0, 1.0)
    return (1 - ramp) * plain / scaling.factor + ramp * plain


_STRETCHES: dict[type, Callable[[Tensor, Any], Tensor]] = {Llama3Scaling: _stretch, FrequencyDivisors: _divide}
