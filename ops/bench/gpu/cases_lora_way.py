"""The product of q, k and v, its adapters, and rope and the cache behind it: what adapters add by a launch of its own,
and on its way. The whole chain is timed, since what a launch hides behind the one before it is part of the question."""

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear

from kernels.qk_rope_kv import triton_kernel as heads_alone
from kernels.qk_rope_kv import triton_low as heads_low
from kernels.rope import rope_table
from kernels.sgmv import PartialLow, expand
from ops.bench.gpu.cases import DEVICE, HEAD_DIM, HEADS, KV_HEADS, Built, Case, error
from ops.bench.gpu.cases_lora import PROJECTIONS, Inputs, inputs

NUM_ROWS = 32
WAYS = ("then", "fused")
MIXES = ((8, 16), (32, 16), (32, 32), (32, 64))  # adapters, rank


def low_of(one: Inputs) -> PartialLow:
    low = one.low
    assert isinstance(low, PartialLow)
    return low


class Places:
    """Where the heads of a step go, and how they are turned."""

    def __init__(self) -> None:
        self.table = rope_table(5e5 ** (-torch.arange(0, HEAD_DIM, 2, device=DEVICE) / HEAD_DIM), 8192)
        self.positions = torch.randint(0, 8192, (NUM_ROWS,), device=DEVICE)
        self.slots = torch.randperm(2048, device=DEVICE)[:NUM_ROWS]
        self.caches = (self._cache(), self._cache())

    @staticmethod
    def _cache() -> Tensor:
        return torch.zeros(128, 16, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16, device=DEVICE)

    def turned(self, heads: Tensor) -> Tensor:
        """In fp32, by plain torch."""
        cosines, sines = self.table[self.positions].unsqueeze(2).unbind(1)
        first, second = heads.float().chunk(2, -1)
        return heads.float() * cosines + torch.cat((-second, first), -1) * sines


def heads_step(one: Inputs, places: Places, way: str) -> Tensor:
    """``way``: base, then, fused."""
    y = linear(one.x, one.weight)
    heads = y.unflatten(1, (HEADS + 2 * KV_HEADS, HEAD_DIM))
    if way == "fused":
        return heads_low.qk_rope_kv(
            heads, places.positions, places.table, *places.caches, places.slots, None, low_of(one)
        )
    if way == "then":
        expand(y, one.low)
    turned, values = heads[:, :-KV_HEADS], heads[:, -KV_HEADS:]
    return heads_alone.qk_rope_kv(turned, values, places.positions, places.table, *places.caches, places.slots, None)


def into_heads(way: str, num_adapters: int, rank: int) -> Built:
    sets, places = inputs(NUM_ROWS, num_adapters, *PROJECTIONS["q,k,v"], rank), Places()

    def verify() -> float:
        one = sets[0]
        y = one.x.float() @ one.weight.float().T
        y = y if way == "base" else y + one.delta()
        heads = y.unflatten(1, (HEADS + 2 * KV_HEADS, HEAD_DIM))
        turned = places.turned(heads[:, :-KV_HEADS])
        out = heads_step(one, places, way)
        keys, values = (cache.flatten(0, 1)[places.slots] for cache in places.caches)
        return max(error(out, turned[:, :HEADS]), error(keys, turned[:, HEADS:]), error(values, heads[:, -KV_HEADS:]))

    return Built([lambda one=one: heads_step(one, places, way) for one in sets], verify)


def lora_way_cases() -> list[Case]:
    """Names: T rows, L adapters, r rank, way."""
    size_in, sizes_out = PROJECTIONS["q,k,v"]
    plain = 2.0 * (size_in * sum(sizes_out) + NUM_ROWS * (size_in + 3 * sum(sizes_out)))
    label = f"q,k,v, rope T={NUM_ROWS}"
    found = [Case("lora_step", f"{label} base", lambda: into_heads("base", 1, 16), plain, num_launches=2)]
    for count, rank in MIXES:
        num_bytes = plain + 2.0 * rank * count * (size_in * len(sizes_out) + sum(sizes_out))
        for way, launches in zip(WAYS, (4, 3), strict=True):
            run = partial(into_heads, way, count, rank)
            found.append(Case("lora_step", f"{label} L={count} r={rank} {way}", run, num_bytes, num_launches=launches))
    return found
