"""A million random steps: every share is a whole number of nanoseconds and none is lost."""

import random

import numpy as np
import pytest

from engine.cost import StepShape, split, weights

NUM_STEPS = 1_000_000
COEFFICIENTS = np.array([5e6, 2e3, 2.2e4, 31.0, 1.7, 40.0, 6e4, 900.0])
MIB = np.array([1.5, 24.0, 7.25, 0.0])


@pytest.mark.long
def test_the_shares_of_a_million_random_steps_sum_to_them_to_the_nanosecond():
    draw, numbers = random.Random(11), np.random.default_rng(11)
    for _ in range(NUM_STEPS):
        count, step_ns = draw.randint(1, 64), draw.randrange(1, 10 ** draw.randint(1, 13))
        slots = numbers.integers(-1, 3, count)
        shape = StepShape(numbers.integers(0, 8_000, count), numbers.integers(1, 300, count), slots, MIB[slots])
        shares = split(step_ns, weights(shape, COEFFICIENTS))

        assert sum(shares) == step_ns
        assert min(shares) >= 0
