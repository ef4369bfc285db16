import random

import pytest

from tenants.errors import InvalidValue
from tenants.pricing import (
    ADAPTER_METERS,
    ANY,
    DEFAULT_PRICES,
    MAX_PRICE_PICOUSD,
    MAX_QUANTITY,
    METERS,
    Quantities,
    RateCard,
    charges,
    default_prices,
    is_billed,
)


def card(**prices) -> RateCard:
    return RateCard("rc_1", 1, 0, {(meter, ANY, ANY): prices.get(meter, 0) for meter in METERS})


def test_the_default_card_has_a_price_for_each_meter():
    assert set(DEFAULT_PRICES) == {*METERS, *ADAPTER_METERS}
    assert all(type(price) is int and price > 0 for price in DEFAULT_PRICES.values())


def test_cached_tokens_are_charged_apart_from_the_other_input():
    lines = charges(Quantities(prompt_tokens=20, cached_tokens=16, output_tokens=5), _default(), "m", "standard")
    assert [(line.meter, line.quantity, line.amount_picousd) for line in lines] == [
        ("input_uncached_tokens", 4, 200_000),
        ("input_cached_tokens", 16, 400_000),
        ("output_tokens", 5, 500_000),
        ("requests", 1, 1_000_000),
    ]


def test_a_meter_with_nothing_in_it_makes_no_line():
    lines = charges(Quantities(3, 0, 0), _default(), "m", "standard")
    assert [line.meter for line in lines] == ["input_uncached_tokens", "requests"]


def test_amounts_are_exact_far_beyond_what_a_float_holds():
    rng = random.Random(7)
    for _ in range(2_000):
        cached = rng.randint(0, MAX_QUANTITY)
        quantities = Quantities(rng.randint(cached, MAX_QUANTITY), cached, rng.randint(0, MAX_QUANTITY))
        prices = {meter: rng.randint(MAX_PRICE_PICOUSD // 2, MAX_PRICE_PICOUSD) | 1 for meter in METERS}
        lines = charges(quantities, card(**prices), "m", "batch")
        for line in lines:
            assert type(line.amount_picousd) is int
            assert line.amount_picousd // line.quantity == line.unit_price_picousd == prices[line.meter]
            assert line.amount_picousd % line.quantity == 0
        assert sum(line.amount_picousd for line in lines) < 1 << 63


def test_the_most_exact_price_wins_and_the_model_goes_before_the_class():
    prices = default_prices()
    prices |= {("requests", "m", "batch"): 1, ("requests", "m", ANY): 2, ("requests", ANY, "batch"): 3}
    found = RateCard("rc_1", 1, 0, prices)
    assert found.price("requests", "m", "batch") == 1
    assert found.price("requests", "m", "standard") == 2
    assert found.price("requests", "other", "batch") == 3
    assert found.price("requests", "other", "standard") == DEFAULT_PRICES["requests"]


@pytest.mark.parametrize(
    "change",
    [
        {("requests", ANY, ANY): -1},
        {("requests", "m", ANY): MAX_PRICE_PICOUSD + 1},
        {("smiles", ANY, ANY): 1},
    ],
)
def test_a_card_with_an_impossible_price_is_refused(change):
    with pytest.raises(InvalidValue):
        RateCard("rc_1", 1, 0, default_prices() | change)


def test_a_card_that_leaves_a_meter_without_a_price_is_refused():
    prices = default_prices()
    del prices["output_tokens", ANY, ANY]
    with pytest.raises(InvalidValue, match="output_tokens"):
        RateCard("rc_1", 1, 0, prices)


@pytest.mark.parametrize(
    ("outcome", "output_tokens", "billed"),
    [(200, 0, True), (200, 5, True), (499, 5, True), (499, 0, False), (0, 5, False), (503, 5, False), (429, 0, False)],
)
def test_only_served_requests_and_abandoned_ones_with_tokens_are_billed(outcome, output_tokens, billed):
    assert is_billed(outcome, output_tokens) is billed


def _default() -> RateCard:
    return RateCard("rc_1", 1, 0, default_prices())
