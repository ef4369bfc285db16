"""What adapters are charged by the hour: their files, and their place on devices."""

import asyncio
from collections import defaultdict
from decimal import Decimal

from invoicing import HOUR, SECOND, book, instant, issue, make_tenant, publish, request
from sqlmodel import col, select

from tenants.adapters.hours import LOOK_NS, AdapterHours
from tenants.deletion import delete_tenant
from tenants.invoices.focus import focus_rows
from tenants.invoices.focus_check import check
from tenants.invoices.lines import number_text
from tenants.pricing import ANY, MAX_ADAPTER_PRICE_PICOUSD, MEGABYTE
from tenants.tables import AdapterMeterHead, AdapterVersion, LedgerEntry

STORAGE, RESIDENCY = "adapter_storage_byte_seconds", "adapter_residency_byte_seconds"
START = instant("2026-11-10T00:00:00")
MINUTE = 60 * SECOND


async def keep(database, tenant_id: str, name: str = "pirate", size: int = 1_234_567, created: int = START, **fields):
    version = AdapterVersion(
        adapter_version_id=f"adv_{name}",
        tenant_id=tenant_id,
        name=name,
        version=1,
        sha256="0" * 64,
        base_model="smollm2",
        lora_rank=8,
        target_modules=[],
        num_pairs=1,
        size_bytes=size,
        warnings=[],
        created_unix_ns=created,
        **fields,
    )
    async with database.transaction() as session:
        session.add(version)
    return version


async def read_until(database, now: int) -> int:
    async with database.transaction() as session:
        return await AdapterHours(session).book(now)


async def look(database, now: int, **replicas: int) -> int:
    async with database.transaction() as session:
        since = await AdapterHours(session).look(now)
    async with database.transaction() as session:
        await AdapterHours(session).add_residency({f"adv_{name}": num for name, num in replicas.items()}, now, since)
    return since


async def entries(database, meter: str = STORAGE) -> list[LedgerEntry]:
    query = select(LedgerEntry).where(LedgerEntry.meter == meter).order_by(col(LedgerEntry.occurred_unix_ns))
    async with database.session() as session:
        return list((await session.exec(query)).all())


