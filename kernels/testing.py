"""For tests of the kernels: ragged batches, oracles in float64 that share no code with the kernels, tolerances.

Whatever an op must not read is NaN: other blocks, the unwritten end of the last block, other slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.paged_attention import AttentionPlan, plan_attention

NAN = float("nan")
TOLERANCES = {  # (relative, absolute), for values around 1
    torch.float32: (1e-5, 1e-5),
    torch.bfloat16: (1.6e-2, 1.6e-2),
}


def assert_matches_reference(actual: Tensor, expected: Tensor) -> None:
    """``actual`` against a more precise ``expected``, as close as actual's dtype allows."""
    relative, absolute = TOLERANCES[actual.dtype]
    torch.testing.assert_close(actual.double(), expected.double(), rtol=relative, atol=absolute)


@dataclass(frozen=True)
class Heads:
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 8
    block_size: int = 4
    sliding_window: int | None = None


@dataclass(frozen=True)
class SequenceKv:
    """One sequence: queries, keys, values of all its positions [L, heads, D], and the blocks it owns."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    blocks: list[int]


@dataclass(frozen=True)
class RaggedKv:
    """Several sequences in one poisoned cache."""

    heads: Heads
    sequences: list[SequenceKv]
    key_cache: Tensor
    value_cache: Tensor

    def step(self, spans: Sequence[tuple[int, int, int]]) -> tuple[Tensor, AttentionPlan]:
        """Spans (sequence, first position, end) → their queries one behind the other, and the plan."""
        most = max(len(self.sequences[index].blocks) for index, _, _ in spans)
        spare = self.key_cache.shape[0] - 1  # never owned: whoever reads it reads NaN
        tables = [self.sequences[index].blocks for index, _, _ in spans]
        starts = [0]
        for _, first, end in spans:
            starts.append(starts[-1] + end - first)
        plan = plan_attention(
            torch.tensor([table + [spare] * (most - len(table)) for table in tables]),
            starts,
            [end for _, _, end in spans],
            block_size=self.heads.block_size,
            num_heads=self.heads.num_heads,
            num_kv_heads=self.heads.num_kv_heads,
            sliding_window=self.heads.sliding_window,
        )
        return torch.cat([self.sequences[index].queries[first:end] for index, first, end in spans]), plan


def ragged_kv(lengths: Sequence[int], heads: Heads, dtype: torch.dtype = torch.float32, seed: int = 0) -> RaggedKv:
    """Sequences of these lengths, their blocks scattered over a cache in which all else is NaN."""
    draw = torch.Generator().manual_seed(seed)
    counts = [-(-length // heads.block_size) for length in lengths]
    numbers = torch.randperm(sum(counts) + 3, generator=draw).tolist()
    shape = (sum(counts) + 4, heads.block_size, heads.num_kv_heads, heads.head_dim)
    key_cache, value_cache = (torch.full(shape, NAN, dtype=dtype) for _ in range(2))
    sequences = []
    for length, count in zip(lengths, counts, strict=True):
        blocks, numbers = numbers[:count], numbers[count:]
        queries, keys, values = (
            torch.randn(length, number, heads.head_dim, generator=draw).to(dtype)
            for number in (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)
        )
        for cache, new in ((key_cache, keys), (value_cache, values)):
            for index, block in enumerate(blocks):
                part = new[index * heads.block_size : (index + 1) * heads.block_size]
                cache[block, : len(part)] = part
        sequences.append(SequenceKv(queries, keys, values, blocks))
    return RaggedKv(heads, sequences, key_cache, value_cache)


def dense_attention(sequence: SequenceKv, scale: float, sliding_window: int | None = None) -> Tensor:
    """Every query of a sequence over the whole score matrix, float64, [L, heads, D]."""
    queries, keys, values = (part.double() for part in (sequence.queries, sequence.keys, sequence.values))
    group = queries.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", queries, keys) * scale
    positions = torch.arange(len(queries))
    seen = positions[None, :] <= positions[:, None]
    if sliding_window is not None:
        seen &= positions[None, :] > positions[:, None] - sliding_window
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values)


def lora_memory(
    lora_ranks: Sequence[int], num_in: int, num_out: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """a [S, R, in] and b [S, R, out] of one module, zero past each slot's own rank."""
    draw = torch.Generator().manual_seed(seed)
    num_ranks = max(8, -(-max(lora_ranks) // 8) * 8)
    a = torch.zeros(len(lora_ranks), num_ranks, num_in, dtype=dtype)
    b = torch.zeros(len(lora_ranks), num_ranks, num_out, dtype=dtype)
    for slot, lora_rank in enumerate(lora_ranks):
        a[slot, :lora_rank] = torch.randn(lora_rank, num_in, generator=draw) / num_in**0.5
        b[slot, :lora_rank] = torch.randn(lora_rank, num_out, generator=draw) / max(lora_rank, 1) ** 0.5
    return a, b


def lora_delta(x: Tensor, a: Tensor, b: Tensor, lora_rank: int) -> Tensor:
    """What one slot's pair adds to rows of it: float64, the true rank only."""
    return x.double() @ a[:lora_rank].double().T @ b[:lora_rank].double()
