"""Experts under Triton's interpreter: routing, the order of pairs, the products, the sums."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import tiles
from kernels.moe import RoutingRule, reference, triton_kernel, triton_plan, triton_route
from kernels.moe.plan import ExpertPlan
from kernels.silu_mul import triton_kernel as silu_mul_kernel
from kernels.testing import NAN, assert_matches_reference
from tests.kernels.interpreted.checks import draw, planted, sliced

FLOAT, BF16 = torch.float32, torch.bfloat16
DTYPES = pytest.mark.parametrize("dtype", [FLOAT, BF16], ids=["fp32", "bf16"])
RULES = {
    "softmax-renormalized": RoutingRule(True, True),
    "softmax": RoutingRule(True, False),
    "topk-softmax": RoutingRule(False, False),
}
INF = float("inf")
BAD_ROWS = torch.tensor(
    [
        [NAN] * 8,
        [-INF] * 8,
        [INF] * 8,
        [0.25] * 8,
        [NAN, 1.0, NAN, 0.0, NAN, NAN, NAN, NAN],
        [-INF, INF, -INF, INF, 0.0, NAN, -INF, 1.0],
        [0.0, -0.0, 0.0, -0.0, 0.0, -1.0, -0.0, 0.0],
    ]
)
SIZES = [(8, 2), (7, 3), (1, 1), (5, 5), (60, 4)]  # experts, choices


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    """So that small steps have several tiles of an expert, several steps and groups of programs."""
    product = [{"tail": 0, "block_n": 32, "block_k": 16, "group": 3, "num_warps": 4, "num_stages": 2}]
    set_tables(monkeypatch, moe_plan=16, moe_gate_up=product, moe_down=product)


def set_tables(monkeypatch, moe_plan: int, **rows: list[dict[str, int]]) -> None:
    """``moe_plan``: rows of a tile."""
    sums = [{"block": 64, "num_warps": 4}]
    table = {**tiles._table("default"), "moe_plan": [{"block_m": moe_plan}], "moe_combine": sums, **rows}
    monkeypatch.setattr(tiles, "_table", lambda _: table)


# ── routing ──────────────────────────────────────────────────────────────────────────────────────


def check_route(kernel, logits: Tensor, top_k: int, rule: RoutingRule) -> None:
    """Ids as of the reference; it begins in the middle of a wider row whose rest is NaN."""
    wide = torch.full((len(logits), logits.shape[1] + 3), NAN, dtype=logits.dtype)
    wide[:, 2:-1] = logits
    ids = torch.full((len(logits) + 1, top_k), -7, dtype=torch.int32)
    weights = kernel.route(wide[:, 2:-1], top_k, rule, ids[:-1])
    expected, exact = reference.route(logits.double(), top_k, rule.softmax_first, rule.renormalize)
    assert torch.equal(ids[:-1], expected.int())
    assert (ids[-1] == -7).all()
    assert_matches_reference(weights, exact)


@DTYPES
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize(("num_experts", "top_k"), [*SIZES, (257, 10)])
def test_experts_and_weights_are_those_of_the_reference(num_experts, top_k, rule, dtype):
    logits = torch.cat((draw(2, num_experts) * 3, draw(3, num_experts, seed=1).round())).to(dtype)
    check_route(triton_route, logits, top_k, rule)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("top_k", [1, 3, 8])
def test_rows_of_no_number_are_routed_as_by_the_reference(rule, top_k):
    check_route(triton_route, BAD_ROWS, top_k, rule)


ROUTE_FAULTS = {
    "ties to the highest expert": (
        "tl.min(tl.where(b_left == best, o_experts, EXPERTS), 0)",
        "tl.max(tl.where(b_left == best, o_experts, -1), 0)",
    ),
    "NaN chosen first": ("b_finite, -LARGEST)", "b_finite, LARGEST)"),
    "infinities left": ("tl.minimum(tl.maximum(b_logits, -LARGEST), LARGEST)", "b_logits"),
    "a lane without an expert": ('tl.where(m_experts, b_logits, -float("inf"))', "b_logits"),
    "an expert chosen twice": ('tl.where(o_experts == expert, -float("inf"), b_left)', "b_left"),
    "never renormalized": ("if RENORMALIZE or not SOFTMAX_FIRST:", "if False:"),
    "weights of another row": ("o_out = i_row * TOP_K", "o_out = i_row // 2 * TOP_K"),
}


@pytest.mark.parametrize("fault", ROUTE_FAULTS.values(), ids=ROUTE_FAULTS)
def test_a_fault_planted_into_routing_is_caught(fault, tmp_path):
    faulty = planted(triton_route, fault, tmp_path)
    with pytest.raises(AssertionError):
        _check_routes(faulty)


def _check_routes(kernel) -> None:
    for rule in RULES.values():
        check_route(kernel, BAD_ROWS, 3, rule)
        check_route(kernel, draw(4, 7), 7, rule)
        check_route(kernel, draw(4, 7) - 3, 2, rule)


# ── the order of pairs ───────────────────────────────────────────────────────────────────────────


def routed(num_rows: int, num_experts: int, top_k: int, seed: int = 0, skew: float = 0.0) -> Tensor:
    """[T, K] different experts a row; ``skew``: how much the first ones are preferred."""
    wanted = draw(num_rows, num_experts, seed=seed) - skew * torch.arange(num_experts)
    return wanted.argsort(1)[:, :top_k].flip(1).int().contiguous() if skew < 0 else wanted.topk(top_k).indices.int()


def check_plan(kernel, ids: Tensor, num_experts: int, num_tokens: int | None = None) -> ExpertPlan:
    """Of the first ``num_tokens`` rows; the others' ids may be anything."""
    real = ids if num_tokens is None else ids[:num_tokens]
    given = ids.clone()
    given[len(real) :] = torch.tensor([0, 2**30], dtype=torch.int32)[torch.arange(len(ids) - len(real)) % 2, None]
    totals = torch.arange(num_experts) * 3
    before = totals.clone()
    counter = None if num_tokens is None else torch.tensor([num_tokens], dtype=torch.int32)
    plan = kernel.plan_experts(given, num_experts, totals, counter)
    pairs, counts = reference.sort_by_expert(real, num_experts)
    assert torch.equal(plan.pairs[: len(pairs)], pairs.int())
    assert torch.equal(plan.counts, counts)
    assert torch.equal(totals - before, counts)
    assert torch.equal(plan.tiled.places[pairs], torch.arange(len(pairs)).int())
    _check_tiles(plan, counts.tolist())
    return plan


