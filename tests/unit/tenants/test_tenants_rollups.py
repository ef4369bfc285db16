"""Sums of usage by minute, hour and day: always what the ledger's rows add up to."""

import asyncio
import random
import uuid
from collections import Counter
from dataclasses import astuple
from itertools import pairwise

import pytest
from random_ledger import DAY_S, NS, START_S, post, random_request, rows_of
from sqlmodel import select

import migrations
from tenants.database import Database
from tenants.pricing import METERS
from tenants.tables import LedgerEntry, Posting, RequestRecord, UsageRollup, UsageSeries
from tenants.usage.cover import RAW, cover
from tenants.usage.query import UsageQuery
from tenants.usage.repository import UsageRepository
from tenants.usage.rollup_check import differences, rebuild


async def rollups_of(database) -> dict[tuple, Counter]:
    """(tenant, key, model, class, card, width, start) → sums with whole amounts; without what is zero."""
    series = {each.series_id: each for each in await rows_of(database, UsageSeries)}
    found = {}
    for row in await rows_of(database, UsageRollup):
        its = series[row.series_id]
        key = (its.tenant_id, its.key_id, its.model, its.flow_class, its.rate_card_id, row.width_s, row.start_s)
        sums = Counter({meter: getattr(row, meter) for meter in METERS[:4]}, gpu_ns=row.gpu_ns)
        for meter in METERS[:4]:
            quotient, remainder = getattr(row, f"{meter}_quotient"), getattr(row, f"{meter}_remainder")
            sums[f"{meter} picousd"] = quotient * 10**9 + remainder
        found[key] = +sums
    return found


async def recounted(database) -> dict[tuple, Counter]:
    """The same from entries and records, one by one."""
    found: dict[tuple, Counter] = {}

    def add(row, at_ns: int, **sums: int) -> None:
        for width_s in (60, 3600, DAY_S):
            start_s = at_ns // NS // width_s * width_s
            key = (row.tenant_id, row.key_id, row.model, row.flow_class, row.rate_card_id, width_s, start_s)
            found.setdefault(key, Counter()).update(sums)

    for entry in await rows_of(database, LedgerEntry):
        amounts = {entry.meter: entry.quantity, f"{entry.meter} picousd": entry.amount_picousd}
        add(entry, entry.occurred_unix_ns, **amounts)
    for record in await rows_of(database, RequestRecord):
        add(record, record.finished_unix_ns, gpu_ns=record.gpu_ns)
    return {key: +sums for key, sums in found.items()}


# ── cover ────────────────────────────────────────────────────────────────────────────────────────


