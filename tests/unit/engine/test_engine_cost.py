"""Shares of time: exact sums, near proportion."""

import random

import pytest

from engine.cost import split


def test_shares_sum_to_the_step_and_are_within_a_nanosecond_of_their_proportion():
    pick = random.Random(1)
    for _ in range(500):
        weights = [pick.randrange(0, 600) for _ in range(pick.randint(1, 64))]
        weights[pick.randrange(len(weights))] += 1
        step_ns = pick.randrange(0, 10**10)

        shares = split(step_ns, weights)

        assert sum(shares) == step_ns
        for share, weight in zip(shares, weights, strict=True):
            assert abs(share * sum(weights) - step_ns * weight) < sum(weights)


def test_who_did_nothing_pays_nothing():
    assert split(1_000, [0, 3, 0, 1]) == [0, 750, 0, 250]


def test_nothing_is_split_among_nobody_and_time_without_users_is_a_bug():
    assert split(0, []) == []
    with pytest.raises(AssertionError):
        split(5, [0, 0])
    with pytest.raises(AssertionError):
        split(5, [2, -1])
