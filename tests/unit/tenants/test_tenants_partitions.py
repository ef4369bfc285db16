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
from tests.invoicing import DAY, book, instant, issue, make_tenant, publish, request

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


async def _script(database: Database, script: str) -> None:
    async with database.transaction() as session:
        connection = await (await session.connection()).get_raw_connection()
        await connection.driver_connection.execute(script) if "$$" in script else await session.exec(text(script))


async def _places(database: Database, table: str) -> Counter[str]:
    async with database.session() as session:
        query = text(f"SELECT tableoid::regclass::text FROM {table}")
        return Counter((await session.exec(query)).scalars())
