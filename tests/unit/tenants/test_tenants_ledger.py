"""The ledger and what is read back from it: receipts, usage, costs."""

import asyncio
import random
import uuid
from collections import Counter
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import msgspec
import pytest
from sqlmodel import select

from tenants.audit_log import AuditLog
from tenants.database import Database
from tenants.errors import InvalidRecord, InvalidValue
from tenants.ledger import Ledger, entry_id
from tenants.meter import RequestContext
from tenants.pricing import ANY, MAX_PRICE_PICOUSD, MAX_QUANTITY, METERS, RateCard, default_prices
from tenants.record_repository import RecordRepository
from tenants.repositories import RateCardRepository
from tenants.settled import SettledRequest
from tenants.tables import LedgerEntry, RequestRecord, UnbookedRecord
from tenants.usage.query import UsageQuery
from tenants.usage.repository import UsageRepository

CARD = RateCard("rc_1", 1, 0, default_prices())
CARDS = {"rc_1": CARD}
NOON_S = 1_900_000_800  # 2030-03-17 20:00 UTC: a whole hour
SECOND = 10**9


def settled(number: int = 1, outcome: int = 200, tokens=(20, 16, 5), finished_unix_ns=NOON_S * SECOND, **context):
    fields = {
        "tenant_id": "ten_a",
        "key_id": "key_1",
        "request_id": str(uuid.UUID(int=number)),
        "attempt": 1,
        "base_model": "smollm2",
        "model": "pirate",
        "adapter_version_id": "adv_1",
        "flow_class": "standard",
        "rate_card_id": "rc_1",
        "admitted_unix_ns": finished_unix_ns - SECOND,
        "trace_id": "",
        "operation": "chat",
        "label": "",
    } | context
    durations = (1, 2, 3, 4, 5, 6, 7)
    return SettledRequest(RequestContext(**fields), outcome, *tokens, *durations, finished_unix_ns)


async def post(database, *requests, cards=CARDS) -> int:
    async with database.transaction() as session:
        return await Ledger().post(session, requests, cards)


async def everything(database) -> tuple[list[RequestRecord], list[LedgerEntry]]:
    async with database.session() as session:
        records = (await session.exec(select(RequestRecord).order_by(RequestRecord.request_id))).all()
        entries = (await session.exec(select(LedgerEntry).order_by(LedgerEntry.entry_id))).all()
        return list(records), list(entries)


async def usage(database, tenant_id="ten_a", **query):
    async with database.session() as session:
        return await UsageRepository(session).usage_buckets(tenant_id, UsageQuery(**query))


async def costs(database, tenant_id="ten_a", **query):
    async with database.session() as session:
        return await UsageRepository(session).cost_buckets(tenant_id, UsageQuery(**query))


# ── writing ──────────────────────────────────────────────────────────────────────────────────────


def test_a_served_request_becomes_one_receipt_and_one_entry_a_meter(with_database):
    async def body(database):
        assert await post(database, settled(label="mine")) == 1
        (record,), entries = await everything(database)
        assert (record.outcome, record.billed, record.price_picousd) == (200, True, 2_100_000)
        assert (record.queue_ns, record.prefill_ns, record.decode_ns, record.post_ns, record.network_ns) == (
            1,
            2,
            3,
            4,
            5,
        )
        assert (record.total_ns, record.gpu_ns, record.label, record.rate_card_id) == (15, 7, "mine", "rc_1")
        assert {entry.meter: (entry.quantity, entry.unit_price_picousd, entry.amount_picousd) for entry in entries} == {
            "input_uncached_tokens": (4, 50_000, 200_000),
            "input_cached_tokens": (16, 25_000, 400_000),
            "output_tokens": (5, 100_000, 500_000),
            "requests": (1, 1_000_000, 1_000_000),
        }
        assert {entry.entry_id for entry in entries} == {entry_id(record.request_id, meter) for meter in METERS}

    with_database(body)


def test_an_entrys_id_is_the_same_for_ever():
    assert entry_id("00000000-0000-0000-0000-000000000001", "requests") == "2aba76a7-aa85-55d4-8aa6-9d6cec886dd7"
    namespace = uuid.UUID("6f1f3f6e-7a55-5f0e-9d6e-1c6a2f0f7e11")
    for number in range(200):
        assert entry_id(str(number), "requests") == str(uuid.uuid5(namespace, f"{number}/requests"))


