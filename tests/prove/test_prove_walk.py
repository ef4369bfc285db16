"""``./run prove walk [--seed N --rounds N]``: random walks of 2,000 operations through the whole engine."""

import pytest

from tests.walk import check_accounts, check_end, walked

pytestmark = pytest.mark.long
ROUNDS = 100


@pytest.mark.parametrize("overlaps", [False, True], ids=["at once", "overlapping"])
def test_no_walk_loses_a_request_a_block_or_a_nanosecond(seed: int, rounds: int | None, overlaps: bool):
    for number in range(seed, seed + (rounds or ROUNDS)):
        walk = walked.__wrapped__(number, overlaps)
        check_end(walk)
        check_accounts(walk)
