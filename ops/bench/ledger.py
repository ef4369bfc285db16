"""Usage records a second into the ledger, in the gateway's batches, on SQLite and on PostgreSQL (performance.md §5).

    ./run bench ledger [--records N] [--batch N] [--note TEXT]

Prints a table and appends a line for each row of it to ops/bench/results.jsonl. "unbilled" is the insert of the
record alone; a billed record brings one ledger entry a meter with something in it (three here) with it.
"""

import argparse
import asyncio
import json
import platform
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import migrations
from tenants.database import Database
from tenants.ledger import Ledger, SettledRequest
from tenants.meter import RequestContext
from tenants.pricing import RateCard, default_prices

RESULTS = Path(__file__).with_name("results.jsonl")
CARDS = {"rc_1": RateCard("rc_1", 1, 0, default_prices())}
TARGET = 20_000
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
    )
    return SettledRequest(context, outcome, 200, 0, 64, 1, 2, 3, 4, 5, 6, 7, START_NS + number + 10**9)


async def measure(url: str, outcome: int, num_records: int, batch: int) -> float:
    """Records a second; the first batch, which compiles the statements, is not counted."""
    records = [settled(number, outcome) for number in range(num_records + batch)]
    database, ledger = Database(url), Ledger()
    await database.start()

    async def post(start: int) -> None:
        async with database.transaction() as session:
            assert await ledger.post(session, records[start : start + batch], CARDS) == batch

    try:
        await post(0)
        started = time.perf_counter()
        for start in range(batch, num_records + batch, batch):
            await post(start)
        return num_records / (time.perf_counter() - started)
    finally:
        await database.close()


@contextmanager
def databases() -> Iterator[dict[str, list[str]]]:
    """Two empty, migrated databases of each kind, and the versions of both."""
    from tests.stores import postgres_server

    with tempfile.TemporaryDirectory() as folder, postgres_server() as postgres:
        urls = {
            "sqlite": [f"sqlite:///{folder}/{number}.db" for number in range(2)],
            "postgresql": [postgres.url(postgres.create_database()) for _ in range(2)],
        }
        for url in (url for two in urls.values() for url in two):
            migrations.upgrade(url)
        yield urls


def main() -> None:
    parser = argparse.ArgumentParser(prog="./run bench ledger", description=__doc__)
    parser.add_argument("--records", type=int, default=20_000, help="how many are inserted in each case")
    parser.add_argument("--batch", type=int, default=500, help="records in a transaction, as gateway/settlement.py")
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
    print(f"{'database':<12}{'records':<12}{'records/s':>12}{'target':>10}")
    with databases() as urls, RESULTS.open("a") as results:
        for kind, (first, second) in urls.items():
            for name, url, outcome in (("unbilled", first, 503), ("billed", second, 200)):
                rate = asyncio.run(measure(url, outcome, options.records, options.batch))
                print(f"{kind:<12}{name:<12}{rate:>12,.0f}{TARGET:>10,}", flush=True)
                line = common | {"database": kind, "records": name, "records_per_s": round(rate)}
                results.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