@pytest.mark.parametrize(
    ("outcome", "tokens", "num_entries"),
    [(200, (4, 0, 0), 2), (499, (4, 0, 3), 3), (499, (4, 0, 0), 0), (0, (4, 0, 3), 0), (503, (4, 0, 3), 0)],
)
def test_what_is_not_billed_is_recorded_at_zero(with_database, outcome, tokens, num_entries):
    async def body(database):
        await post(database, settled(outcome=outcome, tokens=tokens))
        (record,), entries = await everything(database)
        assert (record.outcome, record.prompt_tokens, record.output_tokens) == (outcome, tokens[0], tokens[2])
        assert record.price_picousd == sum(entry.amount_picousd for entry in entries)
        assert (len(entries), record.billed) == (num_entries, num_entries > 0)

    with_database(body)


def test_records_in_any_order_any_number_of_times_make_the_same_rows(with_database):
    rng = random.Random(3)
    batch = [settled(number, outcome=rng.choice([200, 499, 0])) for number in range(40)]

    async def body(database):
        num_new = await post(database, *batch, *batch[:5])
        once = await everything(database)
        for _ in range(10):
            again = rng.choices(batch, k=60)
            num_new += await post(database, *again)
        assert num_new == 40
        assert await everything(database) == once

    with_database(body)


def test_a_batch_larger_than_one_statement_can_hold_is_posted_whole(with_database):
    async def body(database):
        assert await post(database, *(settled(number) for number in range(3_000))) == 3_000
        assert await post(database) == 0
        (bucket,) = await usage(database, start_s=NOON_S, end_s=NOON_S + 60, width="1m")
        assert bucket.rows[0].num_model_requests == 3_000

    with_database(body)


@pytest.mark.parametrize("reverse", [False, True])
def test_a_request_that_moved_to_another_engine_has_two_records_and_one_bill(with_database, reverse):
    attempts = [settled(1, outcome=0, tokens=(20, 0, 0)), settled(1, attempt=2)]

    async def body(database):
        for attempt in reversed(attempts) if reverse else attempts:
            await post(database, attempt)
        records, entries = await everything(database)
        assert sorted((record.attempt, record.price_picousd) for record in records) == [(1, 0), (2, 2_100_000)]
        assert len(entries) == 4
        async with database.session() as session:
            receipt = await RecordRepository(session).get("ten_a", records[0].request_id)
        assert (receipt.attempt, receipt.outcome) == (2, 200)

    with_database(body)


def test_a_card_that_the_gateway_does_not_know_yet_is_read_from_the_database(with_database):
    async def body(database):
        async with database.transaction() as session:
            card = await RateCardRepository(session).publish(default_prices(), 5, 5)
        await post(database, settled(rate_card_id=card.rate_card_id), cards={})
        assert (await everything(database))[0][0].price_picousd == 2_100_000

    with_database(body)


def test_a_record_with_a_card_that_nobody_has_is_set_aside_counted_and_audited_and_the_others_are_booked(with_database):
    counted = []

    async def body(database):
        stranger = settled(rate_card_id="rc_unknown")
        for _ in range(2):  # it comes again: an engine that was not told of the commit
            async with database.transaction() as session:
                await Ledger((), counted.append).post(session, [stranger, settled(2)], CARDS)
        records, entries = await everything(database)
        async with database.session() as session:
            (kept,) = (await session.exec(select(UnbookedRecord))).all()
            events = await AuditLog(session).page(0, 10)

        assert [record.request_id for record in records] == [settled(2).context.request_id]
        assert len(entries) == 4
        assert counted == ["unknown_rate_card"]
        assert (kept.request_id, kept.tenant_id, kept.reason) == (str(uuid.UUID(int=1)), "ten_a", "unknown_rate_card")
        assert msgspec.json.decode(kept.record, type=SettledRequest) == stranger
        assert [(event.action, event.target) for event in events] == [("ledger.set_aside", kept.request_id)]

    with_database(body)


def test_an_unbilled_record_needs_no_card(with_database):
    async def body(database):
        assert await post(database, settled(outcome=503, rate_card_id="")) == 1

    with_database(body)


@pytest.mark.parametrize("tokens", [(-1, 0, 0), (4, 5, 0), (4, -1, 0), (4, 0, -1), (MAX_QUANTITY + 1, 0, 0)])
def test_quantities_that_no_request_can_have_are_refused_one_by_one(tokens):
    with pytest.raises(InvalidRecord):
        settled(tokens=tokens)