def _check_tiles(plan: ExpertPlan, counts: list[int]) -> None:
    """Each expert's places once, in tiles of its own, in order; the rest of the table empty."""
    block_m, start, expected = plan.tiled.block_m, 0, []
    for expert, count in enumerate(counts):
        expected += [[expert, start + first, min(block_m, count - first)] for first in range(0, count, block_m)]
        start += count
    rows = plan.tiled.table[:, :3].tolist()
    assert [row for row in rows if row[2]] == expected
    assert all(row[0] == -1 for row in rows if not row[2])


@pytest.mark.parametrize(
    ("num_rows", "num_experts", "top_k"),
    [*itertools.product([1, 17, 150], [8], [2]), (33, 7, 3), (150, 1, 1), (40, 5, 5), (2, 60, 4), (33, 60, 4)],
)
def test_pairs_stand_by_expert_and_then_by_token(num_rows, num_experts, top_k):
    for skew in (0.0, 0.3):
        check_plan(triton_plan, routed(num_rows, num_experts, top_k, skew=skew), num_experts)


@pytest.mark.parametrize("num_rows", [16, 600])
def test_all_tokens_may_go_to_the_same_experts(num_rows):
    check_plan(triton_plan, torch.tensor([[6, 1]] * num_rows, dtype=torch.int32), 8)


@pytest.mark.parametrize("num_tokens", [0, 1, 16, 40])
@pytest.mark.parametrize("num_rows", [40, 300])
def test_rows_that_only_fill_up_a_step_belong_to_no_expert(num_rows, num_tokens):
    check_plan(triton_plan, routed(num_rows, 8, 2), 8, num_tokens)


def test_more_pairs_than_are_read_at_a_time_keep_their_order():
    check_plan(triton_plan, routed(1100, 4, 2, skew=0.1), 4)


def test_few_pairs_have_no_more_tiles_than_there_are_of_them():
    assert len(check_plan(triton_plan, routed(2, 60, 4), 60).tiled.table) == 8


def test_no_routing_has_more_tiles_than_the_host_reckons_with():
    for num_pairs, num_experts, block_m in ((1, 1, 16), (8, 128, 16), (130, 8, 16), (4096, 128, 32)):
        most = num_pairs // block_m + num_experts
        worst = min(num_pairs, most)
        assert worst <= triton_plan.most_tiles(num_pairs, num_experts, block_m) <= most


PLAN_FAULTS = {
    "an expert's pairs of its neighbour": ("b_own += (b_ids == own)", "b_own += (b_ids == own + 1)"),
    "places that begin too early": ("place = start\n", "place = start - (start > 0)\n"),
    "a block that begins anew": ("        place += tl.sum", "        place += 0 * tl.sum"),
    "rows that fill up counted": ("num_rows = tl.load(p_num_tokens)", "num_rows = num_rows"),
    "tiles of two experts in one place": ("first_tile = own + start", "first_tile = start"),
    "an end that is not cleared": ("tl.where(own == NUM_EXPERTS - 1, num_tiles, end_tile)", "end_tile"),
    "a last tile of all its rows": ("tl.minimum(tl.maximum(count - o_tiles * BLOCK_M, 0), BLOCK_M)", "BLOCK_M"),
    "every second tile of the others forgotten": ("b_rank % BLOCK_M == 0", "b_rank % (2 * BLOCK_M) == 0"),
    "totals that forget": ("tl.load(p_totals + i_expert) + count", "count"),
}


