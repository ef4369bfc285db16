"""A million random steps with adapters and experts: every share is a whole number of nanoseconds and none is lost."""

import random

import numpy as np
import pytest
import torch

from engine.metering import cost
from engine.metering.cost import StepShape, split, weights
from engine.models.moe import expert_uses, shared_evenly

NUM_STEPS = 1_000_000
COEFFICIENTS = np.array([5e6, 2e3, 2.2e4, 31.0, 1.7, 40.0, 6e4, 900.0, 7e4])
SLOT_MIB = np.array([1.5, 24.0, 7.25, 0.0])
NUM_EXPERTS = 8


def random_parts(draw: random.Random, numbers: np.random.Generator) -> cost.Floats:
    """Every fourth step has experts: two of a layer for each token, of as many as its router likes."""
    count = draw.randint(1, 64)
    tokens = numbers.integers(1, 1 << draw.randint(1, 8), count)
    parts = cost.parts(StepShape(numbers.integers(0, 8_000, count), tokens, numbers.integers(-1, 3, count)), SLOT_MIB)
    if draw.random() < 0.25:
        seen = np.minimum(tokens, 8)  # the first tokens of each chunk: enough for all kinds of sets
        owners = torch.from_numpy(np.repeat(np.arange(count), seen))
        first = numbers.integers(0, draw.randint(1, NUM_EXPERTS), len(owners))
        chosen = torch.from_numpy(np.stack([first, (first + numbers.integers(1, 3)) % NUM_EXPERTS], axis=1))
        parts[cost.EXPERT] = shared_evenly(expert_uses(chosen[None], owners, count, NUM_EXPERTS)).numpy()
    return parts


@pytest.mark.long
def test_the_shares_of_a_million_random_steps_sum_to_them_to_the_nanosecond():
    draw, numbers = random.Random(11), np.random.default_rng(11)
    for _ in range(NUM_STEPS):
        step_ns = draw.randrange(1, 10 ** draw.randint(1, 18))
        shares = split(step_ns, weights(COEFFICIENTS @ random_parts(draw, numbers)))

        assert sum(shares) == step_ns
        assert min(shares) >= 0
