"""Buckets of usage: local days and hours of any zone, each instant in one."""

import random
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from zoneinfo import ZoneInfo, available_timezones

from tenants.usage.cover import RAW, cover
from tenants.usage.query import UsageQuery, page_end

DAY_S = 86_400
ZONES = sorted(available_timezones() - {"localtime", "Factory"})
FIRST_S, LAST_S = (int(datetime(year, 1, 1, tzinfo=UTC).timestamp()) for year in (2018, 2037))


def test_every_instant_of_every_zone_is_in_the_bucket_of_its_local_day_and_no_other():
    rng = random.Random(25)
    for zone in map(ZoneInfo, ZONES * 3):
        start_s = rng.randrange(FIRST_S, LAST_S)
        end_s = start_s + rng.randrange(1, 9 * DAY_S)
        intervals = UsageQuery(start_s, end_s, "1d", zone=zone).intervals()

        assert [start_s, *(end for _, end in intervals)] == [*(start for start, _ in intervals), end_s]
        days = [datetime.fromtimestamp(start, zone).date() for start, _ in intervals]
        assert days == sorted(set(days))
        for start, end in intervals:
            edges = start, end - 1, rng.randrange(start, end)
            assert len({datetime.fromtimestamp(each, zone).date() for each in edges}) == 1
            assert end - start <= 26 * 3600  # Troll's clocks change by two hours


def test_local_days_are_made_of_whole_minutes():
    rng = random.Random(26)
    for zone in map(ZoneInfo, ZONES):
        start_s = rng.randrange(FIRST_S, LAST_S)
        for day in UsageQuery(start_s, start_s + 4 * DAY_S, "1d", zone=zone).intervals()[1:-1]:
            assert all(piece.width_s != RAW for piece in cover(*day))


def test_hours_of_a_zone_never_span_two_and_the_one_that_comes_twice_is_two():
    rng = random.Random(27)
    for name in [*ZONES, *["Australia/Lord_Howe", "Europe/Berlin"] * 20]:
        zone = ZoneInfo(name)
        start_s = rng.randrange(FIRST_S, LAST_S)
        intervals = UsageQuery(start_s, start_s + 5 * DAY_S, "1h", zone=zone).intervals()
        assert [start_s, *(end for _, end in intervals)] == [*(start for start, _ in intervals), start_s + 5 * DAY_S]
        for start, end in intervals:
            first, last = (datetime.fromtimestamp(each, zone) for each in (start, end - 1))
            assert first.replace(minute=0, second=0) == last.replace(minute=0, second=0)
            assert first.utcoffset() == last.utcoffset()


def test_pages_of_any_length_cut_an_interval_where_its_buckets_are_cut():
    rng = random.Random(28)
    for zone in (ZoneInfo(rng.choice(ZONES)) for _ in range(200)):
        width = rng.choice(["1m", "1h", "1d"])
        start_s = rng.randrange(FIRST_S, LAST_S)
        end_s = start_s + rng.randrange(1, 40 * {"1m": 60, "1h": 3600, "1d": DAY_S}[width])
        number, found = rng.randint(1, 9), []
        at_s = start_s
        while at_s < end_s:
            until_s = page_end(at_s, end_s, width, zone, number)
            page = UsageQuery(at_s, until_s, width, zone=zone).intervals()
            assert len(page) == number or until_s == end_s
            found, at_s = found + page, until_s

        assert found == UsageQuery(start_s, end_s, width, zone=zone).intervals()


def test_days_of_23_24_and_25_hours_are_told_apart():
    for month, day, hours in ((3, 29, 23), (10, 25, 25), (7, 1, 24)):
        zone = ZoneInfo("Europe/Berlin")
        noon = datetime(2026, month, day, 12, tzinfo=zone)
        span = [int((noon + timedelta(days=offset)).timestamp()) for offset in (-1, 1)]
        lengths = [end - start for start, end in UsageQuery(*span, "1d", zone=zone).intervals()]
        assert lengths == [12 * 3600, hours * 3600, 12 * 3600]


def test_intervals_of_utc_are_pairs_of_whole_units():
    for width, width_s in (("1m", 60), ("1h", 3600), ("1d", DAY_S)):
        begin = FIRST_S // DAY_S * DAY_S
        found = UsageQuery(begin, begin + 5 * width_s, width).intervals()
        assert found == list(pairwise(range(begin, begin + 6 * width_s, width_s)))
