"""Who pays what of a step: exact sums, the model's Shapley value, and coefficients found again."""

import itertools
import math
import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from engine.metering import cost
from engine.metering.cost import FEATURES, WEIGHTS, StepShape, features, split, weights
from engine.metering.cost_fit import PRIOR, CostFit, solve
from engine.models.moe import expert_uses, shared_evenly

COEFFICIENTS = np.array([5e6, 2e3, 2.2e4, 31.0, 1.7, 40.0, 6e4, 900.0, 7e4])
SLOT_MIB = np.array([1.5, 24.0, 7.25, 0.0])
LAYERS, EXPERTS, TOP_K = 2, 6, 2


@dataclass
class Step:
    """``routes`` [L][T, K]: the experts of each token, the chunks' tokens one behind the other."""

    shape: StepShape
    routes: list[torch.Tensor]

    def owners(self) -> torch.Tensor:
        return torch.from_numpy(np.repeat(np.arange(len(self.shape.tokens)), self.shape.tokens))

    def parts(self) -> cost.Floats:
        uses = expert_uses(torch.stack(self.routes), self.owners(), len(self.shape.tokens), EXPERTS)
        found = cost.parts(self.shape, SLOT_MIB)
        found[cost.EXPERT] = shared_evenly(uses).numpy()
        return found

    def woken_by(self, member: int) -> set[tuple[int, int]]:
        rows = (self.owners() == member).nonzero().flatten().tolist()
        layers = enumerate(self.routes)
        return {(layer, expert) for layer, chosen in layers for row in rows for expert in chosen[row].tolist()}


def random_step(draw: random.Random, count: int, longest: int = 40) -> Step:
    """Decodes and prefills, some with one of three adapters; some routers like few experts."""
    slots = np.array([draw.randrange(-1, 3) for _ in range(count)])
    tokens = np.array([draw.choice([1, 1, 1, draw.randint(2, longest)]) for _ in range(count)])
    shape = StepShape(np.array([draw.randrange(4_000) for _ in range(count)]), tokens, slots)
    numbers, liked = np.random.default_rng(draw.randrange(1 << 30)), draw.randint(TOP_K, EXPERTS)
    routes = [numbers.random((tokens.sum(), liked)).argsort(1)[:, :TOP_K] for _ in range(LAYERS)]
    return Step(shape, [torch.from_numpy(chosen) for chosen in routes])


def modelled_ns(step: Step, members: tuple[int, ...]) -> float:
    """The step's time with these members only, from the model's definition."""
    if not members:
        return 0.0
    f = dict(zip(FEATURES, COEFFICIENTS.tolist(), strict=True))
    total, adapters, experts = f["step"], set(), set()
    for member in members:
        start, tokens, slot = (int(each[member]) for each in (step.shape.starts, step.shape.tokens, step.shape.slots))
        pairs = sum(range(start + 1, start + tokens + 1))
        total += f["sequence"] + f["token"] * tokens + f["key"] * (start + tokens) + f["pair"] * pairs
        total += f["lora"] * SLOT_MIB[slot] * tokens
        adapters |= {slot} - {-1}
        experts |= step.woken_by(member)
    total += sum(f["adapter"] + f["adapter_mib"] * SLOT_MIB[slot] for slot in adapters)
    return total + f["expert"] * len(experts)


def by_all_coalitions(step: Step) -> list[float]:
    """The Shapley value from its definition: the mean of what each adds, over all orders of arrival."""
    count = len(step.shape.tokens)
    time = {
        members: modelled_ns(step, members)
        for size in range(count + 1)
        for members in itertools.combinations(range(count), size)
    }
    values = [0.0] * count
    for members, before in time.items():
        chance = math.factorial(len(members)) * math.factorial(count - len(members) - 1) if len(members) < count else 0
        for player in set(range(count)) - set(members):
            added = time[tuple(sorted((*members, player)))] - before
            values[player] += added * chance / math.factorial(count)
    return values


def test_the_closed_form_is_the_shapley_value_of_the_modelled_time_with_adapters_and_experts():
    draw = random.Random(3)
    for count in (1, 2, 3, 4, 5, 6, 7, 8) * 3:
        step = random_step(draw, count, longest=6)
        parts = step.parts()

        found = COEFFICIENTS @ parts

        assert found == pytest.approx(by_all_coalitions(step), rel=1e-9)
        assert features(parts) @ COEFFICIENTS == pytest.approx(modelled_ns(step, tuple(range(count))), rel=1e-12)


def test_who_alone_wakes_an_expert_pays_for_it_and_who_shares_one_pays_a_part():
    shape = StepShape(np.full(3, 9), np.ones(3, np.int64), np.full(3, -1))
    step = Step(shape, [torch.tensor([[0, 1], [0, 1], [0, 5]])])

    experts = step.parts()[cost.EXPERT]

    assert experts == pytest.approx([1 / 3 + 1 / 2, 1 / 3 + 1 / 2, 1 / 3 + 1])
    assert experts.sum() == pytest.approx(3)  # woken


def test_a_token_later_each_chunk_reads_one_key_more_and_shares_as_before():
    shape = StepShape(np.array([5, 900, 31]), np.ones(3, np.int64), np.array([1, -1, 1]))
    later = StepShape(shape.starts + 1, shape.tokens, shape.slots)

    found = cost.one_token_later(cost.parts(shape, SLOT_MIB))

    assert found.tolist() == cost.parts(later, SLOT_MIB).tolist()


