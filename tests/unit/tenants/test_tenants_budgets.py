"""Which windows a request counts in, and the most that it can cost."""

from datetime import datetime
from zoneinfo import ZoneInfo

import pytest

from tenants.pricing import RateCard, default_prices
from tenants.quota.budgets import Budget, bound_picousd


def at(text: str, zone: str) -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).timestamp()) * 10**9


def label(budget: Budget, unix_ns: int) -> str:
    (name,) = {window.name.rpartition("@")[2] for window in budget.windows("k1", "tiny", "", unix_ns)}
    return name


@pytest.mark.parametrize(
    ("zone", "anchor", "last", "first", "labels"),
    [
        ("UTC", 1, "2027-01-31T23:59:59", "2027-02-01T00:00:00", ("2027-01-01", "2027-02-01")),
        ("Asia/Tokyo", 1, "2027-01-31T23:59:59", "2027-02-01T00:00:00", ("2027-01-01", "2027-02-01")),
        ("UTC", 31, "2027-02-27T23:59:59", "2027-02-28T00:00:00", ("2027-01-31", "2027-02-28")),
        ("UTC", 31, "2028-02-28T23:59:59", "2028-02-29T00:00:00", ("2028-01-31", "2028-02-29")),
        ("UTC", 31, "2027-04-29T23:59:59", "2027-04-30T00:00:00", ("2027-03-31", "2027-04-30")),
        # clocks are put on and back on the very day on which the month begins
        ("Europe/Berlin", 28, "2027-03-27T23:59:59", "2027-03-28T00:00:00", ("2027-02-28", "2027-03-28")),
        ("Europe/Berlin", 31, "2027-10-30T23:59:59", "2027-10-31T00:00:00", ("2027-09-30", "2027-10-31")),
        ("Africa/Cairo", 30, "2027-04-29T23:59:59", "2027-04-30T01:00:00", ("2027-03-30", "2027-04-30")),
    ],
)
def test_a_window_ends_with_the_month_of_the_tenants_own_calendar(zone, anchor, last, first, labels):
    budget = Budget(tenant_limit=1, time_zone=zone, anchor_day=anchor)
    assert (label(budget, at(last, zone)), label(budget, at(first, zone))) == labels
    (before,) = {window.end_unix_ms for window in budget.windows("k1", "tiny", "", at(last, zone))}
    assert before == at(first, zone) // 10**6


def test_a_request_counts_in_every_scope_that_it_is_in_as_soon_as_one_has_a_limit():
    budget = Budget(scoped=(("adapter", "pirate", 5),), tenant_stamp=1, key_stamp=2)
    assert budget.windows("k1", "tiny", "", 0) == ()
    assert budget.windows("k1", "tiny", "support", 0) == ()
    windows = budget.windows("k1", "tiny", "pirate", 0)
    assert [(window.name, window.limit_picousd, window.stamp) for window in windows] == [
        ("tenant@1970-01-01", None, 1),
        ("key:k1@1970-01-01", None, 2),
        ("key:k1:model:tiny@1970-01-01", None, 2),
        ("key:k1:adapter:pirate@1970-01-01", 5, 2),
    ]


@pytest.mark.parametrize(("cached", "dearest"), [(25_000, 50_000), (70_000, 70_000)])
def test_the_bound_is_the_price_of_the_dearest_way_a_request_can_go(cached, dearest):
    card = RateCard("rc", 1, 1, default_prices() | {("input_cached_tokens", "*", "*"): cached})
    assert bound_picousd(card, "tiny", "standard", 10, 7) == 10 * dearest + 7 * 100_000 + 1_000_000
