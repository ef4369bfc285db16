"""Whether adapters on experts are right on a GPU: against float64, with NaN in all that no pair has; permuted,
repeated, captured while adapters change."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.moe import ExpertPlan, ExpertWeights, grouped_gate_up, grouped_silu_mul, plan_experts
from kernels.moe.adapters import CutPairs
from kernels.moe.triton_pairs import cut_pairs
from kernels.sgmv import LoraSlice
from kernels.silu_mul import silu_mul
from ops.bench.gpu.checks import DEVICE, LIMITS, NAN, random, require, sliced
from ops.bench.gpu.checks_moe import LAUNCHES, routed

SLOTS = 3  # with room for experts; rows of a step have slots from -1 to this one, which has none
RANK = 16
ROWS = (1, 4, 16, 17, 64, 65, 130, 400, 1024)
QWEN = ((128, 8), (2048, 768))  # experts and choices, hidden and inner


@dataclass
class Adapters:
    """Random ones of some experts; ``ranks`` [parts, S · E]."""

    hidden: int
    inner: int
    ranks: Tensor
    gate_up: list[LoraSlice]
    down: list[LoraSlice]

    @classmethod
    def drawn(cls, num_experts: int, hidden: int, inner: int, dtype: torch.dtype) -> "Adapters":
        number = SLOTS * num_experts
        ranks = torch.tensor([0, 3, 8, 16])[torch.randint(4, (3, number))].int().to(DEVICE)
        sizes = (hidden, inner, 0), (hidden, inner, inner), (inner, hidden, 0)
        gate, up, down = (cls._part(own, *size, dtype) for own, size in zip(ranks, sizes, strict=True))
        return cls(hidden, inner, ranks, [gate, up], [down])

    @staticmethod
    def _part(ranks: Tensor, size_in: int, size_out: int, start: int, dtype: torch.dtype) -> LoraSlice:
        a = random(len(ranks), RANK, size_in, dtype=dtype) * size_in**-0.5
        b = random(len(ranks), RANK, size_out, dtype=dtype) * 0.3
        is_over = torch.arange(RANK, device=DEVICE) >= ranks[:, None]
        a[is_over], b[is_over] = NAN, NAN
        return LoraSlice(a, b, (RANK,) * len(ranks), start, ranks)


def numbers_of(plan: ExpertPlan, slots: Tensor, ids: Tensor, num_experts: int, num_real: int) -> Tensor:
    """Of the places of real pairs."""
    pairs = plan.pairs[:num_real].long()
    own, experts = slots[pairs // plan.top_k], ids.flatten()[pairs]
    return torch.where((own >= 0) & (own < SLOTS), own * num_experts + experts, -1)


def added(y: Tensor, rows: Tensor, numbers: Tensor, slices: list[LoraSlice]) -> Tensor:
    """In float64, a number at a time."""
    exact = y.double()
    for part in slices:
        assert part.rank_table is not None
        columns = slice(part.start, part.start + part.b.shape[2])
        for number in numbers[numbers >= 0].unique().tolist():
            rank, own = int(part.rank_table[number]), numbers == number
            exact[own, columns] += (
                rows[own].double() @ part.a[number, :rank].double().T @ part.b[number, :rank].double()
            )
    return exact


def slots_of(num_rows: int) -> Tensor:
    """Chunks of one slot in large steps, so that there are runs."""
    of_chunks = torch.randint(-1, SLOTS + 1, (num_rows,), device=DEVICE).int()
    return of_chunks[torch.arange(num_rows, device=DEVICE) // (40 if num_rows > 64 else 1)]


def against_float64(num_rows: int, routing: tuple[int, int], sizes: tuple[int, int], dtype: torch.dtype) -> None:
    (num_experts, top_k), (hidden, inner) = routing, sizes
    adapters, what = Adapters.drawn(num_experts, hidden, inner, dtype), f"{num_rows} {routing} {sizes} {dtype}"
    ids, slots = routed(num_rows + 3, *routing), slots_of(num_rows + 3)
    plan = plan_experts(ids, num_experts, None, torch.tensor([num_rows], dtype=torch.int32, device=DEVICE))
    real = num_rows * top_k
    numbers = numbers_of(plan, slots, ids, num_experts, real)
    x, inner_rows = sliced(num_rows + 3, hidden, dtype=dtype), random(len(plan.pairs), inner, dtype=dtype)
    x[num_rows:], inner_rows[real:] = NAN, NAN
    y, z = (random(len(plan.pairs), size, dtype=dtype) for size in (2 * inner, hidden))
    before = y.clone(), z.clone()
    pairs = CutPairs(*cut_pairs(plan, slots, SLOTS))
    pairs.add_of_tokens(y, x, adapters.gate_up)
    pairs.add_of_pairs(z, inner_rows, adapters.down)
    rows = x[plan.pairs[:real].long() // top_k]
    require(y[:real], added(before[0][:real], rows, numbers, adapters.gate_up), f"gate and up {what}")
    require(z[:real], added(before[1][:real], inner_rows[:real], numbers, adapters.down), f"down {what}")
    idle = torch.cat((numbers < 0, torch.ones(3 * top_k, dtype=torch.bool, device=DEVICE)))
    assert torch.equal(y[idle], before[0][idle]), f"pairs without an adapter changed: {what}"
    assert torch.equal(z[idle], before[1][idle]), f"pairs without an adapter changed: {what}"


def adapters_on_experts_against_float64() -> None:
    for dtype, sizes in itertools.product(LIMITS, ((64, 48), (97, 41), (576, 1536))):
        for routing, num_rows in itertools.product(((8, 2), (7, 3), (60, 4)), (1, 17, 64, 65, 400)):
            against_float64(num_rows, routing, sizes, dtype)


def adapters_on_experts_of_real_sizes() -> None:
    for num_rows in (*ROWS, 4096, 8192):  # the last: more segments than one launch may have
        against_float64(num_rows, *QWEN, torch.bfloat16)


def gate_and_up_are_those_of_the_fused_product() -> None:
    """Rows without an adapter have the same bits whether or not others have one."""
    (num_experts, top_k), (hidden, inner) = QWEN
    weights = ExpertWeights(random(num_experts, 2 * inner, hidden) * hidden**-0.5)
    for num_rows in (1, 4, 16, 32, 64, 96, 128, 256, 512, 1024, 4096):
        x, ids = random(num_rows, hidden), routed(num_rows, num_experts, top_k)
        plan = plan_experts(ids, num_experts)
        apart, fused = silu_mul(grouped_gate_up(x, weights, plan)), grouped_silu_mul(x, weights, plan)
        assert torch.equal(apart, fused), f"{num_rows}: {(apart != fused).sum()} of {apart.numel()}"


def adapters_on_experts_repeat_themselves() -> None:
    """20 times, and a row's bits are the same wherever its pairs stand and whoever else is there."""
    (num_experts, top_k), (hidden, inner) = QWEN
    adapters = Adapters.drawn(num_experts, hidden, inner, torch.bfloat16)
    for num_rows in (16, 64, 256, 1024):
        x, ids, slots = random(num_rows, hidden), routed(num_rows, num_experts, top_k), slots_of(num_rows)

        def run(x: Tensor, ids: Tensor, slots: Tensor) -> Tensor:
            """[T · K, 2I] by pair."""
            plan = plan_experts(ids.contiguous(), num_experts)
            y = torch.zeros(len(plan.pairs), 2 * inner, dtype=x.dtype, device=DEVICE)
            CutPairs(*cut_pairs(plan, slots.contiguous(), SLOTS)).add_of_tokens(y, x, adapters.gate_up)
            return torch.empty_like(y).index_copy_(0, plan.pairs.long(), y).view(len(x), top_k, -1)

        out = run(x, ids, slots)
        assert out.any()
        assert all(torch.equal(run(x, ids, slots), out) for _ in range(LAUNCHES)), f"launches differ: {num_rows}"
        order = torch.randperm(num_rows, device=DEVICE)
        assert torch.equal(run(x[order], ids[order], slots[order]), out[order]), f"a row's place: {num_rows}"
        few = max(1, num_rows // 3)
        others = torch.cat((slots[:few], slots.roll(7)[few:]))
        strangers = torch.cat((x[:few], random(num_rows - few, hidden) * 7))
        assert torch.equal(run(strangers, ids, others)[:few], out[:few]), f"a row depends on others: {num_rows}"


def captured_adapters_on_experts_follow_their_memory() -> None:
    """One graph, while slots, ranks, experts and the number of tokens change."""
    (num_experts, top_k), (hidden, inner) = QWEN
    for num_rows in (32, 96):
        adapters = Adapters.drawn(num_experts, hidden, inner, torch.bfloat16)
        x, ids, slots = random(num_rows, hidden), routed(num_rows, num_experts, top_k), slots_of(num_rows)
        counter = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        y = random(num_rows * top_k, 2 * inner)

        def run() -> ExpertPlan:
            plan = plan_experts(ids, num_experts, None, counter)  # noqa: B023 - called in the round
            CutPairs(*cut_pairs(plan, slots, SLOTS)).add_of_tokens(y, x, adapters.gate_up)  # noqa: B023
            return plan

        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            plan = run()
        for step, num_tokens in enumerate((num_rows, 1, 0, num_rows - 5, num_rows)):
            ids.copy_(routed(num_rows, num_experts, top_k))
            slots.copy_(slots_of(num_rows))
            counter.fill_(num_tokens)
            adapters.ranks.copy_(torch.where(adapters.ranks == 0, 0, torch.tensor([1, 3])[step % 2]))
            y.normal_()
            before, real = y.clone(), num_tokens * top_k
            graph.replay()
            numbers = numbers_of(plan, slots, ids, num_experts, real)
            expected = added(before[:real], x[plan.pairs[:real].long() // top_k], numbers, adapters.gate_up)
            if real:
                require(y[:real], expected, f"captured adapters on experts {num_rows}, step {step}")
            assert torch.equal(y[real:], before[real:]), "what fills up was written"


CHECKS: dict[str, Callable[[], None]] = {
    "experts adapters": adapters_on_experts_against_float64,
    "experts adapters of real sizes": adapters_on_experts_of_real_sizes,
    "experts adapters beside none": gate_and_up_are_those_of_the_fused_product,
    "experts adapters repeated and permuted": adapters_on_experts_repeat_themselves,
    "experts adapters captured": captured_adapters_on_experts_follow_their_memory,
}
