"""Shares of a step's measured time. Integers in, integers out: nothing is lost or counted twice."""

from collections.abc import Sequence
from itertools import accumulate, pairwise


def split(step_ns: int, weights: Sequence[int]) -> list[int]:
    """``step_ns`` in proportion to ``weights`` (each ≥ 0, their sum > 0, unless there is nothing to split).

    Each share is the difference of two floors of the cumulative share, so that the shares sum to ``step_ns``
    exactly and each is within 1 ns of its exact value.
    """
    assert step_ns >= 0, f"a step of {step_ns} ns"
    assert all(weight >= 0 for weight in weights), "a negative weight"
    total = sum(weights)
    if total == 0:
        assert step_ns == 0, "time without anybody who used it"
        return [0] * len(weights)
    bounds = [0, *(step_ns * part // total for part in accumulate(weights))]
    return [upper - lower for lower, upper in pairwise(bounds)]