@pytest.mark.parametrize("outcome", [-1, 1, 99, 600])
def test_an_outcome_that_is_no_status_is_refused(outcome):
    with pytest.raises(InvalidRecord):
        settled(outcome=outcome)


def test_amounts_that_no_double_holds_come_back_to_the_last_picousd(with_database):
    price = MAX_PRICE_PICOUSD - 1
    cards = {"rc_1": RateCard("rc_1", 1, 0, {(meter, ANY, ANY): price for meter in METERS})}
    quantity = MAX_QUANTITY - 1

    async def body(database):
        await post(database, settled(tokens=(quantity, 0, quantity)), cards=cards)
        (record,), entries = await everything(database)
        amounts = {entry.meter: entry.amount_picousd for entry in entries}
        assert amounts == {
            "input_uncached_tokens": quantity * price,
            "output_tokens": quantity * price,
            "requests": price,
        }
        assert record.price_picousd == 2 * quantity * price + price
        assert float(record.price_picousd) != record.price_picousd > 1 << 62

    with_database(body)


def test_gateways_that_post_the_same_records_at_once_make_each_row_once(database_url):
    batch = [settled(number) for number in range(200)]

    async def main():
        databases = [Database(database_url) for _ in range(4)]
        for database in databases:
            await database.start()
        posts = (post(database, *random.Random(n).sample(batch, 150)) for n, database in enumerate(databases * 3))
        num_new = await asyncio.gather(*posts)
        records, entries = await everything(databases[0])
        assert len(records) == sum(num_new) >= 150
        assert len(entries) == 4 * len(records)
        for database in databases:
            await database.close()

    asyncio.run(main())


# ── reading ──────────────────────────────────────────────────────────────────────────────────────


def test_receipts_usage_and_costs_are_the_tenants_own(with_database):
    async def body(database):
        await post(database, settled(1), settled(2, tenant_id="ten_b", tokens=(1, 0, 1)))
        window = {"start_s": NOON_S, "end_s": NOON_S + 60, "width": "1m", "group_by": ("project_id",)}
        for tenant_id, other, number in (("ten_a", "ten_b", 1), ("ten_b", "ten_a", 2)):
            async with database.session() as session:
                records = RecordRepository(session)
                assert (await records.get(tenant_id, str(uuid.UUID(int=number)))).tenant_id == tenant_id
                assert await records.get(other, str(uuid.UUID(int=number))) is None
            for reader in (usage, costs):
                (bucket,) = await reader(database, tenant_id, **window)
                assert [row.project_id for row in bucket.rows] == [tenant_id]

    with_database(body)


def test_usage_is_grouped_and_filtered_as_asked(with_database):
    batch = [
        settled(1, model="pirate", key_id="k1", tokens=(10, 4, 1)),
        settled(2, model="smollm2", key_id="k1", tokens=(20, 0, 2)),
        settled(3, model="smollm2", key_id="k2", tokens=(40, 0, 4)),
        settled(4, model="smollm2", key_id="k2", tokens=(80, 0, 8), outcome=0),
    ]
    window = {"start_s": NOON_S - 60, "end_s": NOON_S + 60, "width": "1m"}

    async def body(database):
        await post(database, *batch)
        empty, bucket = await usage(database, **window)
        assert empty.rows == []
        (row,) = bucket.rows
        assert (row.input_tokens, row.input_cached_tokens, row.output_tokens, row.num_model_requests) == (70, 4, 7, 3)
        assert (row.model, row.api_key_id, row.project_id) == (None, None, None)
        _, bucket = await usage(database, **window, group_by=("model", "api_key_id"))
        found = {(row.model, row.api_key_id): row.output_tokens for row in bucket.rows}
        assert found == {("pirate", "k1"): 1, ("smollm2", "k1"): 2, ("smollm2", "k2"): 4}
        _, bucket = await usage(database, **window, models=("smollm2",), key_ids=("k2", "k3"))
        assert [row.output_tokens for row in bucket.rows] == [4]

    with_database(body)


def test_costs_by_line_item_are_the_ledgers_amounts(with_database):
    async def body(database):
        await post(database, settled(1), settled(2))
        (bucket,) = await costs(database, start_s=NOON_S, end_s=NOON_S + 3600, width="1h", group_by=("line_item",))
        assert {row.line_item: row.amount_picousd for row in bucket.rows} == {
            "input_uncached_tokens": 400_000,
            "input_cached_tokens": 800_000,
            "output_tokens": 1_000_000,
            "requests": 2_000_000,
        }

    with_database(body)


