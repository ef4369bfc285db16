"""Who pays what of a step: exact sums, the model's Shapley value, and coefficients found again."""

import itertools
import math
import random

import numpy as np
import pytest

from engine.cost import FEATURES, StepShape, features, split, weights
from engine.cost_fit import PRIOR, CostFit, solve

COEFFICIENTS = np.array([5e6, 2e3, 2.2e4, 31.0, 1.7, 40.0, 6e4, 900.0])


def random_shape(draw: random.Random, count: int) -> StepShape:
    """Decodes and prefills, some with one of three adapters."""
    mib = [1.5, 24.0, 7.25, 0.0]
    slots = np.array([draw.randrange(-1, 3) for _ in range(count)])
    tokens = np.array([draw.choice([1, 1, 1, draw.randint(2, 300)]) for _ in range(count)])
    return StepShape(np.array([draw.randrange(4_000) for _ in range(count)]), tokens, slots, np.array(mib)[slots])


def part(shape: StepShape, members: tuple[int, ...]) -> StepShape:
    chosen = list(members)
    return StepShape(shape.starts[chosen], shape.tokens[chosen], shape.slots[chosen], shape.mib[chosen])


def by_all_coalitions(shape: StepShape, coefficients: np.ndarray) -> list[float]:
    """The Shapley value from its definition: the mean of what each adds, over all orders of arrival."""
    count = len(shape.tokens)
    time = {
        members: float(features(part(shape, members)) @ coefficients) if members else 0.0
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


def test_the_closed_form_is_the_shapley_value_of_the_modelled_time():
    draw = random.Random(3)
    for _ in range(40):
        shape = random_shape(draw, draw.randint(1, 7))

        found = weights(shape, COEFFICIENTS) / 1024

        assert found == pytest.approx(by_all_coalitions(shape, COEFFICIENTS), abs=0.01)
        assert found.sum() == pytest.approx(features(shape) @ COEFFICIENTS, abs=0.02)


def test_shares_sum_to_the_step_and_are_within_a_nanosecond_of_their_proportion():
    draw = random.Random(1)
    for _ in range(500):
        chosen = [draw.randrange(0, 600) for _ in range(draw.randint(1, 64))]
        chosen[draw.randrange(len(chosen))] += 1
        step_ns = draw.randrange(0, 10**10)

        shares = split(step_ns, np.array(chosen))

        assert sum(shares) == step_ns
        for share, weight in zip(shares, chosen, strict=True):
            assert abs(share * sum(chosen) - step_ns * weight) < sum(chosen) * (1 + 1e-6)


def test_the_shares_of_every_random_step_sum_to_it_to_the_nanosecond():
    draw = random.Random(2)
    for _ in range(20_000):
        step_ns = draw.randrange(1, 10 ** draw.randint(1, 12))
        shares = split(step_ns, weights(random_shape(draw, draw.randint(1, 12)), COEFFICIENTS))

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


def test_eight_choices_of_one_request_pay_what_eight_requests_would():
    alike = StepShape(np.full(8, 100), np.ones(8, np.int64), np.full(8, -1), np.zeros(8))

    assert len(set(weights(alike, COEFFICIENTS).tolist())) == 1


# ── the fit ──────────────────────────────────────────────────────────────────────────────────────


def learned(num_steps: int, noise: float, planted: np.ndarray = COEFFICIENTS) -> CostFit:
    draw, fit = random.Random(7), CostFit()
    for _ in range(num_steps):
        shape = features(random_shape(draw, draw.randint(1, 32)))
        fit.observe(shape, max(1, round(float(shape @ planted) * draw.uniform(1 - noise, 1 + noise))))
    return fit


def test_the_fit_finds_planted_coefficients_again():
    fit = learned(2_048, noise=0.0)

    assert fit.coefficients == pytest.approx(COEFFICIENTS, rel=1e-3)
    assert fit.error_ratio < 0.01
    assert fit.r_squared > 0.99


def test_the_fit_says_how_noisy_the_steps_were():
    fit = learned(4_096, noise=0.2)

    assert fit.error_ratio == pytest.approx(0.1, rel=0.1)  # the mean of a uniform ± 20 %
    assert fit.r_squared > 0.9


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
