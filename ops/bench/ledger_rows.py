"""A ledger of many records: filled by SQL inside the database, then asked and added to as in production.

The rows that are there before are synthetic: three entries a record, over one month of 100 tenants with two models
each, in the order of time; entry ids rise with it, spread over all that an id can be. Secondary indexes and rollups are
made after them. What is measured is the product's own code on top of them.
"""

import asyncio
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

from sqlalchemy import BigInteger, Boolean
from sqlalchemy.dialects import sqlite
from sqlalchemy.schema import CreateIndex
from sqlmodel.ext.asyncio.session import AsyncSession

from tenants.bulk import insert_new
from tenants.database import Database, create_engine
from tenants.invoices.sums import ledger_amount, ledger_groups, receipts_amount
from tenants.money import limbs
from tenants.periods import Period
from tenants.pricing import ANY, RateCard
from tenants.quota.budgets import Window
from tenants.quota.spend_repository import SpendRepository
from tenants.tables import LedgerEntry, RequestRecord, UsageSeries
from tenants.usage.query import UsageQuery
from tenants.usage.repository import UsageRepository
from tenants.usage.rollup_check import coarser_sums, differences
from tenants.usage.rollups import DIMENSIONS, KEY, SUMMED_METERS, SUMS, series_id

NUM_TENANTS = 100
MONTH_S = 31 * 86_400
START_S = int(datetime(2030, 3, 1, tzinfo=UTC).timestamp())
TOKENS = {"input_uncached_tokens": 200, "output_tokens": 64, "requests": 1}
PRICES = {"input_uncached_tokens": 5 * 10**9, "output_tokens": 10**10 - 1, "requests": 10**9 + 1}  # $1.64 a request
DEAR = RateCard("rc_1", 1, 0, {(meter, ANY, ANY): PRICES.get(meter, 0) for meter in (*PRICES, "input_cached_tokens")})
A_REQUEST = sum(TOKENS[meter] * price for meter, price in PRICES.items())
_TABLES = [table.__table__ for table in (RequestRecord, LedgerEntry)]  # pyright: ignore[reportAttributeAccessIssue]
_INDEXES = [index for table in _TABLES for index in table.indexes]

_SQLITE = {
    "numbers": "WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < {rows} - 1) ",
    "from": "n",
    "request_id": "printf('%08x-0000-7000-8000-%012x', i / 65536, i)",
    "tenant_id": "printf('ten_%024x', i % 100)",
    "key_id": "printf('%010d', i % 100)",
    "entry_id": "printf('%016x-%019x', (i * 3 + {number}) * {step}, i)",
}
_POSTGRESQL = {
    "numbers": "",
    "from": "generate_series(0::bigint, {rows} - 1) AS n(i)",
    "request_id": "lpad(to_hex(i / 65536), 8, '0') || '-0000-7000-8000-' || lpad(to_hex(i), 12, '0')",
    "tenant_id": "'ten_' || lpad(to_hex(i % 100), 24, '0')",
    "key_id": "lpad((i % 100)::text, 10, '0')",
    "entry_id": "lpad(to_hex((i * 3 + {number}) * {step}), 16, '0') || '-' || lpad(to_hex(i), 19, '0')",
}


async def fill(url: str, rows: int) -> None:
    """``rows`` records, their entries, the rollups."""
    with told("records and entries"):
        await (_fill_sqlite if url.startswith("sqlite") else _fill_postgresql)(url, rows)
    database = Database(url)
    await database.start()
    try:
        with told("rollups"):
            async with database.transaction() as session:
                await _sum_up(session)
    finally:
        await database.close()


async def _fill_sqlite(url: str, rows: int) -> None:
    """Without a journal: a load that fails is begun anew."""
    connection = sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)
    for pragma in ("journal_mode = OFF", "synchronous = OFF", "cache_size = -1000000"):
        connection.execute(f"PRAGMA {pragma}")
    for index in _INDEXES:
        connection.execute(f"DROP INDEX {index.name}")
    for statement in _statements(rows, _SQLITE):
        connection.execute(statement)
    for index in _INDEXES:
        connection.execute(str(CreateIndex(index).compile(dialect=sqlite.dialect())))
    connection.execute("PRAGMA journal_mode = WAL")
    connection.close()


