"""A whole gateway in this process (a thread with its own event loop), in front of a real engine process.

Real Valkey, real SQLite, the tiny random model. What a test asks of the gateway's insides it asks on its loop.
"""

import asyncio
import contextlib
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from sqlmodel import select

from gateway.app import build_app
from gateway.main import _Server, _uvicorn_config, running_parts
from gateway.parts import Parts
from gateway.settings import EngineAddress, Settings
from migrations import upgrade
from tenants import keys
from tenants.key_repository import KeyRepository
from tenants.pricing import default_prices
from tenants.repositories import RateCardRepository, TenantRepository
from tenants.secrets import Secrets
from tests import plain
from tests.engine_process import EngineProcess
from tests.stores import ValkeyServer, valkey_server
from tests.tiny import tiny_config, write_hf_dir

ROOT = Path(__file__).resolve().parents[3]
PATIENCE_S = 60.0  # for what must come, on however busy a machine; only a test that fails waits for so long


def eventually(check: Callable[[], Any], timeout_s: float = PATIENCE_S) -> Any:
    """The first true result of ``check``; fails when there is none in time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        result = check()
        if result:
            return result
        time.sleep(0.02)
    raise AssertionError("it never came true")


@dataclass
class House:
    """A running gateway. ``parts`` live on ``loop``; use ``on_loop`` for them."""

    settings: Settings
    engine: EngineProcess
    port: int = 0
    parts: Parts = None  # type: ignore[assignment]
    loop: asyncio.AbstractEventLoop = None  # type: ignore[assignment]
    tenants: dict[str, str] = field(default_factory=dict)  # api key → tenant id
    valkey: ValkeyServer = None  # type: ignore[assignment]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def engine_pid(self) -> int:
        assert self.engine.process is not None
        assert self.engine.process.pid is not None
        return self.engine.process.pid

    def http(self, key: str = "", **options) -> httpx.Client:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return plain.client(base_url=self.url + "/v1", headers=headers, timeout=PATIENCE_S, **options)

    def on_loop(self, coroutine) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(PATIENCE_S)

    def new_tenant(self, name: str, flow_class: str = "standard", **limits) -> str:
        """A tenant with these limits, and its key."""
        return self.on_loop(self._new_tenant(name, flow_class, limits))

    async def _new_tenant(self, name: str, flow_class: str, limits: dict) -> str:
        new = keys.issue("live", Secrets.load_or_create(self.settings.secrets))
        async with self.parts.database.transaction() as session:
            tenant = await TenantRepository(session).create(name, limits=limits)
            await KeyRepository(session).create(tenant.tenant_id, new, flow_class=flow_class)
        await self.parts.pipeline.directory.refresh()
        self.tenants[new.minted.text] = tenant.tenant_id
        return new.minted.text

    def receipt(self, key: str, request_id: str) -> dict:
        """As soon as the ledger has it."""
        with self.http(key) as http:

            def found() -> dict | None:
                answer = http.get(f"/requests/{request_id}")
                return answer.json() if answer.status_code == 200 else None

            return eventually(found)

    def metric(self, name: str, **labels: str) -> float:
        registry = self.parts.pipeline.telemetry.metrics.registry
        return registry.get_sample_value(name, labels) or 0.0


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """The process does nothing until the block ends."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def running_house(folder: Path, *engine_options: str, context_tokens: int = 128) -> Iterator[House]:
    """Engine, stores and gateway, up; everything ends with the block."""
    model = write_hf_dir(folder / "model", config=tiny_config(context_tokens=context_tokens))
    sockets = Path(tempfile.mkdtemp(prefix="tn-"))
    engine = EngineProcess(sockets / "e", model, folder / "engine", engine_options)
    database_url = f"sqlite+aiosqlite:///{folder / 'tenora.db'}"
    upgrade(database_url)
    with valkey_server() as valkey:
        settings = Settings(
            home=folder,
            database_url=database_url,
            blobs=folder / "blobs",
            secrets=folder / "secrets.json",
            redis_url=valkey.url,
            webhook_loopback=True,
            engines=(EngineAddress("tiny", str(engine.socket_path)),),
        )
        house = House(settings, engine, valkey=valkey)
        engine.start()
        stop = threading.Event()
        up = threading.Event()
        failures: list[BaseException] = []

        def run() -> None:
            try:
                asyncio.run(_serve(house, up, stop))
            except BaseException as error:
                failures.append(error)
            up.set()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        try:
            assert up.wait(PATIENCE_S), "the gateway did not start"
            if failures:
                raise failures[0]
            yield house
        finally:
            stop.set()
            thread.join(PATIENCE_S)
            engine.stop()
            with contextlib.suppress(OSError):
                os.unlink(engine.socket_path)
            os.rmdir(sockets)


async def _serve(house: House, up: threading.Event, stop: threading.Event) -> None:
    house.loop = asyncio.get_running_loop()
    async with running_parts(house.settings, 0) as parts:
        listener = socket.create_server(("127.0.0.1", 0))
        house.port = listener.getsockname()[1]
        house.parts = parts
        async with parts.database.transaction() as session:
            await RateCardRepository(session).publish(default_prices(), 1, time.time_ns())
        await parts.pipeline.directory.refresh()
        server: uvicorn.Server = _Server(_uvicorn_config(build_app(parts)))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.01)
        up.set()
        await asyncio.to_thread(stop.wait)
        server.should_exit = True
        await serving


def rows(house: House, key: str, table) -> list:
    """What the database has of a key's tenant in ``table``."""

    async def read() -> list:
        async with house.parts.database.session() as session:
            return list((await session.exec(select(table).where(table.tenant_id == house.tenants[key]))).all())

    return house.on_loop(read())