def test_sums_are_exact_beyond_63_bits(with_database):
    rng = random.Random(11)
    prices = {(meter, ANY, ANY): MAX_PRICE_PICOUSD - rng.randint(0, 999) for meter in METERS}
    cards = {"rc_1": RateCard("rc_1", 1, 0, prices)}
    batch = [
        settled(number, tokens=(MAX_QUANTITY - rng.randint(0, 99), 0, MAX_QUANTITY - rng.randint(0, 99)))
        for number in range(50)
    ]

    async def body(database):
        await post(database, *batch, cards=cards)
        (bucket,) = await costs(database, start_s=NOON_S, end_s=NOON_S + 60, width="1m")
        expected = sum(
            request.prompt_tokens * prices["input_uncached_tokens", ANY, ANY]
            + request.output_tokens * prices["output_tokens", ANY, ANY]
            + prices["requests", ANY, ANY]
            for request in batch
        )
        assert expected > 1 << 67
        assert bucket.rows[0].amount_picousd == expected

    with_database(body)


@pytest.mark.parametrize(
    "query",
    [
        {"start_s": 5, "end_s": 5},
        {"start_s": -1, "end_s": 5},
        {"start_s": 0, "end_s": 1 << 40},
        {"start_s": 0, "end_s": 2_000 * 60, "width": "1m"},
    ],
)
def test_an_interval_that_is_empty_backwards_or_too_long_is_refused(query):
    with pytest.raises(InvalidValue):
        UsageQuery(**query)


def test_usage_and_costs_refuse_a_group_that_they_do_not_have(with_database):
    async def body(database):
        for reader, group in ((usage, "line_item"), (costs, "model")):
            with pytest.raises(InvalidValue):
                await reader(database, start_s=NOON_S, end_s=NOON_S + 60, width="1m", group_by=(group,))

    with_database(body)


def test_a_day_that_a_zone_left_out_makes_no_empty_interval():
    apia = ZoneInfo("Pacific/Apia")  # went from 29 to 31 December 2011
    start_s = int(datetime(2011, 12, 29, tzinfo=apia).timestamp())
    intervals = UsageQuery(start_s, start_s + 2 * 86_400, zone=apia).intervals()
    assert intervals == [(start_s, start_s + 86_400), (start_s + 86_400, start_s + 2 * 86_400)]


# ── local days ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("zone", "day", "hours"),
    [
        ("Asia/Kolkata", (2026, 6, 1), 24),
        ("America/Los_Angeles", (2026, 6, 1), 24),
        ("UTC", (2026, 6, 1), 24),
        ("Europe/Berlin", (2026, 3, 29), 23),
        ("Europe/Berlin", (2026, 10, 25), 25),
        ("Australia/Lord_Howe", (2026, 4, 5), 24.5),
        ("America/Santiago", (2026, 9, 6), 23),  # midnight itself does not exist
    ],
)
def test_each_row_falls_in_exactly_one_local_day(with_database, zone, day, hours):
    local = ZoneInfo(zone)
    start = datetime(*day, tzinfo=local)
    start_s = int(start.timestamp())
    end_s = int((datetime(*day) + timedelta(days=1)).replace(tzinfo=local).timestamp())
    moments = [start_s - 1800, start_s - 1, start_s, start_s + 1800, end_s - 1800, end_s - 1, end_s, end_s + 1800]

    async def body(database):
        assert end_s - start_s == hours * 3600
        rows = [settled(number, finished_unix_ns=moment * SECOND) for number, moment in enumerate(moments)]
        rows.append(settled(99, finished_unix_ns=end_s * SECOND - 1))  # the day's last nanosecond
        await post(database, *rows)
        buckets = await usage(database, start_s=start_s - 7200, end_s=end_s + 7200, zone=local)
        assert [(bucket.start_s, bucket.end_s) for bucket in buckets] == [
            (start_s - 7200, start_s),
            (start_s, end_s),
            (end_s, end_s + 7200),
        ]
        assert [bucket.rows[0].num_model_requests for bucket in buckets] == [2, 5, 2]

    with_database(body)


