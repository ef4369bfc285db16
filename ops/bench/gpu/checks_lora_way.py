"""Checks of what adapters add on its way: into the norm behind a product, and into heads before they are turned."""

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear

from kernels.qk_rope_kv import HeadNorms, qk_rope_kv
from kernels.qk_rope_kv import triton_low as heads_low
from kernels.rms_norm import add_rms_norm
from kernels.rms_norm import triton_low as norm_low
from kernels.rope import rope_table
from kernels.sgmv import LoraSlice, PartialLow, plan_sgmv, sgmv, shrink
from kernels.sgmv.captured import CapturedSgmv, fill_segments, segment_numbers
from ops.bench.gpu.changes import Rows, other_rows
from ops.bench.gpu.checks import DEVICE, LIMITS, MIXED, POPULARITIES, SHAPES, lora_case, random, require
from ops.bench.gpu.checks_captured import captured
from ops.bench.gpu.checks_lora import early_launches

BY_ROWS: Rows = {"sgmv_form": {"rows_of_slot": 1000}, "norm_low": {"fused": 1}, "rope_low": {"fused": 1}}
KV_ROOM = 16
FLOAT, BF16 = LIMITS


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Unlike torch.equal, which takes a zero for its negative."""
    kind = torch.int16 if one.element_size() == 2 else torch.int32
    return torch.equal(one.contiguous().view(kind), other.contiguous().view(kind))


def with_deltas(y: Tensor, x: Tensor, slices: Sequence[LoraSlice], slots: list[int]) -> Tensor:
    """In fp64."""
    total = y.double()
    for part, slot in itertools.product(slices, set(slots) - {-1}):
        rank, columns = part.lora_ranks[slot], slice(part.start, part.start + part.b.shape[2])
        own = torch.tensor([row for row in range(len(slots)) if slots[row] == slot], device=DEVICE)
        total[own, columns] += x[own].double() @ part.a[slot, :rank].double().T @ part.b[slot, :rank].double()
    return total


NORMS = (  # dtype, columns, parts: each of them is compiled for some ranks
    (BF16, 4096, 2), (BF16, 4096, 1), (BF16, 3584, 4), (BF16, 2048, 1), (BF16, 1024, 2), (BF16, 576, 1),
    (FLOAT, 1024, 2),
)  # fmt: skip


def norms_of_adapters_against_float64() -> None:
    """Base rows have the bits that they have without adapters, negative zeros too."""
    with other_rows(BY_ROWS):
        for dtype, size, num_parts in NORMS:
            for num_rows, (name, slot_of) in itertools.product((1, 7, 64), POPULARITIES.items()):
                slots = [slot_of(row) for row in range(num_rows)]
                if max(slots) >= 0:
                    what = f"{size} of {num_parts} T={num_rows} {name} {dtype}"
                    _norm_of_adapters(slots, size, num_parts, dtype, what)


def _norm_of_adapters(slots: list[int], size: int, num_parts: int, dtype: torch.dtype, what: str) -> None:
    x, residual, slices = lora_case(slots, 1536, (size,), dtype)
    product = random(num_parts, len(slots), size, dtype=torch.float32)
    product = product[0].to(dtype) if num_parts == 1 else product
    product[..., ::3, :], residual[::6] = -0.0, -0.0
    weight, alone = random(size, dtype=dtype), residual.clone()
    whole = product.double() if num_parts == 1 else product.double().sum(0)
    total = residual.double() + with_deltas(whole, x, slices, slots)
    expected = add_rms_norm(product, alone, weight, 1e-5)
    low = shrink(x, slices, plan_sgmv(slots, DEVICE))
    assert isinstance(low, PartialLow), "no row has anything to add"
    out = norm_low.add_rms_norm(product, residual, weight, 1e-5, low)
    require(out, total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-5) * weight.double(), f"norm {what}")
    require(residual, total, f"sum {what}")
    base = [row for row in range(len(slots)) if slots[row] < 0 or not slices[0].lora_ranks[slots[row]]]
    assert same_bits(out[base], expected[base]), f"{what}: rows without an adapter changed"
    assert same_bits(residual[base], alone[base]), f"{what}: sums without an adapter changed"


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
                one, other = _heads_of_adapters(step, norms, low, f"{heads} {parts} T={num_rows} {name} {dtype}")
                equal, count = equal + one, count + other
    print(f"{equal} of {count} numbers have the bits of two launches", end=" ")


def _heads_of_adapters(step: Heads, norms: HeadNorms | None, low: PartialLow, what: str) -> tuple[int, int]:
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


def what_is_added_on_its_way_is_the_same_20_times_and_in_any_order() -> None:
    with other_rows(BY_ROWS):
        for num_rows in (1, 16, 64):
            slots = [POPULARITIES["with base rows"](row + 1) for row in range(num_rows)]
            _norm_repeated(slots)
            step = Heads(slots, (32, 8, 128), torch.bfloat16, slice(0, 3))
            low = step.shrunk()
            assert low is not None
            first = step.outcome(step.y, step.norms, low)
            for _ in range(20):
                again = step.outcome(step.y, step.norms, step.shrunk())
                assert all(torch.equal(*map(torch.nan_to_num, pair)) for pair in zip(first, again, strict=True))


def _norm_repeated(slots: list[int]) -> None:
    x, residual, slices = lora_case(slots, 4096, (4096,), torch.bfloat16)
    parts, weight = random(2, len(slots), 4096, dtype=torch.float32), random(4096)

    def run(order: list[int]) -> tuple[Tensor, Tensor]:
        rows = torch.tensor(order, device=DEVICE)
        own, low = residual[rows], shrink(x[rows].clone(), slices, plan_sgmv([slots[row] for row in order], DEVICE))
        assert isinstance(low, PartialLow)
        return norm_low.add_rms_norm(parts[:, rows], own, weight, 1e-5, low), own

    out, total = run(list(range(len(slots))))
    for _ in range(20):
        assert all(torch.equal(*pair) for pair in zip(run(list(range(len(slots)))), (out, total), strict=True))
    order = torch.randperm(len(slots)).tolist()
    moved = torch.tensor(order, device=DEVICE)
    again, sums = run(order)
    assert torch.equal(again, out[moved]), "bits depend on the order of the rows"
    assert torch.equal(sums, total[moved]), "sums depend on the order of the rows"


def captured_layers_follow_their_memory() -> None:
    """One graph of product, shrink and norm, three layers of it, early or not; mixes and ranks change between replays.
    Against the same launches one by one, none early, whose results the checks above vouch for."""
    for is_early, num_rows in itertools.product((0, 1), (8, 64)):
        with other_rows(BY_ROWS):
            _captured_layers(num_rows, is_early)


def _captured_layers(num_rows: int, is_early: int) -> None:
    size, empty = 4096, len(MIXED)
    tables = [torch.zeros(empty + 1, dtype=torch.int32, device=DEVICE) for _ in range(3)]
    bounds = (*[0] * empty, 64)
    layers = []
    for table in tables:
        a, b = (random(empty, 64, size) / 64 for _ in range(2))
        layers.append(([LoraSlice(a, b, bounds, 0, table)], random(size, size) / 64, random(size)))
    host = np.full(segment_numbers(num_rows), 2**30, dtype=np.int32)
    memory = torch.zeros(len(host), dtype=torch.int32, device=DEVICE)
    fill_segments(host, [-1], num_rows, empty)
    memory.copy_(torch.from_numpy(host))
    plan, x, residual = CapturedSgmv(memory, num_rows, empty), random(num_rows, size), random(num_rows, size)

    def run() -> Tensor:
        own, seen = residual.clone(), x
        for slices, matrix, weight in layers:
            product = linear(seen, matrix)
            seen = add_rms_norm(product, own, weight, 1e-5, shrink(seen, slices, plan))
        return torch.cat((own, seen))

    with early_launches(is_early):
        graph, out = captured(run)
    draw = np.random.default_rng(0)
    for step in range(20):
        for number, table in enumerate(tables):
            own = np.roll(MIXED, step + number).clip(0, 64)
            table[:empty] = torch.from_numpy(own)
        fill_segments(host, draw.integers(-1, empty, num_rows).tolist(), num_rows, empty)
        memory.copy_(torch.from_numpy(host))
        with early_launches(0):
            expected = run()
        graph.replay()
        assert same_bits(out, expected), f"rows {num_rows} early {is_early} step {step}"


CHECKS: dict[str, Callable[[], None]] = {
    "lora way norm": norms_of_adapters_against_float64,
    "lora way heads": heads_of_adapters_against_their_launches,
    "lora way repeated and permuted": what_is_added_on_its_way_is_the_same_20_times_and_in_any_order,
    "lora way captured": captured_layers_follow_their_memory,
}
