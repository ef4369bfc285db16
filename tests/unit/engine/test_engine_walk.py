"""Random walks through the whole engine (tests/walk.py); ``./run prove walk`` makes hundreds of them."""

from collections import Counter

import pytest

from tests.walk import SIZES, check_accounts, check_end, met, walked

SEEDS = range(len(SIZES))
every_walk = pytest.mark.parametrize("seed", SEEDS)
both_ways = pytest.mark.parametrize("overlaps", [False, True], ids=["at once", "overlapping"])


@both_ways
@every_walk
def test_every_request_ends_once_as_its_solo_run_and_nothing_leaks(seed: int, overlaps: bool):
    check_end(walked(seed, overlaps))


@both_ways
@every_walk
def test_every_nanosecond_of_every_step_is_paid_by_a_request_or_by_a_named_account(seed: int, overlaps: bool):
    check_accounts(walked(seed, overlaps))


@both_ways
def test_the_walk_meets_what_it_is_there_for(overlaps: bool):
    """A walk without preemptions, prefix hits or replaced slots would prove nothing about them."""
    found = sum((met(walked(seed, overlaps)) for seed in SEEDS), Counter())

    assert len(found) == 6
    assert all(count > 2 for count in found.values()), found
