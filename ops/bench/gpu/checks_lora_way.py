"""Checks of what adapters add to heads on their way into rope and the cache."""

import itertools
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import linear

from kernels.paged_attention import DecodeShape, captured_plan, fill_plan, paged_attention, plan_numbers
from kernels.qk_rope_kv import HeadNorms, qk_rope_kv
from kernels.qk_rope_kv import triton_low as heads_low
from kernels.rope import rope_table
from kernels.sgmv import LoraSlice, PartialLow, plan_sgmv, sgmv, shrink
from kernels.sgmv.captured import CapturedSgmv, fill_segments, segment_numbers
from ops.bench.gpu.changes import Rows, other_rows
from ops.bench.gpu.checks import DEVICE, LIMITS, MIXED, POPULARITIES, SHAPES, lora_case, random, require
from ops.bench.gpu.checks_captured import captured
from ops.bench.gpu.checks_lora import early_launches

BY_ROWS: Rows = {"sgmv_form": {"rows_of_slot": 1000}, "rope_low": {"fused": 1}}
KV_ROOM = 16
FLOAT, BF16 = LIMITS


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Unlike torch.equal, which takes a zero for its negative."""
    kind = torch.int16 if one.element_size() == 2 else torch.int32
    return torch.equal(one.contiguous().view(kind), other.contiguous().view(kind))


class Heads:
    """A step of q, k, v with adapters of any of the three, into caches of NaN."""

    def __init__(self, slots: list[int], heads: tuple[int, int, int], dtype: torch.dtype, parts: slice) -> None:
        self.slots, (self.num_heads, self.num_kv_heads, self.head_dim) = slots, heads
        self.num_all = self.num_heads + 2 * self.num_kv_heads
        sizes = [number * self.head_dim for number in (self.num_heads, self.num_kv_heads, self.num_kv_heads)]
        self.x, self.y, slices = lora_case(slots, 1536, sizes, dtype)
        self.slices = slices[parts]
        self.table = rope_table(1e4 ** (-torch.arange(0, self.head_dim, 2, device=DEVICE) / self.head_dim), 9000)
        self.positions = torch.randperm(9000, device=DEVICE)[: len(slots)]
        self.places = torch.randperm(len(slots) * 2, device=DEVICE)[: len(slots)]
        self.places[1::5] = -1
        self.norms = HeadNorms(random(self.head_dim, dtype=dtype), random(self.head_dim, dtype=dtype), 1e-6)

    def caches(self) -> tuple[Tensor, Tensor]:
        shape = (len(self.slots) // 8 + 1, KV_ROOM, self.num_kv_heads, self.head_dim)
        one, other = (torch.full(shape, float("nan"), dtype=self.y.dtype, device=DEVICE) for _ in range(2))
        return one, other

    def outcome(self, y: Tensor, norms: HeadNorms | None, low: PartialLow | None = None) -> list[Tensor]:
        """Queries, and what stands in the caches then."""
        caches, heads = self.caches(), y.unflatten(1, (self.num_all, self.head_dim))
        places = self.positions, self.table
        if low is None:
            return [qk_rope_kv(heads, *places, caches, self.places, norms), *caches]
        return [heads_low.qk_rope_kv(heads, *places, *caches, self.places, norms, low), *caches]

    def shrunk(self) -> PartialLow | None:
        low = shrink(self.x, self.slices, plan_sgmv(self.slots, DEVICE))
        assert low is None or isinstance(low, PartialLow)
        return low


PARTS = (slice(0, 3), slice(0, 1), slice(1, 3), slice(0, 3, 2))  # of q, k, v: those that adapters have
HEADS = (  # heads, who has adapters, dtype, whether heads have norms: each of them is compiled for some ranks
    *((heads, PARTS[0], BF16, False) for heads in SHAPES),
    *((SHAPES[0], parts, BF16, True) for parts in PARTS),
    (SHAPES[1], PARTS[0], BF16, True),
    (SHAPES[1], PARTS[0], FLOAT, True),
)


def heads_of_adapters_against_their_launches() -> None:
    """Like expand, and then the kernel without adapters, whose checks are against float64; base tokens to the last bit.
    How many of the others are bit-equal too is printed: all but for ranks above 16 is what we expect."""
    equal, count = 0, 0
    with other_rows(BY_ROWS):
        for heads, parts, dtype, has_norms in HEADS:
            for num_rows, name in itertools.product((5, 64), ("all distinct", "with base rows")):
                step = Heads([POPULARITIES[name](row) for row in range(num_rows)], heads, dtype, parts)
                low, norms = step.shrunk(), step.norms if has_norms else None
                assert low is not None, "nobody has anything to add"
                one, other = heads_of_adapters(step, norms, low, f"{heads} {parts} T={num_rows} {name} {dtype}")
                equal, count = equal + one, count + other
    print(f"{equal} of {count} numbers have the bits of two launches", end=" ")


def heads_of_adapters(step: Heads, norms: HeadNorms | None, low: PartialLow, what: str) -> tuple[int, int]:
    found = step.outcome(step.y, norms, low)
    base = step.outcome(step.y, norms)
    y = step.y.clone()
    sgmv(y, step.x, step.slices, plan_sgmv(step.slots, DEVICE))
    wanted = step.outcome(y, norms)
    idle = torch.tensor(
        [slot < 0 or not any(part.lora_ranks[slot] for part in step.slices) for slot in step.slots], device=DEVICE
    )
    assert same_bits(found[0][idle], base[0][idle]), f"{what}: queries without an adapter changed"
    equal = count = 0
    for cache, plain, expected in zip(found[1:], base[1:], wanted[1:], strict=True):
        stored = step.places >= 0
        own, alone, both = (part.flatten(0, 1) for part in (cache, plain, expected))
        assert torch.equal(own.isnan(), both.isnan()), f"{what}: other places of the cache"
        kept = step.places[stored & idle]
        assert same_bits(own[kept], alone[kept]), f"{what}: keys or values without an adapter changed"
        used = step.places[stored]
        if len(used):
            require(own[used], both[used].double(), f"cache {what}")
    require(found[0], wanted[0].double(), f"queries {what}")
    for out, both in zip(found, wanted, strict=True):
        equal += int((out.nan_to_num(9.0) == both.nan_to_num(9.0)).sum())
        count += out.numel()
    return equal, count


def what_is_added_on_its_way_is_the_same_20_times() -> None:
    with other_rows(BY_ROWS):
        for num_rows in (1, 16, 64):
            slots = [POPULARITIES["with base rows"](row + 1) for row in range(num_rows)]
            step = Heads(slots, (32, 8, 128), torch.bfloat16, slice(0, 3))
            low = step.shrunk()
            assert low is not None
            first = step.outcome(step.y, step.norms, low)
            for _ in range(20):
                again = step.outcome(step.y, step.norms, step.shrunk())
                assert all(torch.equal(*map(torch.nan_to_num, pair)) for pair in zip(first, again, strict=True))


def captured_layers_follow_their_memory() -> None:
    """One graph of products, adapters, rope and attention, three layers of it, early or not; contexts, adapters and
    their ranks change between replays. Against the same launches one by one, none early."""
    for is_early, num_rows in itertools.product((0, 1), (8, 64)):
        layers = CapturedLayers(num_rows)
        with early_launches(is_early):
            graph, out = captured(layers.run)
        for step in range(20):
            layers.change(step)
            with early_launches(0):
                expected = layers.run()
            graph.replay()
            assert same_bits(out, expected), f"rows {num_rows} early {is_early} step {step}"


class CapturedLayers:
    """Decodes of Llama-3-8B's sizes over memory that ``change`` fills."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows, self.empty = num_rows, len(MIXED)
        sizes = (4096, 1024, 1024)
        self.shape = DecodeShape(num_rows, 2048, KV_ROOM, 32, 8, DEVICE)
        self.draw = np.random.default_rng(0)
        self.plan_host = np.zeros(plan_numbers(self.shape), dtype=np.int32)
        self.lora_host = np.zeros(segment_numbers(num_rows), dtype=np.int32)
        self.numbers, self.segments = (torch.zeros(len(host), dtype=torch.int32, device=DEVICE) for host in self.hosts)
        self.positions, self.places = (torch.zeros(num_rows, dtype=torch.int64, device=DEVICE) for _ in range(2))
        num_blocks = self.shape.max_tokens // KV_ROOM
        order = torch.randperm(num_rows * num_blocks, device=DEVICE)
        self.tables = order.reshape(num_rows, num_blocks).int()
        self.turns = rope_table(1e4 ** (-torch.arange(0, 128, 2, device=DEVICE) / 128), 2048)
        self.ranks = [torch.zeros(self.empty + 1, dtype=torch.int32, device=DEVICE) for _ in sizes]
        starts, bounds = itertools.accumulate([0, *sizes[:-1]]), (*[0] * self.empty, 64)
        self.slices = [
            LoraSlice(random(self.empty, 64, 4096) / 64, random(self.empty, 64, size) / 64, bounds, start, ranks)
            for size, start, ranks in zip(sizes, starts, self.ranks, strict=True)
        ]
        self.x, self.weights = random(num_rows, 4096), [random(sum(sizes), 4096) / 64 for _ in range(3)]
        cache = (len(order), KV_ROOM, 8, 128)
        self.caches = [(random(*cache), random(*cache)) for _ in self.weights]
        self.change(0)

    @property
    def hosts(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        return self.plan_host, self.lora_host

    def change(self, step: int) -> None:
        """Other contexts and adapters, of other ranks."""
        ends = self.draw.integers(1, self.shape.max_tokens, self.num_rows)
        slots = self.draw.integers(-1, self.empty, self.num_rows).tolist()
        fill_plan(self.plan_host, ends.tolist(), self.shape)
        fill_segments(self.lora_host, slots, self.num_rows, self.empty)
        for memory, host in zip((self.numbers, self.segments), self.hosts, strict=True):
            memory.copy_(torch.from_numpy(host))
        self.positions.copy_(torch.from_numpy(ends - 1))
        rows = torch.arange(self.num_rows, device=DEVICE)
        blocks = self.tables[rows, self.positions // KV_ROOM].long()
        self.places.copy_(blocks * KV_ROOM + self.positions % KV_ROOM)
        for number, ranks in enumerate(self.ranks):
            ranks[: self.empty] = torch.from_numpy(np.roll(MIXED, step + number).clip(0, 64))

    def run(self) -> Tensor:
        lora = CapturedSgmv(self.segments, self.num_rows, self.empty)
        plan, seen = captured_plan(self.numbers, self.tables, self.shape), self.x
        for weight, caches in zip(self.weights, self.caches, strict=True):
            heads = linear(seen, weight).unflatten(1, (-1, 128))
            low = shrink(seen, self.slices, lora)
            queries = qk_rope_kv(heads, self.positions, self.turns, caches, self.places, None, low)
            seen = paged_attention(queries, *caches, plan, scale=128**-0.5).flatten(1)
        return seen


CHECKS: dict[str, Callable[[], None]] = {
    "lora way heads": heads_of_adapters_against_their_launches,
    "lora way captured": captured_layers_follow_their_memory,
    "lora way repeated": what_is_added_on_its_way_is_the_same_20_times,
}
