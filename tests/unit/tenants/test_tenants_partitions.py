"""ops/postgres/partitions.sql: the large tables by month, with every promise of the books kept."""

import asyncio
import uuid
from collections import Counter
from pathlib import Path

import pytest
from sqlalchemy.exc import DBAPIError
from sqlmodel import text
from stores import PostgresServer

import migrations
from tenants.audit import audit, begin_snapshot
from tenants.database import Database
from tenants.ledger import Ledger
from tenants.postings import Place, entries_from
from tenants.pricing import RateCard
from tenants.quota.wallet import Hold, WalletFold, WalletRepository
from tenants.repositories import TenantRepository
from tests.invoicing import DAY, SECOND, book, instant, issue, make_tenant, publish, request

SCRIPT = Path(__file__).resolve().parents[3] / "ops" / "postgres" / "partitions.sql"
MOMENTS = {
    "before": "2026-12-31T23:59:59.999",
    "2027_01": "2027-01-01T00:00:00",
    "2027_01 ": "2027-01-31T23:59:59.999",
    "2027_02": "2027-02-01T00:00:00",
}


def uuid7_at(unix_ns: int) -> str:
    random = uuid.uuid4().int & ((1 << 62) - 1)
    return str(uuid.UUID(int=(unix_ns // 10**6 << 80) | (7 << 76) | (2 << 62) | random))


@pytest.fixture
def url(postgres: PostgresServer) -> str:
    url = postgres.url(postgres.create_database())
    migrations.upgrade(url)
    return url


def test_rows_lie_in_their_months_and_the_books_hold_as_before(url: str):
    async def body() -> None:
        database = Database(url)
        await database.start()
        try:
            tenant, card = await make_tenant(database), await publish(database)
            at = {name.strip(): [] for name in MOMENTS}
            for name, moment in MOMENTS.items():
                admitted = instant(moment[:19]) + (999_000_000 if "." in moment else 0)
                one = request(tenant, card, admitted + DAY, request_id=uuid7_at(admitted), admitted_unix_ns=admitted)
                at[name.strip()].append(one)
            await book(database, *at["before"])
            for _ in range(2):
                await _script(database, SCRIPT.read_text())
            for day in ("2027-01-01", "2027-02-15", "2027-02-15"):
                await _script(database, f"SELECT tenora_add_month('{day}')")
            everything = [one for some in at.values() for one in some]
            async with database.transaction() as session:
                assert await Ledger().post(session, everything, {}) == 3
            async with database.transaction() as session:
                assert await Ledger().post(session, everything, {}) == 0

            for table, rows in (("request_record", 1), ("ledger_entry", 4)):
                wanted = {f"{table}_{name}": rows * len(some) for name, some in at.items()}
                assert await _places(database, table) == wanted
                for statement in (f"UPDATE {table} SET model = model", f"DELETE FROM {table}", f"TRUNCATE {table}"):
                    with pytest.raises(DBAPIError, match="is append-only"):
                        await _script(database, statement)
            january = await issue(database, tenant, "2027-01")  # of two, since all end a day after they began
            assert [line.quantity for line in january.lines if line.meter == "requests"] == [2]
            async with database.session() as session:
                await begin_snapshot(session)
                found = await audit(session, [], [])
            assert {each.invariant for each in found.findings if each.breaches} <= {
                "I9"
            }  # nobody wrote what was cached
        finally:
            await database.close()

    asyncio.run(body())
    migrations.check(url)
    migrations.downgrade(url, "-1")
    migrations.upgrade(url)


def test_a_detached_month_leaves_invoices_and_wallets_to_be_audited_and_is_named(url: str):
    """Two tenants, one of them prepaid; a request of the last second of January ends in February, and one of February
    finds in the cache what January wrote."""

    async def body() -> None:
        database = Database(url)
        await database.start()
        try:
            card = await publish(database)
            await _script(database, SCRIPT.read_text())
            await _script(database, "SELECT tenora_add_month('2025-01-01'), tenora_add_month('2025-02-01')")
            for name in ("acme", "globex"):
                await _two_months(database, await make_tenant(database, name), card, prepaid=name == "acme")
            everything = await _audited(database)
            with pytest.raises(DBAPIError, match="no invoice yet"):
                await _script(database, "SELECT tenora_detach_month('2025-01-01')")
            for tenant in await _tenants(database):
                for period in ("2025-01", "2025-02"):
                    await issue(database, tenant, period)
            for _ in range(2):
                await _script(database, "SELECT tenora_detach_month('2025-01-15')")
            for tenant in await _tenants(database):
                march = await issue(database, tenant, "2025-03")
                assert march.invoice.total_cents == 0  # January is no correction
            detached = await _audited(database)

            assert everything == ({}, [])
            assert detached[0] == {}
            (words,) = detached[1]
            assert words.startswith("2025-01: 6 receipts and 18 charges are detached")
            assert set(await _places(database, "request_record")) == {"request_record_2025_02"}
            async with database.session() as session:
                entries, _ = await entries_from(session, Place(1, 2), 1000)
            assert len(entries) == 2 * 4
        finally:
            await database.close()

    asyncio.run(body())


def test_a_month_that_journals_may_still_have_is_not_detached(url: str):
    async def body() -> None:
        database = Database(url)
        await database.start()
        try:
            await _script(database, SCRIPT.read_text())
            await _script(database, "SELECT tenora_add_month(current_date)")
            with pytest.raises(DBAPIError, match="less than 200 days ago"):
                await _script(database, "SELECT tenora_detach_month(current_date)")
        finally:
            await database.close()

    asyncio.run(body())


async def _two_months(database: Database, tenant: str, card: RateCard, *, prepaid: bool) -> None:
    """Three requests of January, the last of which ends in February, and one of February."""
    begins = [instant(text) for text in ("2025-01-05", "2025-01-20", "2025-01-31T23:59:59", "2025-02-03")]
    some = []
    for number, admitted in enumerate(begins):
        tokens = (40, 25, 5) if number == 3 else (20, 0, 5)  # 25 that are found: only January wrote as many
        request_id = uuid7_at(admitted)
        some.append(
            request(tenant, card, admitted + 2 * SECOND, tokens, request_id=request_id, admitted_unix_ns=admitted)
        )
    async with database.transaction() as session:
        if prepaid:
            wallets, row = WalletRepository(session), await TenantRepository(session).lock(tenant)
            await wallets.grant(row, 10**12, "first")
            for one in some:
                assert await wallets.reserve(Hold(tenant, one.context.request_id, 0, "gateway", 10**9))
    async with database.transaction() as session:
        for month in (some[:3], some[3:]):
            await Ledger([WalletFold()]).post(session, month, {})


async def _tenants(database: Database) -> list[str]:
    async with database.session() as session:
        return [tenant.tenant_id for tenant in await TenantRepository(session).list_all()]


async def _audited(database: Database) -> tuple[dict[str, list[str]], list[str]]:
    async with database.session() as session:
        await begin_snapshot(session)
        found = await audit(session, [])
    return {each.invariant: each.examples for each in found.findings if each.breaches}, found.not_covered


async def _script(database: Database, script: str) -> None:
    async with database.transaction() as session:
        connection = await (await session.connection()).get_raw_connection()
        await connection.driver_connection.execute(script) if "$$" in script else await session.exec(text(script))


async def _places(database: Database, table: str) -> Counter[str]:
    async with database.session() as session:
        query = text(f"SELECT tableoid::regclass::text FROM {table}")
        return Counter((await session.exec(query)).scalars())
