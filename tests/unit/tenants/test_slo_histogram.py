"""Histograms against exact quantiles and exact bounds, in any order."""

import random
from decimal import Decimal, getcontext
from itertools import pairwise

import pytest

from tenants.slo.histogram import Histogram, bucket_of, histogram_of, merged


def test_a_bucket_ends_with_its_upper_bound():
    getcontext().prec = 60
    rng = random.Random(5)
    for _ in range(500):
        value = rng.randrange(1, 1 << rng.randrange(1, 63))
        bucket = bucket_of(value)
        # (2^(i/32), 2^((i+1)/32)] without a logarithm: both sides to the 32nd power
        assert Decimal(2) ** bucket < Decimal(value) ** 32 <= Decimal(2) ** (bucket + 1)


def test_powers_of_two_are_the_last_of_their_bucket():
    assert [bucket_of(1 << octave) for octave in (0, 1, 10, 62)] == [-1, 31, 319, 1983]
    assert bucket_of((1 << 10) + 1) == 320
    assert bucket_of(0) == -2


@pytest.mark.parametrize("percent", [50, 95, 99])
def test_a_quantile_is_within_the_promised_error(percent):
    rng = random.Random(percent)
    values = sorted(int(rng.lognormvariate(18, 1.5)) for _ in range(5000))
    exact = values[max(1, -(-len(values) * percent // 100)) - 1]

    found = histogram_of(values).quantile(percent)

    assert abs(found - exact) <= 0.0109 * exact


def test_one_sample_is_its_own_median():
    assert histogram_of([123_456_789]).quantile(50) == 123_456_789
    assert histogram_of([123_456_789]).quantile(95) == 123_456_789


def test_the_99th_percentile_needs_a_hundred_samples():
    assert histogram_of(range(1, 100)).quantile(99) is None
    assert histogram_of(range(1, 101)).quantile(99) is not None


def test_without_samples_nothing_is_known():
    nothing = Histogram()
    assert (nothing.count, nothing.mean, nothing.quantile(50), nothing.quantile(99)) == (0, None, None, None)


def test_zero_is_a_value_of_its_own():
    zeros = histogram_of([0, 0, 5])
    assert zeros.quantile(50) == 0
    assert (zeros.least, zeros.most, zeros.mean) == (0, 5, 1)


def test_neither_shards_nor_their_order_change_a_merge():
    rng = random.Random(9)
    values = [rng.randrange(0, 1 << 40) for _ in range(600)]
    whole = histogram_of(values)

    for _ in range(20):
        rng.shuffle(values)
        cuts = [0, *sorted(rng.sample(range(600), 7)), 600]
        shards = [histogram_of(values[a:b]) for a, b in pairwise(cuts)]
        rng.shuffle(shards)
        assert merged(shards) == whole
