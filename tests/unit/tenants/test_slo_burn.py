"""Burn rates and incidents against sums that are written out."""

import random
from itertools import pairwise

import pytest

from tenants.slo.burn import ALERTS, CALM_MINUTES, WINDOWS_S, Counts, Series, Tally, firing, incidents, is_calm, rate

TARGET = 990_000  # 99 %
MINUTE = 60


def series(per_minute: dict[int, tuple[int, int]]) -> Series:
    tally = Tally()
    for minute, (valid, good) in per_minute.items():
        tally.add([minute * MINUTE], [valid], [good])
    return Series(tally)


def test_the_windows_are_those_of_the_handbook():
    assert [(each.factor_tenths, each.long_s, each.short_s) for each in ALERTS] == [
        (144, 3600, 300),
        (60, 21_600, 1800),
        (30, 86_400, 7200),
        (10, 259_200, 21_600),
    ]
    assert WINDOWS_S == (300, 1800, 3600, 7200, 21_600, 86_400, 259_200)


def test_an_alert_fires_only_above_its_factor():
    at_limit = series(dict.fromkeys(range(60), (1000, 1000 - 144)))  # 14.4 times 1 %
    above = series(dict.fromkeys(range(60), (1000, 1000 - 145)))

    assert not firing(at_limit, ALERTS[0], 3600, TARGET)
    assert firing(above, ALERTS[0], 3600, TARGET)


@pytest.mark.parametrize("bad_minutes", [range(0, 50), range(58, 60)])
def test_one_window_alone_does_not_fire(bad_minutes):
    """The first: it is over since ten minutes. The second: too short to matter over the hour."""
    one_sided = series({minute: (100, 80 if minute in bad_minutes else 100) for minute in range(60)})

    assert not firing(one_sided, ALERTS[0], 3600, TARGET)


def test_a_rate_is_relative_to_what_is_allowed():
    assert rate(Counts(1000, 980), TARGET) == 2.0
    assert rate(Counts(1000, 1000), TARGET) == 0.0
    assert rate(Counts(), TARGET) is None
    assert rate(Counts(10, 9), 1_000_000) is None


def test_an_outage_is_an_incident_from_its_alarm_until_the_short_window_was_calm_for_a_while():
    outage = range(120, 140)
    found = incidents(
        series({minute: (100, 0 if minute in outage else 100) for minute in range(600)}), TARGET, 0, 600 * MINUTE
    )

    # 14.4 % of the hour's 6,000 are more than 8 minutes of 100; the last bad minute leaves the 5 minutes at 145
    page = next(each for each in found if each.alert == "page_fast")
    assert (page.from_s // MINUTE, page.to_s // MINUTE, page.bad) == (129, 145 + CALM_MINUTES - 1, 2000)


@pytest.mark.parametrize(("pause", "num_incidents"), [(2, 1), (5 + CALM_MINUTES - 2, 1), (5 + CALM_MINUTES - 1, 2)])
def test_a_rate_that_wavers_is_one_incident_until_it_is_calm_for_long_enough(pause, num_incidents):
    """Twenty bad minutes, a pause, ten more: the short window is calm 5 minutes after it began."""
    bad = {*range(100, 120), *range(120 + pause, 130 + pause)}
    flapping = series({minute: (100, 0 if minute in bad else 100) for minute in range(400)})

    pages = [each for each in incidents(flapping, TARGET, 0, 400 * MINUTE) if each.alert == "page_fast"]

    assert len(pages) == num_incidents
    assert (pages[0].from_s, pages[-1].to_s) == (109 * MINUTE, (130 + pause + 5 + CALM_MINUTES - 1) * MINUTE)


def test_a_rate_about_its_limit_is_one_incident_where_the_alert_alone_would_be_many():
    flapping = series({minute: (1000, 1000 - (160 if minute % 4 < 2 else 130)) for minute in range(300)})
    looks = [firing(flapping, ALERTS[0], at * MINUTE, TARGET) for at in range(60, 300)]
    assert sum(before != after for before, after in pairwise(looks)) > 50

    pages = [each for each in incidents(flapping, TARGET, 0, 300 * MINUTE) if each.alert == "page_fast"]

    assert len(pages) == 1
    assert pages[0].to_s is None


def test_incidents_are_what_looking_each_minute_would_find():
    rng = random.Random(11)
    counts = {}
    for minute in range(2000):
        if rng.random() < 0.7:
            worst = 0.7 if minute % 300 < 90 else 0.02
            counts[minute] = (valid := rng.randrange(1, 30), valid - sum(rng.random() < worst for _ in range(valid)))
    subject, target_ppm = series(counts), 970_000

    expected = []
    for alert in ALERTS:
        begin = None
        for at_s in range(0, 2000 * MINUTE, MINUTE):
            if begin is None and firing(subject, alert, at_s, target_ppm):
                begin = at_s
            elif begin is not None and is_calm(subject, alert, at_s, target_ppm):
                expected.append((alert.name, begin, at_s))
                begin = None
        if begin is not None:
            expected.append((alert.name, begin, None))

    found = [(each.alert, each.from_s, each.to_s) for each in incidents(subject, target_ppm, 0, 2000 * MINUTE)]
    assert len(found) > 8
    assert sorted(found, key=str) == sorted(expected, key=str)


def test_an_incident_that_goes_on_has_no_end():
    found = incidents(series(dict.fromkeys(range(60), (100, 0))), TARGET, 0, 60 * MINUTE)

    assert {each.to_s for each in found} == {None}


def test_a_quiet_time_has_no_incidents():
    assert incidents(series({}), TARGET, 0, 10_000 * MINUTE) == []
    assert incidents(series(dict.fromkeys(range(100), (5, 5))), TARGET, 0, 100 * MINUTE) == []


def test_alerts_are_what_plain_sums_over_the_minutes_say():
    rng = random.Random(3)
    minutes = {minute: (valid := rng.randrange(0, 20), rng.randrange(valid // 2, valid + 1)) for minute in range(900)}
    subject = series(minutes)

    def burns(at: int, window_s: int, factor: float) -> bool:
        inside = [counts for minute, counts in minutes.items() if at - window_s // 60 <= minute < at]
        valid, good = sum(v for v, _ in inside), sum(g for _, g in inside)
        return valid > 0 and (valid - good) / valid > factor * 0.3

    for at in rng.sample(range(900), 80):
        for alert in ALERTS:
            factor = alert.factor_tenths / 10
            expected = burns(at, alert.short_s, factor) and burns(at, alert.long_s, factor)
            assert firing(subject, alert, at * MINUTE, 700_000) == expected