def test_single_days_add_up_to_the_whole_interval_and_to_the_ledger_in_any_zone(with_database):
    rng = random.Random(25)
    zones = ["Asia/Kolkata", "America/Los_Angeles", "UTC", "Europe/Berlin", "Pacific/Apia", "Asia/Kathmandu"]
    first = int(datetime(2026, 3, 1, tzinfo=UTC).timestamp())
    moments = [first * SECOND + rng.randrange(60 * 86_400 * SECOND) for _ in range(250)]  # clocks change meanwhile
    batch = [
        settled(number, finished_unix_ns=moment, tokens=(rng.randint(8, 99), rng.randint(0, 8), rng.randint(1, 99)))
        for number, moment in enumerate(moments)
    ]

    async def body(database):
        await post(database, *batch)
        _, entries = await everything(database)
        for zone in map(ZoneInfo, zones):
            start_s, end_s = first + rng.randrange(86_400), first + rng.randrange(45, 55) * 86_400
            inside = [item for item in batch if start_s * SECOND <= item.finished_unix_ns < end_s * SECOND]
            by_day = Counter(datetime.fromtimestamp(item.finished_unix_ns // SECOND, zone).date() for item in inside)
            buckets = await usage(database, start_s=start_s, end_s=end_s, zone=zone)
            found = {}
            for bucket in buckets:
                day = datetime.fromtimestamp(bucket.start_s, zone).date()
                assert day not in found  # no local day is split over two buckets
                assert datetime.fromtimestamp(bucket.end_s - 1, zone).date() == day
                found[day] = sum(row.num_model_requests for row in bucket.rows)
            assert {day: number for day, number in found.items() if number} == by_day
            expected = sum(item.output_tokens for item in inside)
            assert sum(row.output_tokens for bucket in buckets for row in bucket.rows) == expected
            amounts = await costs(database, start_s=start_s, end_s=end_s, zone=zone)
            ledger = [item for item in entries if start_s * SECOND <= item.occurred_unix_ns < end_s * SECOND]
            total = sum(row.amount_picousd for bucket in amounts for row in bucket.rows)
            assert total == sum(entry.amount_picousd for entry in ledger) > 0

    with_database(body)


@pytest.mark.parametrize(("width", "seconds"), [("1m", 60), ("1h", 3600)])
def test_minutes_and_hours_are_half_open_and_clipped_to_the_interval(with_database, width, seconds):
    start_s = NOON_S - seconds // 2

    async def body(database):
        edges = [start_s * SECOND - 1, start_s * SECOND, NOON_S * SECOND - 1, NOON_S * SECOND]
        edges += [(NOON_S + seconds) * SECOND - 1, (NOON_S + seconds) * SECOND, (NOON_S + seconds + 5) * SECOND]
        await post(database, *(settled(number, finished_unix_ns=edge) for number, edge in enumerate(edges)))
        buckets = await usage(database, start_s=start_s, end_s=NOON_S + seconds + 5, width=width)
        assert [bucket.start_s for bucket in buckets] == [start_s, NOON_S, NOON_S + seconds]
        assert [bucket.rows[0].num_model_requests for bucket in buckets] == [2, 2, 1]

    with_database(body)


class Seen:
    """A fold that keeps what it is shown."""

    def __init__(self) -> None:
        self.booked = []

    async def fold(self, session, booked):
        self.booked += booked


def test_a_fold_sees_each_record_once_whatever_comes_again(with_database):
    seen = Seen()
    requests = [settled(number, outcome) for number, outcome in ((1, 200), (2, 503), (3, 499), (4, 200))]

    async def body(database):
        for batch in (requests[:2], requests[1:] + requests[:1], requests + requests):
            async with database.transaction() as session:
                await Ledger([seen]).post(session, batch, CARDS)

    with_database(body)

    ids = sorted(booked.request.context.request_id for booked in seen.booked)
    assert ids == sorted(request.context.request_id for request in requests)
    assert [bool(booked.charges) for booked in seen.booked] == [booked.request.outcome != 503 for booked in seen.booked]


@pytest.mark.parametrize("batches", [[[0], [1]], [[1, 0]]])
def test_a_second_dispatch_that_is_billed_too_is_shown_without_charges(with_database, batches):
    seen = Seen()

    async def body(database):
        for batch in batches:
            async with database.transaction() as session:
                await Ledger([seen]).post(session, [settled(1, attempt=attempt) for attempt in batch], CARDS)

    with_database(body)

    assert [len(booked.charges) > 0 for booked in seen.booked] == [True, False]
