"""A whole Tenora on this machine, started as a user starts it: ``./run serve`` in a home of its own."""

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import openai
import psutil

from tests import fallbacks, plain
from tests.exactness import on_gpu
from tests.ports import free_port

ROOT = Path(__file__).resolve().parent.parent
MODEL_VARIABLE = "TENORA_TEST_MODEL"  # which recipe the suites on the real model run on
KEPT_VARIABLES = (  # how to run it, not what
    "TENORA_SETUP", "TENORA_MODEL_CACHE", "TENORA_DEVICE", "TENORA_DTYPE", "TENORA_DETERMINISTIC",
)  # fmt: skip
ON_GPU = {"TENORA_KV_MEMORY": str(2 << 30)}  # else the first engine takes all of the GPU, and others start beside it
PATIENCE_S = 60.0  # for what must come, on however busy a machine; only a test that fails waits for so long
DEFAULT_MODEL = os.environ.get(MODEL_VARIABLE, "smollm2-135m")


@dataclass
class Served:
    """One running supervisor with its children; ``lines`` is what it printed on stdout."""

    process: subprocess.Popen
    home: Path
    port: int
    ops_port: int
    lines: list[str] = field(default_factory=list)
    log: Path = Path()
    reader: threading.Thread = field(default_factory=threading.Thread)
    _clients: dict[str, openai.OpenAI] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def ops_url(self) -> str:
        return f"http://127.0.0.1:{self.ops_port}"

    @property
    def credentials(self) -> dict:
        return json.loads((self.home / "credentials.json").read_text())

    def api_key(self, tenant: str) -> str:
        return self.credentials["tenants"][tenant]["api_key"]

    def tenant_id(self, tenant: str) -> str:
        return self.credentials["tenants"][tenant]["tenant_id"]

    def client(self, tenant: str = "acme") -> openai.OpenAI:
        """The stock client with the demo tenant's key; closed when we stop."""
        if tenant not in self._clients:
            key = self.api_key(tenant)
            self._clients[tenant] = openai.OpenAI(base_url=self.url, api_key=key, max_retries=0, timeout=120)
        return self._clients[tenant]

    def http(self, key: str | None = None) -> httpx.Client:
        """The public port, spoken to without a client library in between."""
        headers = {"authorization": f"Bearer {key or self.api_key('acme')}"}
        return plain.client(base_url=self.url, headers=headers, timeout=120)

    def ops(self) -> httpx.Client:
        headers = {"authorization": f"Bearer {self.credentials['operator_key']}"}
        return plain.client(base_url=f"{self.ops_url}/admin/v1", headers=headers, timeout=PATIENCE_S)

    def new_tenant(self, name: str, **limits) -> str:
        """A tenant with a key and these limits; the key."""
        with self.ops() as ops:
            tenant = _ok(ops.post("/tenants", json={"name": name}))
            if limits:
                _ok(ops.patch(f"/tenants/{tenant['id']}/limits", json=limits))
            return _ok(ops.post(f"/tenants/{tenant['id']}/keys", json={"name": "test"}))["api_key"]

    def children(self, word: str) -> list[psutil.Process]:
        """Our own live children whose command line holds ``word``."""
        found = []
        for child in psutil.Process(self.process.pid).children(recursive=True):
            try:
                if word in " ".join(child.cmdline()) and child.status() != psutil.STATUS_ZOMBIE:
                    found.append(child)
            except psutil.NoSuchProcess:
                continue
        return found

    def gateways(self) -> list[psutil.Process]:
        return self.children("gateway.main")

    def engines(self) -> list[psutil.Process]:
        return [child for child in self.children("engine") if "gateway.main" not in " ".join(child.cmdline())]

    def metrics(self) -> dict[tuple[str, tuple], float]:
        """Every sample of /metrics: (name, sorted labels) → value."""
        return parse_metrics(plain.get(f"{self.ops_url}/metrics", timeout=PATIENCE_S).text)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a name's samples that carry these labels."""
        wanted = set(labels.items())
        return sum(value for (found, have), value in self.metrics().items() if found == name and wanted <= set(have))

    def stop(self) -> int:
        """SIGTERM, as an operator does; the exit code. No process of ours is left; on a GPU no kernel was missing."""
        fell = fallbacks.seen(self)
        family = psutil.Process(self.process.pid).children(recursive=True) if self.process.poll() is None else []
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        _, alive = psutil.wait_procs(family, timeout=20)
        for child in alive:
            child.kill()
        assert not alive, f"left behind: {alive}"
        self.forget()
        assert not fell, f"not by the kernels and graphs that are meant: {fell}"
        return code

    def forget(self) -> None:
        """Closes what we hold of an ended process."""
        for client in self._clients.values():
            client.close()
        self.reader.join(5)
        self.process.stdout.close()


def _ok(response: httpx.Response) -> dict:
    assert response.status_code in (200, 201), response.text
    return response.json()


def parse_metrics(text: str) -> dict[tuple[str, tuple], float]:
    from prometheus_client.parser import text_string_to_metric_families

    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def eventually(check, timeout_s: float = PATIENCE_S, every_s: float = 0.05):
    """Polls ``check`` until it returns something true (asserts count as not yet); returns that."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            if found := check():
                return found
        except (AssertionError, httpx.HTTPError, psutil.NoSuchProcess):
            if time.monotonic() > deadline:
                raise
        assert time.monotonic() < deadline, f"never true within {timeout_s} s: {check}"
        time.sleep(every_s)


def _collect(served: Served, ready: threading.Event) -> None:
    assert served.process.stdout is not None
    for line in served.process.stdout:
        served.lines.append(line.rstrip("\n"))
        if line.startswith("ready "):
            ready.set()
    ready.set()


def start(
    home: Path, *options: str, timeout_s: float = 300, serve: tuple[str, ...] = ("./run", "serve"), **ports: int
) -> Served:
    """Starts ``./run serve`` and waits for its ready line (a GPU's first start compiles its kernels)."""
    port, ops_port = ports.get("port") or free_port(), ports.get("ops_port") or free_port()
    home.mkdir(parents=True, exist_ok=True)
    log = home / "stderr.log"
    command = [*serve, "--home", str(home), "--port", str(port), "--ops-port", str(ops_port), *options]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TENORA_")}
    environment |= {key: os.environ[key] for key in KEPT_VARIABLES if key in os.environ}
    environment |= ON_GPU if on_gpu() else {}
    with log.open("ab") as stderr:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment)
    served = Served(process, home, port, ops_port, log=log)
    ready = threading.Event()
    served.reader = threading.Thread(target=_collect, args=(served, ready), daemon=True)
    served.reader.start()
    if not ready.wait(timeout_s) or not any(line.startswith("ready ") for line in served.lines):
        process.kill()
        process.wait(10)
        served.forget()
        raise AssertionError(f"not ready within {timeout_s} s:\n{served.lines}\n{log.read_text()[-4000:]}")
    return served


@contextmanager
def serving(home: Path, *options: str, **more) -> Iterator[Served]:
    served = start(home, *options, **more)
    try:
        yield served
    finally:
        if served.process.poll() is None:
            served.stop()