@pytest.mark.parametrize("fault", PLAN_FAULTS.values(), ids=PLAN_FAULTS)
def test_a_fault_planted_into_the_order_is_caught(fault, tmp_path):
    faulty = planted(triton_plan, fault, tmp_path)
    with pytest.raises((AssertionError, IndexError)):
        _check_plans(faulty)


def _check_plans(kernel) -> None:
    check_plan(kernel, routed(40, 4, 2), 4)
    check_plan(kernel, routed(40, 8, 2), 8, 17)
    check_plan(kernel, routed(1100, 4, 2, skew=0.2), 4, 1090)


# ── the whole layer ──────────────────────────────────────────────────────────────────────────────


def step(
    kernel, x: Tensor, ids: Tensor, weights: Tensor, experts: tuple[Tensor, Tensor], num_tokens: int | None = None
) -> Tensor:
    counter = None if num_tokens is None else torch.tensor([num_tokens], dtype=torch.int32)
    plan = triton_plan.plan_experts(ids, len(experts[0]), None, counter)
    inner = kernel.grouped_silu_mul(x, experts[0], plan)
    return triton_route.combine(kernel.grouped_linear(inner, experts[1], plan), weights, plan)


def weights_of(num_experts: int, hidden: int, inner: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    gate_up = draw(num_experts, 2 * inner, hidden, dtype=dtype, seed=1) / hidden**0.5
    return gate_up, draw(num_experts, hidden, inner, dtype=dtype, seed=2) / inner**0.5


def by_hand(x: Tensor, ids: Tensor, weights: Tensor, experts: tuple[Tensor, Tensor]) -> Tensor:
    """A loop over tokens and choices in float64."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, chosen in enumerate(ids.tolist()):
        for expert, weight in zip(chosen, weights[token].tolist(), strict=True):
            gate, up = (experts[0][expert].double() @ x[token].double()).chunk(2)
            out[token] += weight * (experts[1][expert].double() @ (F.silu(gate) * up))
    return out


def check_step(
    kernel, num_rows: int, experts_and_choices: tuple[int, int], sizes: tuple[int, int], dtype: torch.dtype
) -> None:
    """What nobody was sent to is NaN: experts without tokens, rows that fill up."""
    (num_experts, top_k), (hidden, inner) = experts_and_choices, sizes
    experts = weights_of(num_experts, hidden, inner, dtype)
    ids = routed(num_rows, num_experts, top_k)
    weights = torch.softmax(draw(num_rows, top_k, seed=5), 1)
    expected = by_hand(x := draw(num_rows, hidden, dtype=dtype, seed=3), ids, weights, experts)
    for expert in set(range(num_experts)) - set(ids.flatten().tolist()):
        for part in experts:
            part[expert] = NAN
    wide = torch.full((num_rows + 2, hidden + 3), NAN, dtype=dtype)
    wide[:num_rows, 2:-1] = x
    padded = torch.cat((ids, torch.zeros(2, top_k, dtype=torch.int32)))
    out = step(kernel, wide[:, 2:-1], padded, torch.cat((weights, weights[:1].expand(2, -1))), experts, num_rows)
    assert_matches_reference(out[:num_rows], expected)
    assert (out[num_rows:] == 0).all()


@DTYPES
@pytest.mark.parametrize(
    ("num_rows", "experts", "sizes"),
    [
        (1, (8, 2), (48, 40)),
        (2, (64, 8), (32, 16)),  # Qwen3-30B-A3B: more experts than pairs
        (30, (3, 2), (48, 70)),  # Mixtral: several tiles of an expert
        (20, (7, 3), (37, 21)),
        (5, (5, 5), (16, 1)),
        (17, (1, 1), (33, 20)),
    ],
)
def test_the_layer_equals_a_loop_over_tokens_and_experts(num_rows, experts, sizes, dtype):
    check_step(triton_kernel, num_rows, experts, sizes, dtype)


def test_gate_and_up_are_rounded_before_they_are_multiplied():
    """As by a product and silu_mul one after the other, bit by bit."""
    gate_up, _ = weights_of(3, 48, 20, BF16)
    x, ids = sliced(20, 48, dtype=BF16), routed(20, 3, 2)
    plan = triton_plan.plan_experts(ids, 3, None, None)
    apart = triton_kernel.grouped_linear(x[plan.pairs // 2].contiguous(), gate_up, plan)

    assert torch.equal(triton_kernel.grouped_silu_mul(x, gate_up, plan), silu_mul_kernel.silu_mul(apart))


@DTYPES
@pytest.mark.parametrize("num_rows", [3, 40])  # one small tile an expert; large ones, small ones and none
def test_a_tile_of_few_rows_may_be_computed_as_a_smaller_one(num_rows, dtype, monkeypatch):
    product = [{"tail": 16, "block_n": 32, "block_k": 32, "group": 3, "num_warps": 4, "num_stages": 2}]
    set_tables(monkeypatch, moe_plan=32, moe_gate_up=product, moe_down=product)
    check_step(triton_kernel, num_rows, (3, 2), (48, 56), dtype)
    check_step(triton_kernel, num_rows, (8, 1), (37, 21), dtype)


@DTYPES
def test_sums_are_those_of_the_reference_bit_by_bit(dtype):
    plan = triton_plan.plan_experts(routed(9, 8, 3), 8, None, None)
    y, weights = draw(27, 40, dtype=dtype), torch.softmax(draw(9, 3, seed=1), 1)

    assert torch.equal(triton_route.combine(y, weights, plan), reference.combine(y, weights, plan.pairs.long()))


@DTYPES
def test_a_tokens_bits_depend_on_no_other_token_of_the_step(dtype):
    """Whoever shares the step, and wherever in it the token stands, at one number of rows. Whole numbers, and one term
    a row of the second product: a processor's own order of terms does not matter."""
    gate_up = draw(4, 48, 32, seed=1).round().to(dtype)
    experts = gate_up, torch.eye(32, 24).repeat(4, 1, 1).to(dtype) * torch.arange(1, 5)[:, None, None].to(dtype)
    x, ids, weights = draw(30, 32).round().to(dtype), routed(30, 4, 2), torch.softmax(draw(30, 2, seed=1), 1)
    whole = step(triton_kernel, x, ids, weights, experts)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(3))
    moved = step(triton_kernel, x[order], ids[order].contiguous(), weights[order], experts)
    others = routed(30, 4, 2, seed=9)
    others[:5] = ids[:5]
    strangers = torch.full((25, 32), NAN, dtype=dtype)
    beside = step(triton_kernel, torch.cat((x[:5], strangers)), others, weights, experts, 20)

    assert torch.equal(moved, whole[order])
    assert torch.equal(beside[:5], whole[:5])