async def _fill_postgresql(url: str, rows: int) -> None:
    engine = create_engine(url)
    async with engine.connect() as connection:
        plain = await connection.execution_options(isolation_level="AUTOCOMMIT")
        await plain.exec_driver_sql("SET maintenance_work_mem = '1GB'")
        for index in _INDEXES:
            await plain.run_sync(index.drop)
        for statement in _statements(rows, _POSTGRESQL):
            await plain.exec_driver_sql(statement)
        for index in _INDEXES:
            await plain.run_sync(index.create)
        await plain.exec_driver_sql("VACUUM ANALYZE")
    await engine.dispose()


def _statements(rows: int, dialect: dict[str, str]) -> Iterator[str]:
    common: dict[str, str] = {
        **{name: dialect[name] for name in ("request_id", "tenant_id", "key_id")},
        "model": "CASE i / 100 % 2 WHEN 0 THEN 'support' ELSE 'smollm2-135m' END",
        **{"base_model": "'smollm2-135m'", "flow_class": "'standard'", "rate_card_id": "'rc_1'"},
    }
    at_ns = f"({START_S} + i * {MONTH_S} / {rows}) * 1000000000 + i % 1000000000"
    record = {"outcome": "200", "prompt_tokens": "200", "output_tokens": "64", "price_picousd": str(A_REQUEST)}
    record |= {"billed": "true", "gpu_ns": "1000000 + i % 1000", "admitted_unix_ns": at_ns, "finished_unix_ns": at_ns}
    yield _into(_TABLES[0], rows, dialect, common | record | {"operation": "'chat'"})
    for number, (meter, price) in enumerate(PRICES.items()):
        quantity = TOKENS[meter]
        name = dialect["entry_id"].format(number=number, step=(1 << 63) // (3 * rows))
        entry = {"entry_id": name, "meter": f"'{meter}'", "quantity": str(quantity)}
        entry |= {"unit_price_picousd": str(price), "amount_picousd": str(quantity * price)}
        yield _into(_TABLES[1], rows, dialect, common | entry | {"occurred_unix_ns": at_ns})


async def _sum_up(session: AsyncSession) -> None:
    """All requests are alike: so many of a minute make so much."""
    series = []
    for tenant in range(NUM_TENANTS):
        for model in ("support", "smollm2-135m"):
            its = (f"ten_{tenant:024x}", f"{tenant:010d}", model, "smollm2-135m", "", "standard", "rc_1")
            series.append((series_id(*its), *its))
    await insert_new(session, UsageSeries, ("series_id", *DIMENSIONS), sorted(series))
    sums = [TOKENS.get(meter, 0) for meter in SUMMED_METERS]
    sums += [limb for meter in SUMMED_METERS for limb in limbs(TOKENS.get(meter, 0) * PRICES.get(meter, 0))]
    counted = ", ".join(f"num * {each}" for each in sums)
    minutes = (
        f"SELECT series_id, 60, start_s, {counted}, gpu_ns FROM (SELECT tenant_id, model, "
        "finished_unix_ns / 60000000000 * 60 AS start_s, COUNT(*) AS num, SUM(gpu_ns) AS gpu_ns "
        "FROM request_record GROUP BY 1, 2, 3) AS minute JOIN usage_series USING (tenant_id, model)"
    )
    connection = await session.connection()
    for statement in (minutes, *coarser_sums()):
        await connection.exec_driver_sql(f"INSERT INTO usage_rollup ({', '.join((*KEY, *SUMS))}) {statement}")


def _into(table: Any, rows: int, dialect: dict[str, str], columns: dict[str, str]) -> str:
    """What a column is not told is nothing: 0, false, ''."""
    values = [columns.get(column.name, _nothing(column)) for column in table.columns]
    names = ", ".join(column.name for column in table.columns)
    numbers, source = dialect["numbers"].format(rows=rows), dialect["from"].format(rows=rows)
    return f"{numbers}INSERT INTO {table.name} ({names}) SELECT {', '.join(values)} FROM {source}"


def _nothing(column: Any) -> str:
    if column.nullable:
        return "NULL"
    kind = getattr(column.type, "impl_instance", column.type)
    return "false" if isinstance(kind, Boolean) else "0" if isinstance(kind, BigInteger) else "''"


async def reports(url: str, rows: int) -> dict[str, Any]:
    """Seconds of a tenant's monthly reports, and whether all amounts are right to the last picousd."""
    database = Database(url)
    await database.start()
    tenant_id, zone = f"ten_{7:024x}", ZoneInfo("Asia/Kolkata")
    utc = UsageQuery(START_S, START_S + MONTH_S, "1d", ("model", "api_key_id"))
    local = UsageQuery(START_S - 19_800, START_S + MONTH_S - 19_800, "1d", ("model",), zone=zone)
    costs = UsageQuery(START_S, START_S + MONTH_S, "1d", ("line_item",))
    odd = UsageQuery(START_S + 1, START_S + MONTH_S - 1, "1d", ("line_item",))
    try:
        async with database.session() as session:
            usage = UsageRepository(session)
            seconds = {
                "usage by day": await _timed(usage.usage_buckets(tenant_id, utc)),
                "usage by day of Asia/Kolkata": await _timed(usage.usage_buckets(tenant_id, local)),
                "costs by day": await _timed(usage.cost_buckets(tenant_id, costs)),
                "costs between two odd seconds": await _timed(usage.cost_buckets(tenant_id, odd)),
                "costs of all tenants": await _timed(usage.cost_buckets(None, costs)),
                "what a spend window has": await _timed(SpendRepository(session).spent(tenant_id, _window())),
                "an invoice's sums": await _timed(_invoiced(session, tenant_id)),
                "the entries themselves": await _timed(_raw(session, tenant_id)),
            }
            whole = await usage.cost_buckets(None, UsageQuery(START_S, START_S + MONTH_S + 86_400))
            wrong = sum(row.amount_picousd for bucket in whole for row in bucket.rows) - rows * A_REQUEST
        return {"seconds": seconds, "usd": rows * A_REQUEST / 10**12, "picousd_off": wrong}
    finally:
        await database.close()


async def check(url: str) -> int:
    """Rollups that differ from the rows."""
    database = Database(url)
    await database.start()
    try:
        async with database.session() as session:
            return await differences(session)
    finally:
        await database.close()


async def size_bytes(url: str) -> int:
    database = Database(url)
    await database.start()
    try:
        async with database.session() as session:
            connection = await session.connection()
            if connection.dialect.name == "postgresql":
                asked = await connection.exec_driver_sql("SELECT pg_database_size(current_database())")
                return asked.scalar_one()
        return Path(url.removeprefix("sqlite:///")).stat().st_size
    finally:
        await database.close()


def _window() -> Window:
    """A tenant's month in a zone whose midnights are no day's end in UTC."""
    moved_ns = 19_800 * 10**9
    period = Period(START_S * 10**9 - moved_ns, (START_S + MONTH_S) * 10**9 - moved_ns, "2030-03-01")
    return Window(f"tenant@{period.label}", 1, 0, period)


async def _invoiced(session: AsyncSession, tenant_id: str) -> None:
    span = START_S * 10**9, (START_S + MONTH_S) * 10**9
    for sums in (ledger_groups, ledger_amount, receipts_amount):
        await sums(session, tenant_id, *span)


async def _raw(session: AsyncSession, tenant_id: str) -> None:
    connection = await session.connection()
    from_ns, until_ns = START_S * 10**9, (START_S + MONTH_S) * 10**9
    await connection.exec_driver_sql(
        "SELECT meter, SUM(quantity), SUM(amount_picousd / 1000000000) FROM ledger_entry "
        f"WHERE tenant_id = '{tenant_id}' AND occurred_unix_ns >= {from_ns} AND occurred_unix_ns < {until_ns} "
        "GROUP BY meter"
    )


async def _timed(work: Any) -> float:
    started = time.perf_counter()
    await work
    return round(time.perf_counter() - started, 3)


@contextmanager
def told(what: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    print(f"  {what}: {time.perf_counter() - started:.1f} s", flush=True)


def measure_rows(url: str, rows: int, compare: bool) -> dict[str, Any]:
    """``compare``: whether the rollups are held against the rows, which takes as long as filling."""
    asyncio.run(fill(url, rows))
    found = asyncio.run(reports(url, rows))
    if compare:
        with told("comparison of the rollups with the rows"):
            found["rollups_off"] = asyncio.run(check(url))
    return found | {"bytes": asyncio.run(size_bytes(url))}
