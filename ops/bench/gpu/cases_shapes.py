"""Other models than the one that the tables were made with: what the H200's rows win over the default ones there."""

import itertools
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kernels.paged_attention import paged_attention, plan_attention
from ops.bench.gpu.cases import DEVICE, Built, Case, error, lora, random
from ops.bench.gpu.timing import num_sets

BLOCK = 16  # tokens of a block of the cache


@dataclass(frozen=True)
class Shape:
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def projections(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Columns in, and out of each module that is fused."""
        kv = self.kv_heads * self.head_dim
        return {
            "q,k,v": (self.hidden, (self.heads * self.head_dim, kv, kv)),
            "gate,up": (self.hidden, (self.intermediate, self.intermediate)),
            "down": (self.intermediate, (self.hidden,)),
        }


SHAPES = {
    "Llama-3.2-1B": Shape(2048, 8192, 32, 8, 64),
    "Qwen3-4B": Shape(2560, 9728, 32, 8, 128),
    "Qwen2.5-7B": Shape(3584, 18944, 28, 4, 128),
    "Mistral-Small-24B": Shape(5120, 32768, 32, 8, 128),
}
ROWS = ((32, 32), (64, 64), (256, 64), (2048, 8))  # of a step, and adapters among them
DECODES = ((4, 8192), (32, 2048))  # sequences, and tokens of each


def decode(shape: Shape, num_sequences: int, length: int) -> Built:
    """Sequences of one length with a query each, their blocks scattered."""
    blocks = -(-length // BLOCK)
    set_bytes = num_sequences * length * shape.kv_heads * shape.head_dim * 4
    sets = [_decode_set(shape, num_sequences, blocks) for _ in range(num_sets(set_bytes, 8))]
    starts = list(range(num_sequences + 1))
    plan = partial(plan_attention, block_size=BLOCK, num_heads=shape.heads, num_kv_heads=shape.kv_heads)
    plans = [plan(tables, starts, [length] * num_sequences) for *_, tables in sets]
    scale = shape.head_dim**-0.5
    calls = [
        partial(paged_attention, queries, keys, values, plan, scale=scale)
        for (queries, keys, values, _), plan in zip(sets, plans, strict=True)
    ]

    def verify() -> float:
        queries, keys, values, tables = sets[0]
        own = [cache[tables[-1].long()].flatten(0, 1)[:length].float() for cache in (keys, values)]
        asked = queries[-1].float().view(shape.kv_heads, -1, shape.head_dim)
        weights = (torch.einsum("ngd,knd->ngk", asked, own[0]) * scale).softmax(-1)
        return error(calls[0]()[-1], torch.einsum("ngk,knd->ngd", weights, own[1]).flatten(0, 1))

    return Built(calls, verify)


def _decode_set(shape: Shape, num_sequences: int, blocks: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    total = num_sequences * blocks
    keys, values = (random(total, BLOCK, shape.kv_heads, shape.head_dim) for _ in range(2))
    tables = torch.randperm(total, device=DEVICE).view(num_sequences, blocks)
    return random(num_sequences, shape.heads, shape.head_dim), keys, values, tables


def shape_cases() -> list[Case]:
    found = []
    for (name, shape), (num_rows, num_adapters) in itertools.product(SHAPES.items(), ROWS):
        for label, (size_in, sizes_out) in shape.projections.items():
            weights = num_adapters * 16 * 2 * (size_in * len(sizes_out) + sum(sizes_out))
            num_bytes = float(weights + num_rows * (size_in * 2 + sum(sizes_out) * 4))
            build = partial(lora, num_rows, [16] * num_adapters, size_in, sizes_out)
            found.append(Case("shapes", f"{name} lora {label} T={num_rows} L={num_adapters}", build, num_bytes, 0.0, 2))
    for (name, shape), (num_sequences, length) in itertools.product(SHAPES.items(), DECODES):
        num_bytes = num_sequences * length * shape.kv_heads * shape.head_dim * 4.0
        build = partial(decode, shape, num_sequences, length)
        found.append(Case("shapes", f"{name} decode B={num_sequences} {length}", build, num_bytes, 0.0, 2))
    return found