def test_a_step_without_rows_computes_nothing():
    experts = weights_of(8, 64, 48, FLOAT)
    nothing = torch.zeros(0, 2, dtype=torch.int32)

    assert step(triton_kernel, torch.zeros(0, 64), nothing, torch.zeros(0, 2), experts).shape == (0, 64)


FAULTS = {
    "a weight of the next expert": ("i_expert * (2 * SIZE * SIZE_IN)", "(i_expert + 1) % 3 * (2 * SIZE * SIZE_IN)"),
    "gate for up": ("o_both % 2 * SIZE", "(1 - o_both % 2) * SIZE"),
    "another token's row": ("// TOP_K\n", "// 1 % 30\n"),
    "rows of another tile": ("p_x + (i_first + o_rows) * SIZE_IN", "p_x + o_rows * SIZE_IN"),
    "a row of a neighbour written": (
        "m_rows = o_rows < num_own\n    i_tokens",
        "m_rows = o_rows < num_own - 1\n    i_tokens",
    ),
    "columns left out": ("i_column * BLOCK_N + tl.arange(0, BLOCK_N)\n    m_out", "tl.arange(0, BLOCK_N)\n    m_out"),
    "tiles left out": ("i_first + i_own % size,", "i_first + i_own % size // 2 * 2,"),
    "no mask of the terms": (
        "o_in < SIZE_IN if SIZE_IN % BLOCK_K else",
        "tl.full((BLOCK_K,), True, tl.int1) if True else",
    ),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_planted_into_the_products_is_caught(fault, tmp_path):
    faulty = planted(triton_kernel, fault, tmp_path)
    with pytest.raises(AssertionError):
        check_step(faulty, 30, (3, 2), (37, 21), FLOAT)


SUM_FAULTS = {
    "the first choice's weight for all": ("p_weights + i_row * TOP_K + i_choice)", "p_weights + i_row * TOP_K)"),
    "another pair's row": ("tl.load(p_own + i_choice)", "tl.load(p_own)"),
    "rows that fill up read": ("m_y = m_size & is_token", "m_y = m_size"),
}


@pytest.mark.parametrize("fault", SUM_FAULTS.values(), ids=SUM_FAULTS)
def test_a_fault_planted_into_the_sums_is_caught(fault, tmp_path, monkeypatch):
    monkeypatch.setattr(triton_route, "combine", planted(triton_route, fault, tmp_path).combine)
    with pytest.raises(AssertionError):
        check_step(triton_kernel, 9, (3, 2), (40, 24), FLOAT)
