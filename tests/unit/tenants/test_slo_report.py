"""The report of a tenant: from sums, against the raw requests; whatever the order, and whoever else is served."""

import random
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import msgspec
import pytest

from tenants import replica_times
from tenants.errors import InvalidValue
from tenants.replica_times import ReplicaSpan
from tenants.slo.budgets import wilson
from tenants.slo.burn import CALM_MINUTES
from tenants.slo.calendar import MAX_DAYS, SloQuery
from tenants.slo.refusals import Refusal, write_refusals
from tenants.slo.reporting import document_hash, slo_report
from tenants.tables import Tenant
from tests.slo_requests import MS, NOON_S, booked, objective, post, post_in_batches, promise

HOUR_S, DAY_S = 3600, 86_400
START_S = 1_899_244_800  # 2030-03-09 UTC
QUERY = SloQuery(NOON_S, NOON_S + HOUR_S)


def tenant(tenant_id: str = "ten_a", zone: str = "UTC") -> Tenant:
    return Tenant(tenant_id=tenant_id, name="Acme", time_zone=zone, created_unix_ns=0, changed_unix_ns=0)


async def read(database, query: SloQuery = QUERY, whose: Tenant | None = None):
    async with database.session() as session:
        return await slo_report(session, whose or tenant(), query, lambda: NOON_S + 2 * HOUR_S)


async def refuse(database, *counts: tuple[Refusal, int]) -> None:
    async with database.transaction() as session:
        await write_refusals(session, "p1", dict(counts))


def requests(seed: int, tenant_id: str = "ten_a", count: int = 150):
    rng = random.Random(seed)
    return [
        booked(
            number + seed * 1000,
            rng.choice([200] * 9 + [499, 500, 0]),
            at_s=NOON_S + rng.randrange(HOUR_S),
            tenant_id=tenant_id,
            model=rng.choice(["smollm2", "support@3"]),
            flow_class=rng.choice(["standard", "batch"]),
            first_token_ns=rng.randrange(20, 400) * MS,
            queue_ns=rng.randrange(1, 50) * MS + rng.randrange(1000),
            decode_ns=rng.randrange(50, 300) * MS,
            gpu_ns=rng.randrange(10**9),
        )
        for number in range(count)
    ]


def test_a_report_is_what_the_raw_requests_say(with_database):
    raw = requests(1)

    async def body(database):
        await promise(database, objective("ttft", 200), objective("availability", target=0.9))
        await post_in_batches(database, raw, [40, 40, 40])
        return await read(database)

    report = with_database(body)

    valid = [each for each in raw if each.outcome]  # of those that were lost none has a first token
    good = sum(each.first_token_ns <= 200 * MS for each in valid)
    row = next(each for each in report.objectives if each.sli == "ttft")
    assert (row.attainment.valid, row.attainment.good) == (len(valid), good)
    assert row.attainment.ratio == pytest.approx(good / len(valid))
    assert row.attainment.low < row.attainment.ratio < row.attainment.high
    assert row.is_met == (good / len(valid) >= 0.95)
    assert row.budget.allowed == pytest.approx(len(valid) * 0.05)
    assert row.budget.bad == len(valid) - good
    up = next(each for each in report.objectives if each.sli == "availability")
    assert (up.attainment.valid, up.attainment.good) == (150, sum(each.outcome in (200, 499) for each in raw))
    answered = [each for each in raw if each.outcome == 200]
    assert report.total.latency["e2e"].count == len(answered)
    assert report.total.phases["queue"].mean_ns == sum(each.queue_ns for each in answered) // len(answered)
    assert sum(each.mean_ns for each in report.total.phases.values()) == pytest.approx(
        report.total.latency["e2e"].mean_ns, abs=5
    )
    assert report.total.gpu_ns == sum(each.gpu_ns for each in raw)
    billed = [each for each in raw if each.outcome in (200, 499)]
    assert (report.total.tokens.input, report.total.tokens.cached) == (20 * len(billed), 16 * len(billed))
    assert report.total.tokens.cache_hit_ratio == 0.8
    assert report.total.price_picousd > 0


