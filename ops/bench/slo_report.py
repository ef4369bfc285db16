"""How long a month's SLO report of a busy tenant takes, and for how long it holds the event loop.

    ./run bench slo_report [--days N] [--requests N] [--database sqlite|postgresql] [--zone ZONE] [--note TEXT]

One tenant, three models in three classes with an objective for each SLI of each class, something in every minute,
refusals too: written by the product's own fold. Then the report is asked for as the gateway does it, as JSON and as a
page, while a task of the same loop counts how late it wakes. Prints a line a report and appends it to results.jsonl.
"""

import argparse
import asyncio
import json
import random
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any, get_args

from gateway.views.slo import answer
from ops.bench.ledger import KINDS, RESULTS, empty_database
from tenants.database import Database
from tenants.meter import FlowClass, RequestContext
from tenants.settled import Booked, SettledRequest
from tenants.slo.objectives import Objective, Sli
from tenants.slo.refusals import Refusal, write_refusals
from tenants.slo.repository import ObjectiveRepository
from tenants.slo.sums import SloFold
from tenants.tables import Tenant

MODELS, CLASSES = ("alpha", "beta", "gamma"), get_args(FlowClass)
START_S = int(datetime(2030, 3, 1, tzinfo=UTC).timestamp())
DAY_S, MS = 86_400, 10**6
PROMISED: dict[Sli, tuple[int, int]] = {
    "availability": (0, 999_000),
    "ttft": (500, 950_000),
    "tpot": (14, 950_000),
    "e2e": (6000, 990_000),
}
TICK_S = 0.005


def objectives() -> list[Objective]:
    return [
        Objective(f"slo_{name}_{sli}", "ten_a", "*", name, sli, 1, 0, limit_ms * MS, target, 30, f"{name} {sli}")
        for name in CLASSES
        for sli, (limit_ms, target) in PROMISED.items()
    ]


def requests(rng: random.Random, start_s: int, end_s: int, a_minute: int) -> Iterator[Booked]:
    """Log-normal times, one in two thousand fails."""
    for second in range(start_s, end_s, 60):
        for model in MODELS:
            for name in CLASSES:
                for _ in range(a_minute):
                    yield Booked(_request(rng, second, model, name), ())


def _request(rng: random.Random, second: int, model: str, name: FlowClass) -> SettledRequest:
    context = RequestContext(
        tenant_id="ten_a",
        key_id="key_1",
        request_id=str(uuid.UUID(int=rng.getrandbits(128))),
        attempt=0,
        base_model="alpha",
        model=model,
        adapter_version_id="",
        flow_class=name,
        rate_card_id="rc_1",
        admitted_unix_ns=second * 10**9,
        streamed=True,
    )
    queue, prefill = int(rng.lognormvariate(16, 1)), int(rng.lognormvariate(18, 0.7))
    tokens = rng.randrange(20, 400)
    decode = (tokens - 1) * int(rng.lognormvariate(16.1, 0.2))
    outcome = 500 if rng.random() < 0.0005 else 200
    ended_ns = second * 10**9 + rng.randrange(60 * 10**9)
    durations = (queue, prefill, decode, 2 * MS, 3 * MS, queue + prefill, 5 * MS)
    return SettledRequest(context, outcome, 200, 0, tokens, *durations, ended_ns)


async def fill(database: Database, days: int, a_minute: int) -> None:
    rng, fold = random.Random(1), SloFold()
    async with database.transaction() as session:
        ObjectiveRepository(session).add(objectives(), 0)
    for hour_s in range(START_S, START_S + days * DAY_S, 3600):
        async with database.transaction() as session:
            await fold.fold(session, list(requests(rng, hour_s, hour_s + 3600, a_minute)))
            await write_refusals(session, "p1", dict(refusals(hour_s)))


