"""Whether experts are right on a GPU: by the reference's rule and float64, with NaN in all that nobody was sent to."""

import itertools
import json
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.moe import (
    ExpertPlan,
    ExpertWeights,
    RoutingRule,
    combine,
    grouped_linear,
    grouped_silu_mul,
    plan_experts,
    reference,
    route,
)
from kernels.silu_mul import silu_mul
from kernels.tiles import CONFIGS
from ops.bench.gpu.changes import other_rows
from ops.bench.gpu.checks import DEVICE, LIMITS, NAN, random, require, sliced

INF = float("inf")
RULES = (RoutingRule(True, True), RoutingRule(True, False), RoutingRule(False, False))
SIZES = ((8, 2), (128, 8), (7, 3), (60, 4), (257, 10), (5, 5), (1, 1))  # experts, choices
ROWS = (1, 2, 15, 16, 17, 64, 255, 1000)
LAUNCHES = 20
# rounded three times on the way: one small row in 3,000 is off by 5.2e-3, of 4,000 none by more
OF_EXPERTS = {torch.float32: 1e-5, torch.bfloat16: 7e-3}


def routing_is_the_references() -> None:
    """Ids exactly, ties and what is no number among them."""
    bad = torch.tensor([[NAN] * 8, [-INF] * 8, [INF] * 8, [0.25] * 8, [NAN, 1, NAN, 0, NAN, NAN, NAN, NAN],
                        [-INF, INF, -INF, INF, 0, NAN, -INF, 1], [0.0, -0.0, 0, 0, -0.0, -1, 0, 0]])  # fmt: skip
    for rule, dtype in itertools.product(RULES, (torch.float32, torch.bfloat16)):
        for top_k in (1, 3, 8):
            _route(bad.to(dtype), top_k, rule)
        for (num_experts, top_k), num_rows in itertools.product(SIZES, ROWS):
            plain = torch.randn(num_rows, num_experts)
            _route((plain * 3).to(dtype), top_k, rule)
            _route(plain.round().to(dtype), top_k, rule)


def _route(logits: Tensor, top_k: int, rule: RoutingRule) -> None:
    room = torch.full((len(logits) + 1, top_k), -7, dtype=torch.int32, device=DEVICE)
    ids, weights = route(logits.to(DEVICE), top_k, rule, room[:-1])
    expected, exact = reference.route(logits.double(), top_k, rule.softmax_first, rule.renormalize)
    assert torch.equal(ids.cpu(), expected.int()), (logits.shape, top_k, rule)
    assert (room[-1] == -7).all(), "ids past the last row"
    assert (weights.cpu().double() - exact).abs().max() < 1e-5, (logits.shape, top_k, rule)


def routed(num_rows: int, num_experts: int, top_k: int, skew: float = 0.0) -> Tensor:
    """[T, K] int32 on the device, different experts a row; ``skew``: how much the first ones are preferred."""
    wanted = torch.randn(num_rows, num_experts, device=DEVICE) - skew * torch.arange(num_experts, device=DEVICE)
    return wanted.topk(top_k).indices.int()