@pytest.mark.parametrize("zone", ["UTC", "Asia/Kolkata", "Asia/Kathmandu", "America/New_York"])
def test_days_hours_and_totals_of_any_minutes_are_what_the_raw_requests_say(with_database, zone):
    """From 03:17 of a day to 21:41 of the third after it, over a change of clocks in New York, among requests before
    and after."""
    start_s, end_s = START_S + 3 * HOUR_S + 17 * 60, START_S + 3 * DAY_S + 21 * HOUR_S + 41 * 60
    rng = random.Random(zone)
    raw = [
        replace(each, finished_unix_ns=rng.randrange(START_S * 10**9, (START_S + 5 * DAY_S) * 10**9))
        for each in requests(6, count=600)
    ]

    async def body(database):
        await post_in_batches(database, raw, [150, 150, 150])
        return await read(database, SloQuery(start_s, end_s), tenant(zone=zone))

    report = with_database(body)

    inside = [each for each in raw if start_s <= each.finished_unix_ns // 10**9 < end_s]
    local = [datetime.fromtimestamp(each.finished_unix_ns / 1e9, ZoneInfo(zone)) for each in inside]
    up = {day.date: day.attainment["availability"] for day in report.days}
    assert {date: each.valid for date, each in up.items()} == Counter(at.date().isoformat() for at in local)
    good = [at.date().isoformat() for at, each in zip(local, inside, strict=True) if each.outcome in (200, 499)]
    assert {date: each.good for date, each in up.items()} == Counter(good)
    ends = [*(hour.start for hour in report.hours[1:]), end_s]
    for hour, end in zip(report.hours, ends, strict=True):
        of_hour = [
            each.first_token_ns
            for each in inside
            if each.outcome and hour.start <= each.finished_unix_ns // 10**9 < end
        ]
        assert hour.ttft.count == len(of_hour)
        assert hour.ttft.mean_ns == (sum(of_hour) // len(of_hour) if of_hour else None)
    assert report.total.valid == len(inside)
    answered = [each for each in inside if each.outcome == 200]
    assert report.total.latency["e2e"].count == len(answered)
    assert report.total.phases["queue"].mean_ns == sum(each.queue_ns for each in answered) // len(answered)


def test_the_rows_of_a_report_sum_to_its_total(with_database):
    async def body(database):
        await post(database, *requests(2))
        return [
            await read(database, SloQuery(NOON_S, NOON_S + HOUR_S, group))
            for group in ((), ("class",), ("model", "class"))
        ]

    whole, by_class, by_both = with_database(body)

    assert whole.rows == []
    assert [(row.model, row.flow_class) for row in by_class.rows] == [(None, "batch"), (None, "standard")]
    assert {row.model for row in by_both.rows} == {"smollm2", "support"}
    for report in (by_class, by_both):
        for name in ("valid", "good", "gpu_ns", "price_picousd"):
            assert sum(getattr(row, name) for row in report.rows) == getattr(whole.total, name)
        assert sum(row.latency["ttft"].count for row in report.rows) == whole.total.latency["ttft"].count


@pytest.mark.parametrize("seed", range(3))
def test_a_report_is_the_same_bytes_whatever_order_and_batches_the_records_came_in(with_database, seed):
    async def body(database):
        raw = requests(3, count=40)
        for tenant_id, order in (("ten_a", raw), ("ten_b", [*raw])):
            renamed = [
                msgspec.structs.replace(each.context, tenant_id=tenant_id, request_id=f"{tenant_id} {number}")
                for number, each in enumerate(order)
            ]
            batch = [booked_as(each, context) for each, context in zip(order, renamed, strict=True)]
            if tenant_id == "ten_b":
                random.Random(seed).shuffle(batch)
                batch += batch[:7]
            await promise(database, objective("ttft", 200, tenant_id=tenant_id, version_id=f"slo_{tenant_id}"))
            await post_in_batches(database, batch, [1 + seed * 5] * 20)
        return [await read(database, whose=tenant(name)) for name in ("ten_a", "ten_b")]

    first, second = with_database(body)

    blank = {"tenant_id": "", "document_hash": "", "objectives_hash": ""}
    assert encoded(first, **blank) == encoded(second, **blank)
    assert first.total.valid == 40 - sum(first.total.excluded.values())


def test_a_report_does_not_change_when_others_are_served(with_database):
    async def body(database):
        await promise(database, objective("ttft", 100), objective("ttft", 1, tenant_id="ten_b", version_id="slo_b"))
        await post(database, *requests(4, count=50))
        await refuse(database, (refusal(503, "overloaded"), 2))
        alone = encoded(await read(database))
        await post(database, *requests(5, "ten_b", count=80))
        await refuse(database, (refusal(503, "overloaded", tenant_id="ten_b"), 50))
        return alone, encoded(await read(database))

    alone, together = with_database(body)

    assert alone == together


def test_an_empty_window_has_nulls_and_zeros(with_database):
    async def body(database):
        await promise(database, objective("ttft", 100))
        return await read(database)

    report = with_database(body)

    assert (report.total.valid, report.total.good, report.total.goodput) == (0, 0, 0.0)
    assert report.total.attainment == {}
    assert {each.count for each in report.total.latency.values()} == {0}
    assert {each.p50_ns for each in report.total.latency.values()} == {None}
    assert {(each.mean_ns, each.p95_ns) for each in report.total.phases.values()} == {(None, None)}
    assert report.total.tokens.cache_hit_ratio is None
    row = report.objectives[0]
    assert (row.attainment.valid, row.attainment.ratio, row.is_met, row.budget.left_ratio) == (0, None, None, None)
    assert set(row.burn.values()) == {None}
    assert (report.rows, report.incidents, report.complete_until) == ([], [], None)
    assert [hour.ttft.count for hour in report.hours] == [0]


def test_one_request_is_its_own_median_and_has_no_99th_percentile(with_database):
    async def body(database):
        await post(database, booked(first_token_ns=123_456_789))
        return await read(database)

    ttft = with_database(body).total.latency["ttft"]

    assert (ttft.count, ttft.mean_ns, ttft.p50_ns, ttft.p95_ns, ttft.p99_ns) == (1, *[123_456_789] * 3, None)


def test_refusals_are_shown_and_those_of_ours_are_bad(with_database):
    async def body(database):
        await promise(database, objective("availability", target=0.9))
        await post(database, booked())
        await refuse(
            database,
            (refusal(503, "overloaded"), 3),
            (refusal(429, "rate_limit_exceeded"), 7),
            (refusal(400, "invalid_json", model=""), 2),
        )
        return await read(database)

    report = with_database(body)

    assert (report.total.valid, report.total.good) == (4, 1)
    assert report.total.attainment["availability"].ratio == 0.25
    assert report.total.excluded == {"caller_error": 2, "own_limit": 7}
    assert report.total.refused == {"invalid_json": 2, "overloaded": 3, "rate_limit_exceeded": 7}
    assert (report.objectives[0].attainment.valid, report.objectives[0].budget.bad) == (4, 3)
    assert [row.model for row in report.rows] == ["", "smollm2"]


def test_data_is_complete_until_the_engine_that_is_furthest_behind(with_database):
    now_s = NOON_S + 2 * HOUR_S
    heard = {"e1": (now_s - 5, now_s - 9), "e2": (now_s - 60,), "long-gone": (now_s - 4000,)}
    spans = [
        ReplicaSpan(engine_id, 1, number, "smollm2", until_s * 10**9, *[0] * 9)
        for engine_id, times in heard.items()
        for number, until_s in enumerate(times)
    ]

    async def body(database):
        async with database.transaction() as session:
            await replica_times.post(session, spans)
        return await read(database)

    assert with_database(body).complete_until == now_s - 60


def test_an_interval_holds_its_start_and_not_its_end(with_database):
    async def body(database):
        edges = (NOON_S - 1, NOON_S, NOON_S + HOUR_S - 1, NOON_S + HOUR_S)
        await post(database, *(booked(number, at_s=at) for number, at in enumerate(edges)))
        return await read(database)

    assert with_database(body).total.valid == 2


@pytest.mark.parametrize(
    ("zone", "date", "hours"),
    [
        ("Europe/Berlin", datetime(2030, 3, 31), 23),
        ("Europe/Berlin", datetime(2030, 10, 27), 25),
        ("America/New_York", datetime(2030, 11, 3), 25),
        ("Asia/Kolkata", datetime(2030, 6, 1), 24),
    ],
)
def test_a_local_day_has_all_its_hours(with_database, zone, date, hours):
    """The day itself, and an hour of the days around it."""
    local = ZoneInfo(zone)
    start = int(date.replace(tzinfo=local).timestamp())
    end = int(date.replace(day=date.day + 1, tzinfo=local).timestamp()) if date.day < 30 else start + 23 * HOUR_S

    async def body(database):
        moments = range(start - HOUR_S, end + HOUR_S, 900)
        await post(database, *(booked(number, at_s=at) for number, at in enumerate(moments)))
        return await read(database, SloQuery(start - HOUR_S, end + HOUR_S), tenant(zone=zone))

    report = with_database(body)

    assert [day.end - day.start for day in report.days] == [HOUR_S, hours * HOUR_S, HOUR_S]
    assert report.days[1].date == date.date().isoformat()
    assert [day.attainment["availability"].valid for day in report.days] == [4, 4 * hours, 4]
    assert len(report.hours) == hours + 2
    assert {hour.ttft.count for hour in report.hours} == {4}


def test_a_budget_is_of_its_window_and_an_incident_says_what_it_took(with_database):
    def traffic():
        number = 0
        for minute in range(-120, 60):
            for _ in range(5):
                number += 1
                outcome = 500 if 0 <= minute < 10 else 200
                yield booked(number, outcome, at_s=NOON_S + 60 * minute)

    async def body(database):
        await promise(database, objective("availability", target=0.99, window_days=7))
        await post(database, *traffic())
        return await read(database)

    report = with_database(body)

    row = report.objectives[0]
    assert (row.attainment.valid, row.attainment.good) == (300, 250)
    assert (row.budget.valid, row.budget.bad, row.budget.allowed) == (900, 50, 9.0)
    assert row.burn["1h"] == pytest.approx(50 / 300 / 0.01)
    assert row.burn["5m"] == 0.0
    page = next(each for each in report.incidents if each.alert == "page_fast")
    assert (page.begin, page.end) == (NOON_S + 9 * 60, NOON_S + (15 + CALM_MINUTES - 1) * 60)
    assert (page.bad, page.budget_ratio) == (50, pytest.approx(50 / 9))


def test_only_versions_of_the_interval_are_in_the_report(with_database):
    def at(seconds: int) -> int:
        return (NOON_S + seconds) * 10**9

    async def body(database):
        await promise(
            database,
            objective(version_id="old", version=1, effective_unix_ns=at(-7200)),
            objective(version_id="first", version=2, effective_unix_ns=at(-3600)),
            objective(version_id="second", version=3, effective_unix_ns=at(600)),
            objective(version_id="over", version=4, effective_unix_ns=at(1200), retired=True),
            objective("e2e", version_id="later", effective_unix_ns=at(3600)),
        )
        return await read(database)

    assert [(row.sli, row.version) for row in with_database(body).objectives] == [("ttft", 2), ("ttft", 3)]


def test_the_hash_covers_everything_but_the_time_of_its_making(with_database):
    async def body(database):
        await post(database, booked())
        return await read(database)

    report = with_database(body)

    assert report.document_hash == document_hash(msgspec.structs.replace(report, generated_at=1))
    assert report.document_hash != document_hash(msgspec.structs.replace(report, tenant_name="Acne"))


@pytest.mark.parametrize(
    ("start", "end", "group", "named"),
    [
        (NOON_S, NOON_S, (), "end"),
        (NOON_S + 1, NOON_S + 60, (), "start"),
        (NOON_S, NOON_S + 90, (), "end"),
        (-60, NOON_S, (), "end"),
        (0, (MAX_DAYS + 1) * DAY_S, (), "end"),
        (NOON_S, NOON_S + 60, ("tenant",), "group"),
    ],
)
def test_what_can_not_be_reported_is_refused_by_its_name(start, end, group, named):
    with pytest.raises(InvalidValue) as refused:
        SloQuery(start, end, group)

    assert refused.value.field == named


@pytest.mark.parametrize(
    ("good", "valid", "low", "high"), [(0, 10, 0.0, 0.2775), (5, 10, 0.2366, 0.7634), (10, 10, 0.7225, 1.0)]
)
def test_wilsons_interval_is_that_of_the_tables(good, valid, low, high):
    assert wilson(good, valid) == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))


def booked_as(settled, context):
    return replace(settled, context=context)


def encoded(report, **changes) -> bytes:
    return msgspec.json.encode(msgspec.structs.replace(report, **changes))


def refusal(status: int, reason: str, model: str = "smollm2", tenant_id: str = "ten_a") -> Refusal:
    return Refusal(tenant_id, NOON_S, model, model, "standard", status, reason)


assert datetime.fromtimestamp(NOON_S, UTC).minute == 0