def test_an_interval_is_covered_once_by_the_widest_units_that_fit():
    rng = random.Random(1)
    for _ in range(2000):
        start_s = rng.randrange(4 * DAY_S)
        end_s = start_s + rng.choice([rng.randrange(120), rng.randrange(7200), rng.randrange(3 * DAY_S)])
        pieces = cover(start_s, end_s)
        ends = [start_s, *(piece.end_s for piece in pieces)]
        assert [piece.start_s for piece in pieces] == ends[:-1]
        assert ends[-1] == end_s
        for piece in pieces:
            if piece.width_s == RAW:
                assert -(-piece.start_s // 60) * 60 + 60 > piece.end_s  # no whole minute in it
            else:
                assert piece.start_s % piece.width_s == piece.end_s % piece.width_s == 0


def test_no_cover_has_fewer_units():
    widths = (12, 4, 2)

    def fewest(start: int, end: int) -> int:
        best = {start: 0}
        for at in range(start, end):
            for width in (*widths, 1):
                if at % width == 0 and at + width <= end and at in best:
                    best[at + width] = min(best.get(at + width, 1 << 30), best[at] + 1)
        return best[end]

    for start in range(14):
        for end in range(start, 44):
            pieces = cover(start, end, widths)
            assert sum((piece.end_s - piece.start_s) // (piece.width_s or 1) for piece in pieces) == fewest(start, end)


# ── what is written ──────────────────────────────────────────────────────────────────────────────


def test_rollups_hold_what_the_ledger_holds_whatever_is_posted_in_whatever_order(with_database):
    rng = random.Random(2)
    known = [random_request(rng, number) for number in range(40)]

    async def body(database):
        for step in range(25):
            new = [random_request(rng, 100 + 20 * step + n, span_s=rng.choice([90, DAY_S])) for n in range(10)]
            again = [random_request(rng, int(uuid.UUID(one.context.request_id)), 1) for one in rng.sample(known, 3)]
            batch = rng.sample(known, 8) + new + again
            rng.shuffle(batch)
            await post(database, *batch)
            known.extend(new)
            if step % 6 == 0:
                assert await rollups_of(database) == await recounted(database)
        assert await rollups_of(database) == await recounted(database)
        assert max(sums["output_tokens picousd"] for sums in (await rollups_of(database)).values()) > 1 << 63

    with_database(body)


def test_two_writers_of_the_same_sums_wait_for_each_other_and_never_in_a_circle(with_database, database_url):
    rng = random.Random(3)
    halves = [[random_request(rng, 1000 * half + number, span_s=600) for number in range(200)] for half in range(2)]

    async def write(database, requests) -> None:
        for start in range(0, len(requests), 10):
            await post(database, *requests[start : start + 10])

    async def body(database):
        other = Database(database_url)
        await other.start()
        try:
            async with asyncio.timeout(60):
                await asyncio.gather(write(database, halves[0]), write(other, halves[1][::-1]))
        finally:
            await other.close()
        assert await rollups_of(database) == await recounted(database)
        postings = sorted(await rows_of(database, Posting), key=lambda posting: posting.number)
        assert [posting.number for posting in postings] == list(range(1, len(postings) + 1))
        charged = {entry.request_id for entry in await rows_of(database, LedgerEntry)}
        assert sorted(" ".join(posting.request_ids for posting in postings).split()) == sorted(charged)

    with_database(body)


def test_a_planted_difference_is_found_and_a_rebuild_takes_it_away(with_database):
    rng = random.Random(6)
    requests = [random_request(rng, number, attempt) for number in range(60) for attempt in range(2)]

    async def body(database):
        await post(database, *requests)
        written = await rollups_of(database)
        async with database.transaction() as session:
            assert await differences(session) == 0
            day = (await session.exec(select(UsageRollup).where(UsageRollup.width_s == DAY_S))).first()
            minute = (await session.exec(select(UsageRollup).where(UsageRollup.width_s == 60))).first()
            day.output_tokens += 1
            await session.delete(minute)
            await session.flush()
            assert await differences(session) > 2  # both rows, and the hour of the minute
            await rebuild(session)
            assert await differences(session) == 0
        assert await rollups_of(database) == written

    with_database(body)


def test_days_whose_records_are_gone_keep_their_sums_through_a_check_and_a_rebuild(with_database):
    rng = random.Random(7)
    requests = [random_request(rng, number) for number in range(60)]

    async def body(database):
        await post(database, *requests)
        async with database.transaction() as session:
            minute = (await session.exec(select(UsageRollup).where(UsageRollup.width_s == 60))).first()
            session.add(UsageRollup(**minute.model_dump() | {"start_s": START_S - DAY_S}))
        written = await rollups_of(database)
        async with database.transaction() as session:
            assert await differences(session) == 0
            await rebuild(session)
        assert await rollups_of(database) == written

    with_database(body)


def test_an_upgrade_sums_up_and_numbers_what_is_booked_already(unmigrated_url, with_unmigrated):
    rng = random.Random(4)
    requests = [random_request(rng, number, attempt) for number in range(60) for attempt in range(2)]

    migrations.upgrade(unmigrated_url)
    with_unmigrated(lambda database: post(database, *requests))
    written = with_unmigrated(rollups_of)
    migrations.downgrade(unmigrated_url, "unbooked_records")
    migrations.upgrade(unmigrated_url)

    assert with_unmigrated(rollups_of) == written
    (posting,) = with_unmigrated(lambda database: rows_of(database, Posting))
    charged = {entry.request_id for entry in with_unmigrated(lambda database: rows_of(database, LedgerEntry))}
    assert sorted(posting.request_ids.split()) == sorted(charged)


# ── what is read ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("tenant_id", ["ten_a", None])
def test_any_partition_of_an_interval_adds_up_to_the_ledger(with_database, tenant_id):
    rng = random.Random(5)
    requests = [random_request(rng, number) for number in range(150)]

    async def body(database):
        await post(database, *requests)
        entries = [each for each in await rows_of(database, LedgerEntry) if tenant_id in (None, each.tenant_id)]
        for _ in range(6):
            ends = sorted(rng.sample(range(START_S, START_S + 3 * DAY_S), 5))
            inside = [each for each in entries if ends[0] * NS <= each.occurred_unix_ns < ends[-1] * NS]
            tokens, amount = Counter(), 0
            async with database.session() as session:
                usage = UsageRepository(session)
                for start_s, end_s in pairwise(ends):
                    query = UsageQuery(start_s, end_s, "1d", ("api_key_id",))
                    for row in (row for bucket in await usage.usage_buckets(tenant_id, query) for row in bucket.rows):
                        tokens.update(input=row.input_tokens, output=row.output_tokens, n=row.num_model_requests)
                    buckets = await usage.cost_buckets(tenant_id, query)
                    amount += sum(row.amount_picousd for bucket in buckets for row in bucket.rows)
            assert amount == sum(each.amount_picousd for each in inside)
            expected = Counter()
            for each in inside:
                name = {"output_tokens": "output", "requests": "n"}.get(each.meter, "input")
                expected[name] += each.quantity
            assert +tokens == +expected

    with_database(body)


def test_a_meter_without_rollups_is_in_the_costs_all_the_same(with_database):
    async def body(database):
        fixed = {
            **{"tenant_id": "ten_a", "key_id": "", "meter": "adapter_storage_byte_seconds", "model": ""},
            **{"base_model": "smollm2", "flow_class": "standard", "rate_card_id": "rc_1"},
            **{"quantity": 10, "unit_price_picousd": 7, "amount_picousd": 70},
        }
        async with database.transaction() as session:
            for number in range(3):
                own = {"entry_id": f"e{number}", "request_id": f"hour {number}"}
                session.add(LedgerEntry(**fixed, **own, occurred_unix_ns=(START_S + 30 + 3600 * number) * NS))
        async with database.session() as session:
            query = UsageQuery(START_S + 1, START_S + DAY_S, "1d", ("line_item",))
            (bucket,) = await UsageRepository(session).cost_buckets("ten_a", query)
            (used,) = await UsageRepository(session).usage_buckets("ten_a", UsageQuery(START_S, START_S + DAY_S))
        (row,) = bucket.rows
        assert astuple(row) == (210, "adapter_storage_byte_seconds", None, None)
        assert used.rows == []

    with_database(body)