def refusals(hour_s: int) -> Iterator[tuple[Refusal, int]]:
    """Own limits in each minute, of each model; we shed something in each tenth."""
    for minute_s in range(hour_s, hour_s + 3600, 60):
        for model in MODELS:
            yield Refusal("ten_a", minute_s, model, "alpha", "standard", 429, "rate_limit_exceeded"), 3
        if minute_s % 600 == 0:
            yield Refusal("ten_a", minute_s, "alpha", "alpha", "standard", 503, "overloaded"), 1


class Lateness:
    """Of a task that would wake each TICK_S: by wall time, and the processor time that the loop's own thread took
    between two of its wakes (others on the machine are not in it)."""

    def __init__(self) -> None:
        self.wall_ms: list[float] = []
        self.cpu_ms: list[float] = []

    async def watch(self) -> None:
        while True:
            wall, cpu = time.perf_counter(), time.thread_time()
            await asyncio.sleep(TICK_S)
            self.wall_ms.append((time.perf_counter() - wall - TICK_S) * 1e3)
            self.cpu_ms.append((time.thread_time() - cpu) * 1e3)


@asynccontextmanager
async def watched() -> AsyncIterator[Lateness]:
    lateness = Lateness()
    task = asyncio.create_task(lateness.watch())
    await asyncio.sleep(2 * TICK_S)
    yield lateness
    await asyncio.sleep(2 * TICK_S)
    task.cancel()


async def report(database: Database, days: int, zone: str, form: str) -> dict[str, Any]:
    tenant = Tenant(tenant_id="ten_a", name="Acme", time_zone=zone, created_unix_ns=0, changed_unix_ns=0)
    asked = {"start": str(START_S), "end": str(START_S + days * DAY_S), "format": form}
    async with watched() as lateness:
        started, cpu = time.perf_counter(), time.process_time()
        async with database.session() as session:
            body = (await answer(session, tenant, asked)).content
        wall, cpu = time.perf_counter() - started, time.process_time() - cpu
    return {
        "zone": zone,
        "format": form,
        "seconds": round(wall, 2),
        "cpu_s": round(cpu, 2),
        "loop_late_ms": round(max(lateness.wall_ms), 1),
        "loop_held_cpu_ms": round(max(lateness.cpu_ms), 1),
        "bytes": len(body),
    }


async def measure(url: str, options: argparse.Namespace, tell: Callable[[dict[str, Any]], None]) -> None:
    database = Database(url)
    await database.start()
    try:
        started = time.perf_counter()
        await fill(database, options.days, options.requests)
        tell({"filled_s": round(time.perf_counter() - started, 1)})
        for zone in options.zone:
            for form in ("json", "json", "html"):
                tell(await report(database, options.days, zone, form))
    finally:
        await database.close()


def teller(kind: str, options: argparse.Namespace) -> Callable[[dict[str, Any]], None]:
    common = {"bench": "slo_report", "date": datetime.now(UTC).isoformat(timespec="seconds"), "note": options.note}
    place = {"database": kind, "days": options.days, "requests": options.requests}

    def tell(line: dict[str, Any]) -> None:
        print("  ".join(f"{name} {value}" for name, value in (place | line).items()), flush=True)
        with RESULTS.open("a") as results:
            results.write(json.dumps(common | place | line) + "\n")

    return tell


def main() -> None:
    parser = argparse.ArgumentParser(prog="./run bench slo_report", description=__doc__)
    parser.add_argument("--days", type=int, default=31)
    parser.add_argument("--requests", type=int, default=1, help="a minute, model and class")
    parser.add_argument("--zone", nargs="+", default=["UTC", "Asia/Kathmandu"])
    parser.add_argument("--database", choices=KINDS, help="only this one")
    parser.add_argument("--note", default="", help="kept with the results")
    options = parser.parse_args()
    for kind in [options.database] if options.database else KINDS:
        with empty_database(kind) as url:
            asyncio.run(measure(url, options, teller(kind, options)))


if __name__ == "__main__":
    main()