def test_a_file_is_charged_for_each_second_that_it_was_kept_and_each_hour_once(with_database):
    async def body(database):
        tenant = await make_tenant(database)
        await publish(database)
        await read_until(database, START)
        version = await keep(
            database, tenant, created=START + 90 * SECOND, deleted_unix_ns=START + 5 * HOUR + 7 * SECOND
        )
        booked = [await read_until(database, START + number * 20 * MINUTE) for number in range(25)]
        again = await read_until(database, START + 9 * HOUR)
        rows = await entries(database)

        assert (sum(booked), again, len(rows)) == (6, 0, 6)
        exact = version.size_bytes * (5 * 3600 + 7 - 90)
        assert 0 <= exact - sum(row.quantity for row in rows) < MEGABYTE
        for row in rows:
            assert row.quantity % MEGABYTE == 0
            assert row.amount_picousd * MEGABYTE == row.quantity * row.unit_price_picousd > 0
            assert (row.tenant_id, row.model, row.base_model) == (tenant, "pirate", "smollm2")
        assert [row.occurred_unix_ns // HOUR for row in rows] == [START // HOUR + number for number in range(6)]
        assert rows[0].occurred_unix_ns == version.created_unix_ns

    with_database(body)


def test_hours_that_nobody_was_there_for_are_booked_afterwards(with_database):
    async def body(database):
        tenant = await make_tenant(database)
        await publish(database)
        await read_until(database, START)
        await keep(database, tenant)
        booked = [await read_until(database, START + 60 * HOUR) for _ in range(4)]

        assert booked == [24, 24, 11, 0]
        assert len({row.entry_id for row in await entries(database)}) == 59

    with_database(body)


def test_two_gateways_book_an_hour_once(with_database):
    async def body(database):
        tenant = await make_tenant(database)
        await publish(database)
        await read_until(database, START)
        await keep(database, tenant)
        booked = await asyncio.gather(*(read_until(database, START + 4 * HOUR) for _ in range(6)))

        assert sum(booked) == len(await entries(database)) == 3

    with_database(body)


def test_a_new_price_holds_from_the_next_hour_on(with_database):
    async def body(database):
        tenant = await make_tenant(database)
        first = await publish(database)
        second = await publish(database, "2026-11-10T01:30:00", {(STORAGE, ANY, ANY): 99})
        await read_until(database, START)
        await keep(database, tenant)
        await read_until(database, START + 4 * HOUR)

        assert [(row.rate_card_id, row.unit_price_picousd) for row in await entries(database)] == [
            (first.rate_card_id, 38), (first.rate_card_id, 38), (second.rate_card_id, 99)
        ]  # fmt: skip

    with_database(body)


def test_residency_is_what_was_seen_by_whoever_looked_and_nothing_else(with_database):
    async def body(database):
        tenant = await make_tenant(database)
        await publish(database)
        await read_until(database, START)
        await keep(database, tenant, "pirate", 2 * MEGABYTE)
        await keep(database, tenant, "idle", 2 * MEGABYTE)
        seen = [await look(database, START + LOOK_NS * (number + 1), pirate=3) for number in range(6)]
        another = await look(database, START + LOOK_NS * 6 + SECOND, pirate=3)  # a second gateway, a second later
        nobody_for_an_hour = await look(database, START + HOUR + 10 * MINUTE, pirate=3)
        clock_went_back = await look(database, START + 10 * MINUTE, pirate=3)
        await read_until(database, START + 3 * HOUR)

        assert seen == [LOOK_NS] * 6
        assert (another, nobody_for_an_hour, clock_went_back) == (0, 0, 0)
        (row,) = await entries(database, RESIDENCY)
        assert (row.quantity, row.amount_picousd) == (2 * MEGABYTE * 60 * 3, 2 * 60 * 3 * 1_900)

    with_database(body)


def test_a_tenant_that_is_deleted_owes_what_it_kept_until_then(with_database):
    async def body(database):
        tenant = await make_tenant(database)
        await publish(database)
        await read_until(database, START)
        await keep(database, tenant, size=10 * MEGABYTE)
        now = START + HOUR + 30 * MINUTE
        async with database.transaction() as session:
            await delete_tenant(session, tenant, now)
        await read_until(database, START + 5 * HOUR)

        assert [row.quantity for row in await entries(database)] == [10 * MEGABYTE * 3600, 10 * MEGABYTE * 1800]

    with_database(body)


def test_an_hour_of_the_largest_adapter_at_the_highest_price_fits(with_database):
    async def body(database):
        tenant = await make_tenant(database)
        await publish(database, prices={(STORAGE, ANY, ANY): MAX_ADAPTER_PRICE_PICOUSD})
        await read_until(database, START)
        await keep(database, tenant, size=1 << 40)
        await read_until(database, START + 2 * HOUR)

        (row,) = await entries(database)
        assert row.amount_picousd == (1 << 40) * 3600 // MEGABYTE * MAX_ADAPTER_PRICE_PICOUSD

    with_database(body)


def test_what_is_not_on_the_rate_card_is_free_and_hours_before_the_first_card_are_too(with_database):
    async def body(database):
        tenant = await make_tenant(database)
        await read_until(database, START)
        await keep(database, tenant)
        await read_until(database, START + 2 * HOUR)
        async with database.session() as session:
            head = (await session.exec(select(AdapterMeterHead))).one()

        assert await entries(database) == []
        assert head.hour == START // HOUR

    with_database(body)


def test_an_invoice_has_the_adapters_hours_beside_the_requests(with_database):
    async def body(database):
        tenant, card = await make_tenant(database), await publish(database)
        await read_until(database, START)
        await keep(database, tenant, size=400 * MEGABYTE)
        for number in range(12):
            await look(database, START + LOOK_NS * (number + 1), pirate=1)
        await read_until(database, START + 24 * HOUR)
        await book(database, request(tenant, card, START))
        issued = await issue(database, tenant, "2026-11")

        lines: dict[str, int] = defaultdict(int)
        for line in issued.lines:
            lines[line.meter] += line.quantity
        assert lines[STORAGE] == 400 * MEGABYTE * 3600 * 23
        assert lines[RESIDENCY] == 400 * MEGABYTE * 120
        assert check(focus_rows(issued), {number_text(issued.invoice): Decimal(issued.invoice.total_cents) / 100}) == []

    with_database(body)
