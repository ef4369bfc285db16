"""An installation whose processes are killed while streams run, round after round, and what must hold after each.

Two gateways, an engine and the embedded store below a supervisor, and a PostgreSQL beside it. A round: streams run,
one process gets SIGKILL, everything recovers, a new request works, every stream had one end, and the audit passes.
"""

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
from click.testing import CliRunner

from gateway.cli import main
from gateway.commands.journals import home_journals
from tenants.audit import Journaled
from tenants.secrets import Secrets
from tests import plain
from tests.months import stay_within_a_month
from tests.served import Served, eventually, start
from tests.stores import PostgresServer, postgres_server
from tests.tiny import tiny_config, write_hf_dir

VICTIMS = ("gateway", "engine", "store", "supervisor", "database")
NUM_LONG, NUM_SHORT = 10, 4  # streams; the short ones end about when the kill comes
NUM_STREAMS = NUM_LONG + NUM_SHORT
LONG, SHORT, LATEST_KILL_S = (150, 500), (1, 60), 0.3
QUICK_LONG, QUICK_LATEST_KILL_S = (1000, 1500), 0.1  # so long that none ends before the last has begun
MIN_RUNNING = 8
CONTEXT = 4096
OPTIONS = ("--gateways", "2", "--block-size", "16", "--kv-blocks", "4096", "--context", str(CONTEXT), "--no-demo")
RECOVERY_S = 120  # on however busy a machine
PLENTY_PICOUSD = 10**15
TRIES = 6  # each on a connection of its own: which gateway answers is chance


@dataclass
class Stream:
    """One streamed completion: ``text`` is what came, ``cut`` that the connection broke. One that ``leaves`` hangs up
    once it is told to, after the kill."""

    label: str
    body: dict
    leaves: bool = False
    leave: threading.Event = field(default_factory=threading.Event)
    left: bool = False
    first: threading.Event = field(default_factory=threading.Event)
    text: str = ""
    status: int = 0
    cut: bool = False
    ended: bool = False

    def run(self, url: str, key: str) -> None:
        """Asks, and asks again while it is refused: a loaded machine's store may be too slow for one."""
        headers = {"authorization": f"Bearer {key}", "x-request-id": self.label}
        with plain.client(base_url=url, headers=headers) as http:
            for _ in range(TRIES):
                self._ask(http)
                if self.status != 503:
                    break
                time.sleep(0.1)
        self.ended = True
        self.first.set()

    def _ask(self, http: httpx.Client) -> None:
        self.text = ""
        try:
            with http.stream("POST", "/completions", json=self.body) as response:
                self.status = response.status_code
                for piece in response.iter_text():
                    self.text += piece
                    if self.status == 200:
                        self.first.set()
                    if self.leaves and self.leave.is_set():
                        self.left = not self.num_ends
                        break
        except httpx.HTTPError:
            self.cut = True

    @property
    def num_ends(self) -> int:
        """Terminal events that it saw."""
        return self.text.count("data: [DONE]") + self.text.count('data: {"error"')

    @property
    def is_whole(self) -> bool:
        return "data: [DONE]" in self.text


@dataclass
class Round:
    victim: str
    num_running: int
    num_whole: int
    num_failed: int
    num_cut: int
    num_left: int
    num_lost_rows: int
    num_missing_rows: int  # streams that came to an end and that no receipt tells of
    seconds: float

    @property
    def lost_a_request(self) -> bool:
        return self.num_failed + self.num_cut > 0


