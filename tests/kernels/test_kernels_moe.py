"""kernels/moe: routing by a plain rule, cases 21 and 22, and that a token's bits depend on nothing but the token."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.experts import homes
from kernels.moe import (
    ExpertPlan,
    ExpertWeights,
    RoutingRule,
    combine,
    grouped_linear,
    grouped_silu_mul,
    plan_experts,
    route,
)
from kernels.silu_mul import silu_mul
from kernels.testing import assert_matches_reference

NAN, INF = float("nan"), float("inf")
DTYPES = [torch.float32, torch.bfloat16]
MIXTRAL, QWEN, GRANITE = RoutingRule(True, True), RoutingRule(True, False), RoutingRule(False, False)
RULES = {"softmax-renormalized": MIXTRAL, "softmax": QWEN, "topk-softmax": GRANITE}
HIDDEN, INNER = 32, 12


@pytest.fixture(params=[1, 2], ids=["1-thread", "2-threads"])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def chosen_by_sorting(row: list[float], top_k: int) -> list[int]:
    """The rule in one line: by falling logit, then by rising number."""
    return sorted(range(len(row)), key=lambda expert: (-row[expert], expert))[:top_k]


def expected_weights(row: Tensor, ids: list[int], rule: RoutingRule) -> Tensor:
    row = row.double()
    exp = (row - row.max()).exp()
    if not rule.softmax_first:
        chosen = (row[ids] - row[ids].max()).exp()
        return chosen / chosen.sum()
    weights = (exp / exp.sum())[ids]
    return weights / weights.sum() if rule.renormalize else weights


# ── routing ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("num_experts", [1, 7, 60, 64, 257, 512])
def test_ids_are_those_of_a_sort_and_weights_those_of_the_rule(num_experts, rule):
    """Case 22; half of the rows are of few distinct values, so that most of their choices are ties."""
    logits = torch.cat((normal(20, num_experts) * 3, normal(20, num_experts, seed=1).round()))
    for top_k in range(1, min(10, num_experts) + 1):
        ids, weights = route(logits, top_k, rule)
        for row, chosen, given in zip(logits, ids.tolist(), weights, strict=True):
            assert chosen == chosen_by_sorting(row.tolist(), top_k)
            assert_matches_reference(given, expected_weights(row, chosen, rule))


def test_winners_above_number_255_are_found():
    logits = normal(6, 512)
    winners = [[256, 300], [511, 257], [400, 401], [256, 511], [383, 290], [511, 510]]
    for row, ids in zip(logits, winners, strict=True):
        row[ids[0]], row[ids[1]] = 20.0, 19.0

    ids, _ = route(logits, 2, MIXTRAL)

    assert ids.tolist() == winners


BAD_ROWS = {
    "all-nan": [NAN] * 8,
    "all-minus-inf": [-INF] * 8,
    "one-plus-inf": [0.0, 1.0, -1.0, INF, 0.5, 0.0, 2.0, 0.0],
    "all-equal": [0.25] * 8,
    "some-nan": [NAN, 1.0, NAN, 0.0, NAN, NAN, NAN, NAN],
    "both-infs": [-INF, INF, -INF, INF, 0.0, NAN, -INF, 1.0],
    "all-plus-inf": [INF] * 8,
}


@pytest.mark.parametrize("top_k", [1, 2, 4, 8])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_any_row_gives_different_experts_and_finite_weights(rule, top_k):
    """Case 21."""
    ids, weights = route(torch.tensor(list(BAD_ROWS.values())), top_k, rule)

    for row in ids.tolist():
        assert len(set(row)) == top_k
        assert all(0 <= expert < 8 for expert in row)
    assert weights.isfinite().all()
    assert (weights >= 0).all()


def test_ties_go_to_the_lowest_expert_and_nan_is_chosen_last():
    """Case 21: a NaN is no more than -inf, and two of one rank go by number."""
    expected = {
        "all-nan": [0, 1, 2],
        "all-minus-inf": [0, 1, 2],
        "one-plus-inf": [3, 6, 1],
        "all-equal": [0, 1, 2],
        "some-nan": [1, 3, 0],
        "both-infs": [1, 3, 7],
        "all-plus-inf": [0, 1, 2],
    }

    ids, _ = route(torch.tensor(list(BAD_ROWS.values())), 3, MIXTRAL)

    assert dict(zip(BAD_ROWS, ids.tolist(), strict=True)) == expected


def test_a_logit_of_infinity_takes_all_the_weight():
    _, weights = route(torch.tensor([BAD_ROWS["one-plus-inf"]]), 2, QWEN)

    assert weights.tolist() == [[1.0, 0.0]]


# ── the whole layer ──────────────────────────────────────────────────────────────────────────────


class Layer:
    """Router and experts of random weights."""

    def __init__(self, num_experts: int, top_k: int, dtype: torch.dtype = torch.float32, rule: RoutingRule = MIXTRAL):
        self.num_experts, self.top_k, self.rule = num_experts, top_k, rule
        self.gate_up = normal(num_experts, 2 * INNER, HIDDEN, seed=1, dtype=dtype) / 4
        self.down = normal(num_experts, HIDDEN, INNER, seed=2, dtype=dtype) / 2
        self.packed = ExpertWeights(self.gate_up), ExpertWeights(self.down)

    def __call__(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = route(logits, self.top_k, self.rule)
        plan = plan_experts(ids, self.num_experts)
        inner = grouped_silu_mul(x, self.packed[0], plan)
        return combine(grouped_linear(inner, self.packed[1], plan), weights, plan)

    def by_hand(self, x: Tensor, logits: Tensor) -> Tensor:
        """A loop over tokens and choices in float64."""
        out = torch.zeros(x.shape, dtype=torch.float64)
        for token in range(len(x)):
            ids = chosen_by_sorting(logits[token].tolist(), self.top_k)
            for expert, weight in zip(ids, expected_weights(logits[token], ids, self.rule), strict=True):
                gate, up = (self.gate_up[expert].double() @ x[token].double()).chunk(2)
                out[token] += weight * (self.down[expert].double() @ (F.silu(gate) * up))
        return out


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (7, 3), (8, 2), (60, 10), (257, 4)])
def test_the_layer_equals_a_loop_over_tokens_and_experts(num_experts, top_k, rule):
    layer = Layer(num_experts, top_k, rule=rule)
    x, logits = normal(33, HIDDEN, seed=3), normal(33, num_experts, seed=4)

    assert_matches_reference(layer(x, logits), layer.by_hand(x, logits))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_experts", "top_k"), [(7, 3), (8, 2), (60, 10)])
def test_a_tokens_bits_do_not_depend_on_the_others(num_experts, top_k, dtype, threads):
    layer = Layer(num_experts, top_k, dtype)
    x, logits = normal(150, HIDDEN, seed=3, dtype=dtype), normal(150, num_experts, seed=4, dtype=dtype)
    whole = layer(x, logits)
    rng = random.Random(1)

    for size in (1, 1, 1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 31, 64, 100, 149):
        some = rng.sample(range(150), size)
        assert torch.equal(layer(x[some], logits[some]), whole[some]), some


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bad_rows_do_not_change_the_others(dtype, threads):
    """Case 21: NaN in the tokens as well as in the logits, beside good rows, in their experts."""
    layer = Layer(8, 2, dtype)
    x, logits = normal(20, HIDDEN, seed=3, dtype=dtype), normal(20, 8, seed=4, dtype=dtype)
    alone = layer(x, logits)
    bad = torch.tensor(list(BAD_ROWS.values()), dtype=dtype)
    poison = torch.full((len(bad), HIDDEN), NAN, dtype=dtype)

    mixed = layer(torch.cat((poison, x, poison)), torch.cat((bad, logits, bad)))

    assert torch.equal(mixed[len(bad) : -len(bad)], alone)
    assert mixed[: len(bad)].isnan().all()


def test_no_expert_is_ever_too_full():
    """Dropless: a step whose tokens all want the same experts computes each of them."""
    layer = Layer(8, 2)
    x, logits = normal(300, HIDDEN, seed=3), normal(1, 8, seed=4).expand(300, 8)
    plan = plan_experts(route(logits, 2, MIXTRAL)[0], 8)

    assert sorted(plan.counts.tolist()) == [0] * 6 + [300] * 2
    assert_matches_reference(layer(x, logits), layer.by_hand(x, logits))


def test_permuting_two_experts_is_noticed():
    """What the other tests compare does depend on which expert is which."""
    layer, other = Layer(8, 2), Layer(8, 2)
    x, logits = normal(20, HIDDEN, seed=3), normal(20, 8, seed=4)
    order = [1, 0, *range(2, 8)]
    other.packed = ExpertWeights(other.gate_up[order]), ExpertWeights(other.down[order])

    changed = (layer(x, logits) != other(x, logits)).any(1)

    uses = (route(logits, 2, MIXTRAL)[0] < 2).any(1)
    assert torch.equal(changed, uses)


@pytest.mark.parametrize("num_ranks", [1, 3, 8])
@pytest.mark.parametrize("num_experts", [7, 60, 257])
def test_experts_spread_over_ranks_give_the_bits_of_one(num_experts, num_ranks):
    """Case 22: each rank computes its own experts' pairs, the sum is made in the order of choices."""
    layer = Layer(num_experts, min(num_experts, 6))
    x, logits = normal(40, HIDDEN, seed=3), normal(40, num_experts, seed=4)
    ids, weights = route(logits, layer.top_k, MIXTRAL)
    plan = plan_experts(ids, num_experts)
    rows, starts = x[plan.pairs // plan.top_k], [0, *plan.counts.cumsum(0).tolist()]
    y = torch.full_like(rows, NAN)

    for home in homes(num_experts, num_ranks):
        if not home:
            continue
        part = slice(starts[home.start], starts[home.stop])
        own = ExpertPlan(plan.pairs[part], plan.counts[home.start : home.stop], layer.top_k)
        gate_up, down = (ExpertWeights(weight[home.start : home.stop]) for weight in (layer.gate_up, layer.down))
        y[part] = grouped_linear(silu_mul(grouped_linear(rows[part], gate_up, own)), down, own)

    assert torch.equal(combine(y, weights, plan), layer(x, logits))


def test_what_the_weights_were_can_be_read_again():
    weights = normal(5, 24, HIDDEN)

    assert torch.equal(ExpertWeights(weights).weight(), weights)


# ── silu_mul ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("num_threads", [1, 2, 7])
@pytest.mark.parametrize("inner", [24, 1408])
def test_activations_are_cut_between_threads_without_a_changed_bit(inner, num_threads):
    """Seven threads cut plain F.silu inside a vector, whose lanes then are computed by another exp."""
    gate_up = normal(400, 2 * inner) * 3
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    rows = torch.cat([silu_mul(row[None]) for row in gate_up])
    torch.set_num_threads(num_threads)
    whole = silu_mul(gate_up)
    torch.set_num_threads(before)

    assert torch.equal(whole, rows)
    gate, up = gate_up.double().chunk(2, -1)
    assert_matches_reference(whole, F.silu(gate) * up)
