"""Usage records a second into the ledger, in the gateway's batches, on SQLite and on PostgreSQL (performance.md §5).

    ./run bench ledger [--records N] [--batch N] [--note TEXT] [--rows N [--compare]]
                       [--slo] [--database sqlite|postgresql]

Prints a table and appends a line for each row of it to ops/bench/results.jsonl. "unbilled" is a record alone; a billed
one brings one ledger entry a meter with something in it (three here) with it. Both bring their sums by minute, hour and
day. ``--slo`` compares, round by round, booking without and with the sums of SLO reports, of tenants with an objective
of each kind. ``--rows`` fills the database first (ledger_rows.py), and measures a tenant's monthly reports and the size
as well.
"""

import argparse
import asyncio
import contextlib
import json
import platform
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import migrations
from ops.bench.ledger_rows import measure_rows
from tenants.database import Database
from tenants.ledger import Ledger
from tenants.meter import RequestContext
from tenants.pricing import RateCard, default_prices
from tenants.settled import Fold, SettledRequest
from tenants.slo.objectives import Objective, Sli
from tenants.slo.repository import ObjectiveRepository
from tenants.slo.sums import SloFold

RESULTS = Path(__file__).with_name("results.jsonl")
CARDS = {"rc_1": RateCard("rc_1", 1, 0, default_prices())}
TARGET = 20_000
KINDS = ("sqlite", "postgresql")
ROUNDS, MS = 5, 10**6
LIMITS_NS: dict[Sli, int] = {"availability": 0, "ttft": 500 * MS, "tpot": 14 * MS, "e2e": 1000 * MS}
START_NS = 1_900_000_000 * 10**9


def settled(number: int, outcome: int) -> SettledRequest:
    context = RequestContext(
        tenant_id=f"ten_{number % 100:024x}",
        key_id=f"{number % 100:010d}",
        request_id=str(uuid.UUID(int=0x0190_0000_0000_7000_8000_0000_0000_0000 + number)),
        attempt=0,
        base_model="smollm2-135m",
        model="support",
        adapter_version_id=f"adv_{number % 1000:024x}",
        flow_class="standard",
        rate_card_id="rc_1",
        admitted_unix_ns=START_NS + number,
        trace_id=f"{number:032x}",
        operation="chat",
        streamed=True,
    )
    queue, prefill, decode = ((number * prime % 1009 + 1) * MS for prime in (7919, 104_729, 15_485_863))
    durations = (queue, prefill, decode, 4 * MS, 5 * MS, queue + prefill, 7 * MS)
    return SettledRequest(context, outcome, 200, 0, 64, *durations, START_NS + number + 10**9)


async def measure(
    url: str, outcome: int, num_records: int, batch: int, first: int = 0, folds: Sequence[Fold] = ()
) -> dict[str, int]:
    """Records a second, and a second of this process's CPU time; the first batch, which compiles the statements, is
    not counted. ``first``: the number of the first record, none of which is there yet."""
    records = [settled(first + number, outcome) for number in range(num_records + batch)]
    database, ledger = Database(url), Ledger(folds)
    await database.start()

    async def post(start: int) -> None:
        async with database.transaction() as session:
            assert await ledger.post(session, records[start : start + batch], CARDS) == batch

    try:
        await post(0)
        started, cpu = time.perf_counter(), time.process_time()
        for start in range(batch, num_records + batch, batch):
            await post(start)
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
        return {"records_per_s": round(num_records / seconds), "records_per_cpu_s": round(num_records / cpu)}
    finally:
        await database.close()


@contextmanager
def empty_database(kind: str) -> Iterator[str]:
    """The URL of an empty, migrated one."""
    from tests.stores import postgres_server

    with contextlib.ExitStack() as stack:
        if kind == "sqlite":
            url = f"sqlite:///{stack.enter_context(tempfile.TemporaryDirectory())}/tenora.db"
        else:
            postgres = stack.enter_context(postgres_server())
            url = postgres.url(postgres.create_database())
        migrations.upgrade(url)
        yield url


async def promise(url: str) -> None:
    database = Database(url)
    await database.start()
    async with database.transaction() as session:
        for tenant in range(100):
            for sli, limit_ns in LIMITS_NS.items():
                own = f"slo_{tenant}_{sli}", f"ten_{tenant:024x}"
                promised = Objective(*own, "*", "*", sli, 1, 0, limit_ns, 950_000, 30, sli)
                ObjectiveRepository(session).add([promised], 0)
    await database.close()


def compared(url: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rounds of billed records in turn, and what the sums leave of each rate (the median over the rounds)."""
    asyncio.run(promise(url))
    found: dict[str, list[dict[str, int]]] = {"billed": [], "billed, with SLO sums": []}
    for number in range(2 * ROUNDS):
        name = list(found)[number % 2]
        folds = (SloFold(),) if number % 2 else ()
        first = number * (options.records + options.batch)
        found[name].append(asyncio.run(measure(url, 200, options.records, options.batch, first, folds)))
    for name, rates in found.items():
        yield {"records": name} | {unit: median(each[unit] for each in rates) for unit in rates[0]}
    pairs = list(zip(*found.values(), strict=True))
    yield {"records": "ratio"} | {
        unit: round(median(summed[unit] / plain[unit] for plain, summed in pairs), 3) for unit in pairs[0][0]
    }


def lines_of(kind: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    with empty_database(kind) as url:
        if options.slo:
            yield from ({"database": kind} | line for line in compared(url, options))
            return
        if options.rows:
            yield {"database": kind, "rows": options.rows} | measure_rows(url, options.rows, options.compare)
        for number, (name, outcome) in enumerate((("unbilled", 503), ("billed", 200))):
            first = number * (options.records + options.batch)
            rates = asyncio.run(measure(url, outcome, options.records, options.batch, first))
            yield {"database": kind, "rows": options.rows, "records": name} | rates


def main() -> None:
    parser = argparse.ArgumentParser(prog="./run bench ledger", description=__doc__)
    parser.add_argument("--records", type=int, default=20_000, help="how many are inserted in each case")
    parser.add_argument("--batch", type=int, default=500, help="records in a transaction, as gateway/settlement.py")
    parser.add_argument("--rows", type=int, default=0, help="how many records are there before")
    parser.add_argument("--slo", action="store_true", help="with and without the sums of SLO reports")
    parser.add_argument("--compare", action="store_true", help="hold the rollups of --rows against the rows")
    parser.add_argument("--database", choices=KINDS, help="only this one")
    parser.add_argument("--note", default="", help="kept with the results")
    options = parser.parse_args()
    versions = {name: version(name) for name in ("sqlalchemy", "aiosqlite", "asyncpg")}
    common = {
        "bench": "ledger",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {platform.system()} {platform.release()}",
        "versions": {"python": platform.python_version(), **versions},
        "command": " ".join(["./run bench ledger", *sys.argv[1:]]),
        "batch": options.batch,
        "note": options.note,
    }
    print(f"asked: {TARGET:,} records/s of one row each", flush=True)
    with RESULTS.open("a") as results:
        for kind in [options.database] if options.database else KINDS:
            for line in lines_of(kind, options):
                print("  ".join(f"{name} {value}" for name, value in line.items()), flush=True)
                results.write(json.dumps(common | line) + "\n")


if __name__ == "__main__":
    main()
