"""Checks of the two halves of ``sgmv``: around a product, and the second one inside SiLU · up."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from kernels import tiles
from kernels.sgmv import LoraSlice, PartialLow, SgmvPlan, expand, plan_sgmv, sgmv, shrink
from kernels.sgmv.captured import CapturedSgmv, fill_segments, segment_numbers
from kernels.silu_mul import silu_mul, triton_low
from ops.bench.gpu.checks import DEVICE, LIMITS, POPULARITIES, lora_case, random, require
from ops.bench.gpu.checks_captured import captured

LAYERS = 12


def halves_around_a_product_give_the_bits_of_both_behind_it() -> None:
    """A chain of layers, launched and as a graph (of which one begins with a shrink), 20 times; early or not."""
    for is_early, num_rows in itertools.product((0, 1), (1, 32, 300, 3000)):
        slots = [POPULARITIES["with base rows"](row + 1) for row in range(num_rows)]
        parts = [lora_case(slots, 4096, (4096,), torch.bfloat16) for _ in range(LAYERS)]
        first, plan = parts[0][0].clone(), plan_sgmv(slots, DEVICE)
        layers = [(random(4096, 4096) / 64, slices) for _, _, slices in parts]
        with early_launches(0):
            expected = _chain(first, layers, plan, _behind)
        for step in (_behind, _around):
            what = f"{step.__name__} {num_rows} early {is_early}"
            with early_launches(is_early):
                outs = [_chain(first, layers, plan, step) for _ in range(20)]
                assert all(torch.equal(out, expected) for out in outs), f"launched {what}"
                graph, out = captured(functools.partial(_chain, first, layers, plan, step))
            for _ in range(20):
                out.fill_(float("nan"))
                graph.replay()
                assert torch.equal(out, expected), f"captured {what}"


Layer = tuple[Tensor, list[LoraSlice]]
Step = Callable[[Tensor, Layer, SgmvPlan], Tensor]


@contextlib.contextmanager
def early_launches(is_early: int) -> Iterator[None]:
    """All that a table decides about early launches, decided so."""
    original = tiles._table
    row = dict.fromkeys(original("default")["pdl"][0], is_early)
    tiles._table = lambda gpu: {**original(gpu), "pdl": [row]}
    try:
        yield
    finally:
        tiles._table = original


def _chain(x: Tensor, layers: Sequence[Layer], plan: SgmvPlan, step: Step) -> Tensor:
    for layer in layers:
        x = step(x, layer, plan)
    return x


def _behind(x: Tensor, layer: Layer, plan: SgmvPlan) -> Tensor:
    y = linear(x, layer[0])
    sgmv(y, x, layer[1], plan)
    return y


def _around(x: Tensor, layer: Layer, plan: SgmvPlan) -> Tensor:
    low = shrink(x, layer[1], plan)
    y = linear(x, layer[0])
    if low is not None:
        expand(y, low)
    return y


def silu_of_adapters_against_float64() -> None:
    """Base rows have the bits that they have without adapters."""
    for dtype, size, halves in itertools.product(LIMITS, (14336, 1536, 41), (slice(0, 2), slice(0, 1), slice(1, 2))):
        for num_rows, (name, slot_of) in itertools.product((1, 7, 64, 255, 600, 1100), POPULARITIES.items()):
            slots = [slot_of(row) for row in range(num_rows)]
            if max(slots) < 0:
                continue
            x, gate_up, slices = lora_case(slots, 576, (size, size), dtype)
            slices = slices[halves]
            out = into_silu(x, gate_up, slices, slots)
            what = f"silu low {size} {halves} T={num_rows} {name} {dtype}"
            require(out, expected_of_silu(x, gate_up, slices, slots), what)
            base = [row for row in range(num_rows) if slots[row] < 0]
            assert torch.equal(out[base], silu_mul(gate_up)[base]), f"{what}: rows without an adapter changed"


def into_silu(x: Tensor, gate_up: Tensor, slices: Sequence[LoraSlice], slots: list[int]) -> Tensor:
    low = shrink(x, slices, plan_sgmv(slots, DEVICE))
    return triton_low.silu_mul(gate_up, low) if isinstance(low, PartialLow) else silu_mul(gate_up)


def expected_of_silu(x: Tensor, gate_up: Tensor, slices: Sequence[LoraSlice], slots: list[int]) -> Tensor:
    total = gate_up.double()
    for part, slot in itertools.product(slices, set(slots) - {-1}):
        rank, columns = part.lora_ranks[slot], slice(part.start, part.start + part.b.shape[2])
        own = torch.tensor([row for row in range(len(slots)) if slots[row] == slot], device=DEVICE)
        total[own, columns] += x[own].double() @ part.a[slot, :rank].double().T @ part.b[slot, :rank].double()
    gate, up = total.chunk(2, -1)
    return silu(gate) * up


def silu_of_adapters_is_the_same_20_times_and_in_any_order() -> None:
    for num_rows in (16, 64, 300, 1000):
        slots = [POPULARITIES["with base rows"](row) for row in range(num_rows)]
        x, gate_up, slices = lora_case(slots, 4096, (14336, 14336), torch.bfloat16)
        out = into_silu(x, gate_up, slices, slots)
        assert all(torch.equal(into_silu(x, gate_up, slices, slots), out) for _ in range(20)), "launches differ"
        order = torch.randperm(num_rows)
        moved = x[order.to(DEVICE)].clone(), gate_up[order.to(DEVICE)].clone()
        again = into_silu(*moved, slices, [slots[row] for row in order.tolist()])
        assert torch.equal(again, out[order.to(DEVICE)]), "bits depend on the order of the rows"


def captured_silu_follows_its_memory() -> None:
    """One graph of each form, around a product as in a layer; steps of other mixes of adapters and ranks."""
    for is_early, num_rows in itertools.product((0, 1), (64, 100)):
        with early_launches(is_early):
            _captured_silu(num_rows)


def _captured_silu(num_rows: int) -> None:
    size, ranks = 14336, [8, 16, 24, 64, 5, 1, 0, 40]
    a, b = ([random(8, 64, width) / 64 for _ in range(2)] for width in (4096, size))
    tables = [torch.zeros(9, dtype=torch.int32, device=DEVICE) for _ in range(2)]  # slot 8 is empty
    parts = [LoraSlice(*part) for part in zip(a, b, [(*[0] * 8, 64)] * 2, (0, size), tables, strict=True)]
    host = np.full(segment_numbers(num_rows), 2**30, dtype=np.int32)
    memory = torch.zeros(len(host), dtype=torch.int32, device=DEVICE)
    fill_segments(host, [-1], num_rows, 8)
    memory.copy_(torch.from_numpy(host))
    x, weight = random(num_rows, 4096), random(2 * size, 4096) / 64
    plan = CapturedSgmv(memory, num_rows, 8)

    def run() -> Tensor:
        gate_up = linear(x, weight)
        return silu_mul(gate_up, low=shrink(x, parts, plan))

    graph, out = captured(run)
    for step, some in enumerate(([row % 8 for row in range(64)], [3] * 40 + [-1] * 20, [-1, 7, 7, 0], [])):
        own = [ranks[(slot + step) % 8] for slot in range(8)]
        for table in tables:
            table[:8] = torch.tensor(own)
        fill_segments(host, some, num_rows, 8)
        memory.copy_(torch.from_numpy(host))
        gate_up, slots = linear(x, weight), some + [-1] * (num_rows - len(some))
        true = [LoraSlice(part.a, part.b, (*own, 0), part.start) for part in parts]
        graph.replay()
        require(out, expected_of_silu(x, gate_up, true, slots), f"captured silu {num_rows} step {step}")
        idle = [row for row in range(num_rows) if slots[row] < 0 or own[slots[row]] == 0]
        assert torch.equal(out[idle], silu_mul(gate_up)[idle]), "rows without an adapter changed"


CHECKS: dict[str, Callable[[], None]] = {
    "lora around": halves_around_a_product_give_the_bits_of_both_behind_it,
    "lora into silu": silu_of_adapters_against_float64,
    "lora into silu repeated and permuted": silu_of_adapters_is_the_same_20_times_and_in_any_order,
    "lora into silu captured": captured_silu_follows_its_memory,
}
