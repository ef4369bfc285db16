"""Billing months: anchors, leap years, days on which clocks change."""

import random
from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest

from tenants.periods import month_of

SECOND = 10**9


def instant(text: str, zone="UTC") -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).timestamp()) * SECOND


@pytest.mark.parametrize(
    ("moment", "anchor_day", "begin", "end"),
    [
        ("2026-11-30T12:00", 1, "2026-11-01", "2026-12-01"),
        ("2026-12-31T23:59:59", 1, "2026-12-01", "2027-01-01"),
        ("2026-02-28T00:00", 31, "2026-02-28", "2026-03-31"),
        ("2026-02-27T23:59:59", 31, "2026-01-31", "2026-02-28"),
        ("2028-02-29T00:00", 31, "2028-02-29", "2028-03-31"),
        ("2028-02-28T12:00", 30, "2028-01-30", "2028-02-29"),
        ("2026-04-30T00:00", 31, "2026-04-30", "2026-05-31"),
        ("2026-01-01T00:00", 15, "2025-12-15", "2026-01-15"),
    ],
)
def test_a_month_begins_at_its_anchor_or_on_its_last_day(moment, anchor_day, begin, end):
    period = month_of(instant(moment), UTC, anchor_day)

    assert (period.label, period.start_unix_ns, period.end_unix_ns) == (begin, instant(begin), instant(end))


def test_a_month_with_a_change_of_clocks_is_an_hour_shorter_or_longer():
    zone = ZoneInfo("Europe/Berlin")

    hours = [
        (period.end_unix_ns - period.start_unix_ns) // (3600 * SECOND)
        for period in (month_of(instant(day, "Europe/Berlin"), zone) for day in ("2026-03-15", "2026-10-15"))
    ]

    assert hours == [31 * 24 - 1, 31 * 24 + 1]


def test_every_instant_of_every_zone_is_in_exactly_one_month():
    """Cairo's clocks go forward at midnight, Havana's midnight hour comes twice, Apia left out a whole day."""
    rng = random.Random(6)
    names = ("Asia/Kolkata", "America/Los_Angeles", "Europe/Berlin", "Africa/Cairo", "America/Havana", "Pacific/Apia")
    for _ in range(2_000):
        zone, anchor_day = ZoneInfo(rng.choice(names)), rng.randint(1, 31)
        moment = rng.randrange(instant("2009-01-01"), instant("2030-01-01"))

        period = month_of(moment, zone, anchor_day)

        assert period.start_unix_ns <= moment < period.end_unix_ns
        assert month_of(period.start_unix_ns, zone, anchor_day) == period
        assert month_of(period.end_unix_ns - 1, zone, anchor_day) == period
        assert month_of(period.end_unix_ns, zone, anchor_day).start_unix_ns == period.end_unix_ns