def the_order_of_pairs_is_the_references() -> None:
    """In steps that are full, filled up, and empty; all tiles' rows, and that none is there twice."""
    for (num_experts, top_k), num_rows in itertools.product(SIZES, (*ROWS, 4096)):
        for skew, num_tokens in itertools.product((0.0, 0.5), (None, 0, num_rows // 2, num_rows)):
            _order(routed(num_rows, num_experts, top_k, skew), num_experts, num_tokens)


def _order(ids: Tensor, num_experts: int, num_tokens: int | None) -> None:
    real = ids if num_tokens is None else ids[:num_tokens]
    totals = torch.arange(num_experts, device=DEVICE)
    counter = None if num_tokens is None else torch.tensor([num_tokens], dtype=torch.int32, device=DEVICE)
    plan = plan_experts(ids, num_experts, totals, counter)
    tiled = plan.tiled
    assert tiled is not None
    pairs, counts = reference.sort_by_expert(real.cpu(), num_experts)
    what = (ids.shape, num_experts, num_tokens)
    assert torch.equal(plan.pairs[: len(pairs)].cpu(), pairs.int()), what
    assert torch.equal(plan.counts.cpu(), counts), what
    assert torch.equal(totals.cpu(), counts + torch.arange(num_experts)), what
    assert torch.equal(tiled.places.cpu()[pairs], torch.arange(len(pairs)).int()), what
    start, expected = 0, []
    for expert, count in enumerate(counts.tolist()):
        firsts = range(0, count, tiled.block_m)
        expected += [[expert, start + first, min(tiled.block_m, count - first)] for first in firsts]
        start += count
    table = tiled.table[:, :3].tolist()
    assert [row for row in table if row[2]] == expected, what
    assert all(row[0] == -1 for row in table if not row[2]), what


class Layer:
    """Random experts."""

    def __init__(self, num_experts: int, hidden: int, inner: int, dtype: torch.dtype = torch.bfloat16) -> None:
        gate_up = random(num_experts, 2 * inner, hidden, dtype=dtype) * hidden**-0.5
        self.gate_up, self.down = gate_up, random(num_experts, hidden, inner, dtype=dtype) * inner**-0.5

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, num_tokens: Tensor | None = None) -> Tensor:
        plan = plan_experts(ids, len(self.gate_up), None, num_tokens)
        return self.by(plan, x, weights)

    def by(self, plan: ExpertPlan, x: Tensor, weights: Tensor) -> Tensor:
        inner = grouped_silu_mul(x, ExpertWeights(self.gate_up), plan)
        return combine(grouped_linear(inner, ExpertWeights(self.down), plan), weights, plan)

    def exact(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """In float64, an expert at a time."""
        out = torch.zeros(x.shape, dtype=torch.float64, device=DEVICE)
        for expert in ids.unique().tolist():
            rows, choices = (ids == expert).nonzero(as_tuple=True)
            gate, up = (x[rows].double() @ self.gate_up[expert].double().T).chunk(2, -1)
            y = (F.silu(gate) * up) @ self.down[expert].double().T
            out.index_add_(0, rows, weights[rows, choices, None].double() * y)
        return out

    def poison(self, ids: Tensor) -> None:
        """NaN in the experts that nobody was sent to."""
        is_idle = torch.ones(len(self.gate_up), dtype=torch.bool, device=DEVICE)
        is_idle[ids.unique().long()] = False
        self.gate_up[is_idle], self.down[is_idle] = NAN, NAN


def shares(num_rows: int, top_k: int) -> Tensor:
    return torch.randn(num_rows, top_k, device=DEVICE).softmax(-1)


def experts_against_float64() -> None:
    """Every row of the tables, sizes that no tile divides; filled up, the rest of the rows NaN and its sums zero."""
    for dtype, sizes in itertools.product(LIMITS, ((64, 48), (97, 41), (576, 1536), (2048, 1408))):
        for (num_experts, top_k), num_rows in itertools.product(((8, 2), (128, 8), (7, 3), (60, 4)), (1, 17, 64, 400)):
            against_float64(num_rows, (num_experts, top_k), sizes, dtype)


def experts_of_real_sizes_against_float64() -> None:
    for shape, numbers in (
        (((128, 8), (2048, 768)), (1, 4, 16, 64, 256, 512, 1024, 4096)),
        (((8, 2), (4096, 14336)), (1, 16, 64, 128, 256, 1024)),
    ):
        for num_rows in numbers:
            against_float64(num_rows, *shape, torch.bfloat16)


def against_float64(num_rows: int, routing: tuple[int, int], sizes: tuple[int, int], dtype: torch.dtype) -> None:
    (num_experts, top_k), (hidden, inner) = routing, sizes
    layer = Layer(num_experts, hidden, inner, dtype)
    x, ids, weights = (
        sliced(num_rows + 3, hidden, dtype=dtype),
        routed(num_rows + 3, *routing),
        shares(num_rows + 3, top_k),
    )
    x[num_rows:] = NAN
    layer.poison(ids[:num_rows])
    counter = torch.tensor([num_rows], dtype=torch.int32, device=DEVICE)
    out = layer(x, ids, weights, counter)
    expected = layer.exact(x[:num_rows], ids[:num_rows], weights)
    require(out[:num_rows], expected, f"experts {num_rows} {routing} {sizes} {dtype}", OF_EXPERTS)
    assert (out[num_rows:] == 0).all(), "rows that fill up"


def experts_far_apart() -> None:
    """The last ones begin past 2³¹ numbers."""
    layer = Layer(24, 4096, 14336)
    ids = torch.tensor([[23, 22], [0, 23], [21, 20]] * 3, dtype=torch.int32, device=DEVICE)
    x, weights = random(9, 4096), shares(9, 2)
    require(layer(x, ids, weights), layer.exact(x, ids, weights), "experts far apart")


def a_rows_bits_are_its_own() -> None:
    """At one number of rows: launched again, elsewhere in the step, among strangers; and the parts are the parts'."""
    _bits((1, 16, 64, 256, 512, 1024))


def a_rows_bits_do_not_tell_a_small_tile_from_a_large_one() -> None:
    """What the tables' ``tail`` needs: who shares a row's expert decides in which it stands."""
    tables = json.loads((CONFIGS / "nvidia_h200.json").read_text())
    rows = {product: {**tables[product][-1], "tail": 64} for product in ("moe_gate_up", "moe_down")}
    with other_rows({"moe_plan": {"block_m": 128}, **rows}):
        _bits((256, 1024, 2048))


def _bits(numbers: Sequence[int]) -> None:
    for (routing, sizes), num_rows in itertools.product(((((128, 8), (2048, 768))), ((8, 2), (576, 1536))), numbers):
        (num_experts, top_k), (hidden, inner) = routing, sizes
        layer, what = Layer(num_experts, hidden, inner), f"{num_rows} {routing}"
        x, ids, weights = random(num_rows, hidden), routed(num_rows, *routing), shares(num_rows, top_k)
        plan = plan_experts(ids, num_experts)
        out = layer.by(plan, x, weights)
        assert all(torch.equal(layer(x, ids, weights), out) for _ in range(LAUNCHES)), f"launches differ: {what}"
        order = torch.randperm(num_rows, device=DEVICE)
        moved = layer(x[order], ids[order].contiguous(), weights[order])
        assert torch.equal(moved, out[order]), f"a row depends on its place: {what}"
        few = max(1, num_rows // 3)
        others, strangers = routed(num_rows, *routing, skew=0.3), random(num_rows, hidden) * 7
        others[:few], strangers[:few] = ids[:few], x[:few]
        assert torch.equal(layer(strangers, others, weights)[:few], out[:few]), f"a row depends on others: {what}"
        gate_up = grouped_linear(x[plan.pairs.long() // top_k], ExpertWeights(layer.gate_up), plan)
        inner_rows = grouped_silu_mul(x, ExpertWeights(layer.gate_up), plan)
        require(inner_rows, silu_mul(gate_up).double(), f"silu on its way: {what}")
        y = grouped_linear(inner_rows, ExpertWeights(layer.down), plan)
        summed = reference.combine(y, weights, plan.pairs.long())
        assert torch.equal(combine(y, weights, plan), summed), f"sums: {what}"


def captured_experts_follow_their_memory() -> None:
    """One graph, replayed with other tokens, other choices and another number of tokens: the bits of a launch."""
    layer, totals = Layer(128, 2048, 768), torch.zeros(128, dtype=torch.int64, device=DEVICE)
    x, logits = random(64, 2048), torch.zeros(64, 128, device=DEVICE)
    room, counter = (
        torch.zeros(100, 8, dtype=torch.int32, device=DEVICE),
        torch.zeros(1, dtype=torch.int32, device=DEVICE),
    )

    def run() -> Tensor:
        ids, weights = route(logits, 8, RULES[0], room[:64])
        return layer.by(plan_experts(ids, 128, totals, counter), x, weights)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    assert not totals.any(), "what fills up was counted"
    expected = torch.zeros(128, dtype=torch.int64)
    for num_tokens in (64, 1, 0, 17, 64):
        x.copy_(random(64, 2048))
        logits.normal_()
        counter.fill_(num_tokens)
        graph.replay()
        ids, weights = route(logits, 8, RULES[0])
        assert torch.equal(room[:64], ids), num_tokens
        assert torch.equal(out[:num_tokens], layer(x, ids, weights)[:num_tokens]), num_tokens
        assert (out[num_tokens:] == 0).all(), num_tokens
        expected += torch.bincount(ids[:num_tokens].flatten().cpu(), minlength=128)
        assert torch.equal(totals.cpu(), expected), num_tokens


CHECKS: dict[str, Callable[[], None]] = {
    "experts routing": routing_is_the_references,
    "experts order": the_order_of_pairs_is_the_references,
    "experts": experts_against_float64,
    "experts of real sizes": experts_of_real_sizes_against_float64,
    "experts far apart": experts_far_apart,
    "experts bits": a_rows_bits_are_its_own,
    "experts tails": a_rows_bits_do_not_tell_a_small_tile_from_a_large_one,
    "experts captured": captured_experts_follow_their_memory,
}