def test_weights_keep_the_proportion_of_costs_whatever_their_size():
    draw = np.random.default_rng(4)
    for size in (1e-3, 1.0, 1e9, 1e17):
        costs = draw.random(256) * size

        found = weights(costs)

        assert found.min() >= 1
        assert 0.999 * WEIGHTS < found.sum() <= WEIGHTS
        assert found / found.sum() == pytest.approx(costs / costs.sum(), abs=1e-8)
    assert weights(np.zeros(3)).tolist() == [1, 1, 1]


def test_shares_are_the_floors_of_exact_cumulative_shares_and_sum_to_the_step():
    draw = random.Random(1)
    for _ in range(500):
        chosen = [draw.randrange(0, 1 << draw.randint(1, 24)) for _ in range(draw.randint(1, 64))]
        chosen[draw.randrange(len(chosen))] += 1
        step_ns = draw.randrange(0, 1 << draw.randint(1, 62))

        shares = split(step_ns, np.array(chosen))

        bounds = [step_ns * part // sum(chosen) for part in itertools.accumulate(chosen, initial=0)]
        assert shares == [upper - lower for lower, upper in itertools.pairwise(bounds)]
        assert sum(shares) == step_ns


def test_the_shares_of_every_random_step_sum_to_it_to_the_nanosecond():
    draw = random.Random(2)
    for _ in range(1_000):
        step_ns = draw.randrange(1, 10 ** draw.randint(1, 12))
        shares = split(step_ns, weights(COEFFICIENTS @ random_step(draw, draw.randint(1, 12), longest=10).parts()))

        assert sum(shares) == step_ns
        assert min(shares) >= 0


def test_who_did_nothing_pays_nothing():
    assert split(1_000, np.array([0, 3, 0, 1])) == [0, 750, 0, 250]


def test_nothing_is_split_among_nobody_and_time_without_users_is_a_bug():
    assert split(0, np.array([], np.int64)) == []
    with pytest.raises(AssertionError):
        split(5, np.array([0, 0]))
    with pytest.raises(AssertionError):
        split(5, np.array([2, -1]))


def test_a_step_longer_than_a_century_or_weights_beyond_their_bound_are_a_bug():
    with pytest.raises(AssertionError):
        split(1 << 62, np.array([1]))
    with pytest.raises(AssertionError):
        split(5, np.array([WEIGHTS, 1]))


def test_eight_choices_of_one_request_pay_what_eight_requests_would():
    alike = StepShape(np.full(8, 100), np.ones(8, np.int64), np.full(8, -1))

    assert len(set(weights(COEFFICIENTS @ cost.parts(alike, SLOT_MIB)).tolist())) == 1


# ── the fit ──────────────────────────────────────────────────────────────────────────────────────


def learned(num_steps: int, noise: float, planted: np.ndarray = COEFFICIENTS) -> CostFit:
    draw, fit = random.Random(7), CostFit()
    for _ in range(num_steps):
        seen = features(random_step(draw, draw.randint(1, 32)).parts())
        fit.observe(seen, max(1, round(float(seen @ planted) * draw.uniform(1 - noise, 1 + noise))))
    return fit


def test_the_fit_finds_planted_coefficients_again():
    fit = learned(2_048, noise=0.0)

    assert fit.coefficients == pytest.approx(COEFFICIENTS, rel=1e-3)
    assert fit.error_ratio < 0.01
    assert fit.r_squared > 0.99


def test_the_fit_says_how_noisy_the_steps_were():
    fit = learned(2_048, noise=0.2)

    assert fit.error_ratio == pytest.approx(0.1, rel=0.1)  # the mean of a uniform ± 20 %
    assert fit.r_squared > 0.8


def test_no_coefficient_is_ever_negative_and_unseen_ones_are_zero():
    draw = np.random.default_rng(5)
    for _ in range(200):
        rows = draw.normal(size=(20, 6))
        rows[:, 4] = 0.0

        found = solve(rows.T @ rows, rows.T @ draw.normal(size=20))

        assert found.min() >= 0.0
        assert found[4] == 0.0


def test_the_constrained_fit_is_as_good_as_any_set_of_free_coefficients():
    draw = np.random.default_rng(6)
    for _ in range(50):
        rows, target = draw.normal(size=(30, 4)), draw.normal(size=30)
        found = solve(rows.T @ rows, rows.T @ target)
        best = math.inf
        for free in itertools.product([False, True], repeat=4):
            chosen = np.zeros(4)
            if any(free):
                chosen[list(free)] = np.linalg.lstsq(rows[:, list(free)], target, rcond=None)[0]
            if chosen.min() >= 0:
                best = min(best, float(np.sum((rows @ chosen - target) ** 2)))

        assert float(np.sum((rows @ found - target) ** 2)) == pytest.approx(best, rel=1e-6)


def test_the_same_steps_give_the_same_coefficients_and_few_steps_the_fixed_ones():
    assert learned(700, 0.3).coefficients.tolist() == learned(700, 0.3).coefficients.tolist()
    assert learned(31, 0.3).coefficients.tolist() == [PRIOR[name] for name in FEATURES]