class Installation:
    def __init__(self, home: Path, model: Path, postgres: PostgresServer) -> None:
        self.home, self.postgres = home, postgres
        self.database = postgres.create_database()
        self.options = ("--model", f"tiny={model}", "--database-url", postgres.url(self.database), *OPTIONS)
        self.served: Served = start(home, *self.options)

    def round(self, number: int, victim: str, draw: random.Random, quick: bool = False) -> Round:
        """Raises AssertionError where something that was promised does not hold. ``quick``: shorter streams, whose
        callers leave after the kill; else every third one does."""
        stay_within_a_month()
        began_s = time.monotonic()
        key = self._customer(number)
        self._next_request_works(key)  # a spend limit waits until what a lost store held is counted anew
        lengths = [QUICK_LONG if quick else LONG] * NUM_LONG + [SHORT] * NUM_SHORT
        streams = [self._stream(f"crash-{number}-{n}", draw, *bounds) for n, bounds in enumerate(lengths)]
        for stream in streams:
            stream.leaves = quick or draw.random() < 1 / 3
        with ThreadPoolExecutor(NUM_STREAMS) as pool:
            for stream in streams:
                pool.submit(stream.run, self.served.url, key)
            assert all(stream.first.wait(RECOVERY_S) for stream in streams)
            # anywhere in a step, a batch of records, a cursor's write
            time.sleep(draw.random() * (QUICK_LATEST_KILL_S if quick else LATEST_KILL_S))
            num_running = sum(not stream.ended for stream in streams)
            self._kill(victim, draw)
            for stream in streams:
                stream.leave.set()
            self._recover(victim)
        self._next_request_works(key)
        self._until_settled()
        self._check_ends(streams, victim)
        audit = self.audit()
        assert audit["ok"], json.dumps([found for found in audit["invariants"] if found["breaches"]], indent=1)
        self._check_sums(f"round {number}")
        return self._summary(number, victim, streams, num_running, time.monotonic() - began_s)

    def _customer(self, number: int) -> str:
        """The key of a tenant of the round's own: every second one is prepaid, the others have a spend limit."""
        limits = {"concurrent_requests": 100, "tokens_per_minute": 10_000_000}
        if number % 2:
            return self.served.new_tenant(f"round {number}", **limits, spend_limit_picousd_per_month=PLENTY_PICOUSD)
        key = self.served.new_tenant(f"round {number}", **limits)
        with self.served.ops() as ops:
            grant = {"amount_picousd": PLENTY_PICOUSD, "reference": f"payment {number}"}
            answer = ops.post(f"/tenants/{self._tenant_id(f'round {number}')}/credit", json=grant)
        assert answer.status_code in (200, 201), answer.text
        return key

    def _tenant_id(self, name: str) -> str:
        with self.served.ops() as ops:
            return next(each["id"] for each in ops.get("/tenants").json()["data"] if each["name"] == name)

    def audit(self) -> dict:
        arguments = ["audit", "--home", str(self.home), "--database-url", self.postgres.url(self.database), "--json"]
        result = CliRunner().invoke(main, arguments, standalone_mode=False)
        return json.loads(result.stdout)

    def receipts(self, label: str) -> list[tuple]:
        """(label, outcome, price, output tokens) of requests whose label begins so."""
        query = "SELECT label, outcome, price_picousd, output_tokens FROM request_record WHERE label LIKE '{}%'"
        return self.postgres.execute(query.format(label), self.database)

    def _stream(self, label: str, draw: random.Random, least: int, most: int) -> Stream:
        body = {
            "model": "tiny",
            "prompt": [draw.randrange(5, 300) for _ in range(draw.randrange(1, 60))],
            "max_tokens": draw.randrange(least, most),
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return Stream(label, body)

    def _kill(self, victim: str, draw: random.Random) -> None:
        """By pid, and only what this installation started."""
        if victim == "database":
            self.postgres.kill()
            return
        if victim == "supervisor":
            self._family = psutil.Process(self.served.process.pid).children(recursive=True)
            self.served.process.kill()
            return
        kinds = {"gateway": self.served.gateways, "engine": self.served.engines, "store": self._store}
        draw.choice(kinds[victim]()).kill()

    def _store(self) -> list[psutil.Process]:
        return self.served.children("valkey-server")

    def _recover(self, victim: str) -> None:
        if victim == "database":
            self.postgres.start_again()
        if victim == "supervisor":
            self.served.process.wait(RECOVERY_S)
            self.served.forget()
            _, alive = psutil.wait_procs(self._family, timeout=RECOVERY_S)
            assert not alive, f"outlived their supervisor: {alive}"
            self.served = start(self.home, *self.options, port=self.served.port, ops_port=self.served.ops_port)

    def _next_request_works(self, key: str) -> None:
        body = {"model": "tiny", "prompt": [7, 8, 9], "max_tokens": 2, "ignore_eos": True}

        def works() -> bool:
            return all(self._answers(key, body) for _ in range(TRIES))

        eventually(works, timeout_s=RECOVERY_S, every_s=0.1)

    def _answers(self, key: str, body: dict) -> bool:
        with self.served.http(key) as http:
            return http.post("/completions", json=body).status_code == 200

    def _check_sums(self, tenant: str) -> None:
        """Of the round's tenant: what was journaled, what the ledger has, and what its invoice says."""
        tenant_id = self._tenant_id(tenant)
        with self.served.ops() as ops:
            order = {"tenant": tenant_id, "period": time.strftime("%Y-%m", time.gmtime()), "force": True}
            invoice = ops.post("/invoices", json=order)
        assert invoice.status_code == 201, invoice.text
        invoiced: Counter[str] = Counter()
        for line in invoice.json()["lines"]:
            invoiced.update({line["meter"]: line["quantity"]} if line["kind"] == "usage" else {})
        query = f"SELECT meter, sum(quantity)::bigint FROM ledger_entry WHERE tenant_id = '{tenant_id}' GROUP BY meter"
        booked = dict(self.postgres.execute(query, self.database))
        assert dict(invoiced) == booked == self._journaled(tenant_id)

    def _journaled(self, tenant_id: str) -> dict[str, int]:
        keys = Secrets.load(self.home / "secrets.json").every_context_key
        found: Counter[str] = Counter()
        for journal in home_journals(self.home, lambda: keys, {}):
            for record in journal:
                if isinstance(record, Journaled) and record.context.tenant_id == tenant_id:
                    found.update(record.quantities())
        return dict(found)

    def _until_settled(self) -> None:
        """Nothing runs, and every record is acknowledged."""

        def settled() -> bool:
            metrics = self.served.metrics()
            names = ("tenora_engine_open_requests", "tenora_usage_records_unacked", "vllm:num_requests_running")
            found = [value for (name, _), value in metrics.items() if name in names]
            return len(found) >= len(names) and not any(found)

        eventually(settled, timeout_s=RECOVERY_S, every_s=0.1)

    def _check_ends(self, streams: list[Stream], victim: str) -> None:
        """Each stream saw one terminal event, or none and its connection was cut with the gateway that held it."""
        for stream in streams:
            assert stream.ended
            assert stream.status in (0, 200), f"{stream.label}: {stream.status} {stream.text[:300]}"
            assert stream.num_ends == (0 if stream.cut or stream.left else 1), (
                f"{stream.label} of {victim}: {stream.text[-300:]}"
            )
            assert not stream.cut or victim in ("gateway", "supervisor"), f"{stream.label} was cut by a dead {victim}"

    def _summary(self, number: int, victim: str, streams: list[Stream], num_running: int, seconds: float) -> Round:
        rows = self.receipts(f"crash-{number}-")
        outcomes = {label: outcome for label, outcome, *_ in rows}
        for stream in streams:
            assert not stream.is_whole or outcomes.get(stream.label, 200) == 200, f"{stream.label} was answered whole"
        unbilled = [row for row in rows if row[1] == 0]
        assert not any(price for _, _, price, _ in unbilled)
        return Round(
            victim,
            num_running,
            num_whole=sum(stream.is_whole for stream in streams),
            num_failed=sum(not (stream.is_whole or stream.cut or stream.left) for stream in streams),
            num_cut=sum(stream.cut for stream in streams),
            num_left=sum(stream.left for stream in streams),
            num_lost_rows=len(unbilled),
            num_missing_rows=sum(stream.label not in outcomes for stream in streams),
            seconds=seconds,
        )


@contextmanager
def crashing(folder: Path) -> Iterator[Installation]:
    model = write_hf_dir(folder / "model", config=tiny_config(context_tokens=CONTEXT))
    with postgres_server(durable=True) as postgres:
        installation = Installation(folder / "home", model, postgres)
        try:
            yield installation
        finally:
            if installation.served.process.poll() is None:
                installation.served.stop()


def victims(draw: random.Random, rounds: int) -> list[str]:
    """Each as often as the others, in an order of chance."""
    chosen = [VICTIMS[number % len(VICTIMS)] for number in range(rounds)]
    draw.shuffle(chosen)
    return chosen


COLUMNS = {
    "num_whole": "whole",
    "num_failed": "failed",
    "num_cut": "cut",
    "num_left": "left",
    "num_lost_rows": "lost rows",
    "num_missing_rows": "no row",
}


def table(rounds: list[Round]) -> str:
    """By victim: rounds, those that lost a request, how streams ended, receipts that say lost or are missing."""
    lines = ["  ".join([f"{'victim':<10}", "rounds", "losing", *COLUMNS.values(), "s/round"])]
    for victim in VICTIMS:
        of = [each for each in rounds if each.victim == victim]
        if of:
            numbers = {"rounds": len(of), "losing": sum(each.lost_a_request for each in of)}
            numbers |= {title: sum(getattr(each, name) for each in of) for name, title in COLUMNS.items()}
            cells = [f"{number:>{len(title)}}" for title, number in numbers.items()]
            lines.append("  ".join([f"{victim:<10}", *cells, f"{sum(each.seconds for each in of) / len(of):>7.1f}"]))
    lost = sum(each.lost_a_request for each in rounds)
    return "\n".join([*lines, f"{len(rounds)} rounds, {lost} lost a request ({100 * lost // max(1, len(rounds))} %)"])
