"""What a request costs the gateway's process, and how long it holds one up (performance.md §4).

    ./run bench gateway [--engine answering|tiny] [--requests N] [--rounds N] [--concurrency N] [--note TEXT]

``./run serve`` as a user starts it: one gateway, the embedded store, SQLite. The engine answers at once (its wire and
its journal are the real ones), or computes a tiny random model, on the same cores. A tenant
with every kind of limit (so each request is reserved and settled) asks over kept connections; processor time is that of
the gateway's process alone, all its threads, until its records are booked. Once without a collector of traces, once
with every request traced. What the engine says that a request took is taken off what callers waited.
Prints a line a case and appends it to results.jsonl. No peer runs here.
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import sqlite3
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from ops.bench.ledger import RESULTS
from tests.otlp import collecting
from tests.served import Served, eventually, serving
from tests.tiny import write_hf_dir

OPTIONS = ("--dtype", "float32", "--block-size", "16", "--kv-blocks", "1024", "--context", "128", "--demo")
ENGINES = {
    "answering": (sys.executable, "-m", "ops.bench.answering_engine", "--serve"),
    "tiny": ("./run", "serve"),
}
LIMITS = {
    **{"requests_per_minute": 10**7, "tokens_per_minute": 10**9, "concurrent_requests": 1000},
    "spend_limit_picousd_per_month": 10**17,
}
PROMPT = "The gateway's"  # sixteen tokens with the tiny tokenizer's template around them
_US = 1_000


@dataclass(frozen=True)
class Case:
    """What is asked for: ``tokens`` come, each in a chunk of its own where it is streamed."""

    name: str
    stream: bool
    tokens: int

    def request(self, key: str, port: int) -> bytes:
        body = json.dumps(
            {
                **{"model": "tiny", "messages": [{"role": "user", "content": PROMPT}]},
                **{"max_tokens": self.tokens, "min_tokens": self.tokens, "stream": self.stream, "ignore_eos": True},
            }
        )
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nauthorization: Bearer {key}\r\n"
        return f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()


CASES = (
    Case("answer of 1 token", False, 1),
    Case("answer of 22 tokens", False, 22),
    Case("stream of 22 tokens", True, 22),
)


async def ask(request: bytes, port: int, times: int) -> list[int]:
    """Nanoseconds of each of so many requests, one behind the other over one connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    waited = []
    for _ in range(times):
        started = time.perf_counter_ns()
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        length = _content_length(head)
        body = await (reader.readuntil(b"\r\n0\r\n\r\n") if length is None else reader.readexactly(length))
        assert head.startswith(b"HTTP/1.1 200 "), body
        waited.append(time.perf_counter_ns() - started)
    writer.close()
    return waited


def _content_length(head: bytes) -> int | None:
    lines = (line.split(b":", 1) for line in head.lower().split(b"\r\n")[1:] if b":" in line)
    return next((int(value) for name, value in lines if name == b"content-length"), None)


def processor_ns(pid: int) -> int:
    """What all threads of a process have computed so far."""
    return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir())


async def load(served: Served, case: Case, key: str, requests: int, concurrency: int) -> float:
    """Processor µs of the gateway for each request, its booking with it."""
    (gateway,) = served.gateways()
    request, each = case.request(key, served.port), requests // concurrency
    started, booked = processor_ns(gateway.pid), num_booked(served)
    await asyncio.gather(*(ask(request, served.port, each) for _ in range(concurrency)))
    while num_booked(served) < booked + each * concurrency:
        await asyncio.sleep(0.01)
    return (processor_ns(gateway.pid) - started) / (each * concurrency * _US)


def query(served: Served, statement: str) -> list[tuple]:
    with contextlib.closing(sqlite3.connect(f"file:{served.home / 'tenora.db'}?mode=ro", uri=True)) as connection:
        return connection.execute(statement).fetchall()


def num_booked(served: Served) -> int:
    return query(served, "SELECT count(*) FROM request_record")[0][0]


def added_us(served: Served, case: Case, key: str, requests: int) -> float:
    """The median that a lone caller waits beyond what its request took the engine."""
    booked = num_booked(served)
    waited = asyncio.run(ask(case.request(key, served.port), served.port, requests))
    eventually(lambda: num_booked(served) == booked + requests)
    last = f"ORDER BY finished_unix_ns DESC LIMIT {requests}"
    taken = query(served, f"SELECT prefill_ns + decode_ns FROM request_record {last}")
    return (median(waited) - median(ns for (ns,) in taken)) / _US


def measure(served: Served, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rounds of all cases in turn; the median of each, and the memory at the end."""
    key = served.new_tenant("bench", **LIMITS)
    spent: dict[Case, list[float]] = {case: [] for case in CASES}
    for number in range(options.rounds + 1):
        for case in CASES:
            us = asyncio.run(load(served, case, key, options.requests, options.concurrency))
            if number:  # the first round warms up
                spent[case].append(us)
    for case, found in spent.items():
        alone = added_us(served, case, key, options.requests // 4)
        cpu = {"cpu_us": round(median(found)), "least_cpu_us": round(min(found))}
        yield {"case": case.name} | cpu | {"added_us": round(alone)}
    (gateway,) = served.gateways()
    yield {"case": "memory", "rss_mb": round(gateway.memory_info().rss / 1e6, 1)}


def lines_of(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder, collecting() as collector:
        model = write_hf_dir(Path(folder) / "tiny")
        for traced in (False, True):
            if traced:
                os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = collector.url
            home, serve = Path(folder) / f"home-{traced}", ENGINES[options.engine]
            with serving(home, "--model", f"tiny={model}", *OPTIONS, serve=serve) as served:
                yield from ({"traced": traced} | line for line in measure(served, options))
        assert collector.spans, "nothing was traced"


def main() -> None:
    parser = argparse.ArgumentParser(prog="./run bench gateway", description=__doc__)
    parser.add_argument("--engine", choices=ENGINES, default="answering")
    parser.add_argument("--requests", type=int, default=1000, help="of each case and round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--concurrency", type=int, default=16, help="callers at once")
    parser.add_argument("--note", default="", help="kept with the results")
    options = parser.parse_args()
    common = {
        "bench": "gateway",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {platform.system()} {platform.release()}",
        "versions": {"python": platform.python_version()} | {name: version(name) for name in ("litestar", "uvicorn")},
        "concurrency": options.concurrency,
        "engine": options.engine,
        "note": options.note,
    }
    with RESULTS.open("a") as results:
        for line in lines_of(options):
            print("  ".join(f"{name} {value}" for name, value in line.items()), flush=True)
            results.write(json.dumps(common | line) + "\n")


if __name__ == "__main__":
    main()
