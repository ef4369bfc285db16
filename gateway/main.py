"""One gateway process: ``python -m gateway.main --listen-fd N --index I``, settings in TENORA_*.

The composition root: everything is built here, nothing reaches round it. It serves the socket that it was given,
its metrics on a unix socket, and ends with its parent. SIGTERM drains.
"""

import argparse
import asyncio
import contextlib
import ctypes
import functools
import gc
import logging
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator

import gateway.lean  # noqa: F401 (before the libraries that it is about)

# isort: split

import uvicorn
import uvloop
from redis.asyncio import Redis

from engine.client import EngineClient, EngineLost
from gateway.adapters.adapters import Adapters
from gateway.adapters.corrupt import CorruptAdapters
from gateway.adapters.meter import AdapterMeter
from gateway.adapters.sweep import AdapterSweep
from gateway.admission import Admission
from gateway.app import build_app
from gateway.dispatch import Dispatch
from gateway.failures import FailedAttempts
from gateway.idempotency import Idempotency
from gateway.left_behind import LeftBehind
from gateway.limits.bookings import Bookings
from gateway.limits.spending import build_spending
from gateway.logs import log_to_stderr
from gateway.memory import give_back, keep_small
from gateway.models import Catalog
from gateway.parts import Parts
from gateway.pipeline import Pipeline
from gateway.protocol import DEFAULT_BOUNDS, Bounds, HttpProtocol
from gateway.refusals import Refusals
from gateway.serve import scrape
from gateway.settings import EngineAddress, Settings
from gateway.settlement import Settlement
from gateway.slo_watch import SloWatcher
from gateway.targets import Targets
from gateway.telemetry import Metrics, Telemetry
from gateway.text.grammar_check import GrammarCheck
from gateway.tracing.sink import otlp_sink
from gateway.webhooks.addresses import Resolver
from gateway.webhooks.courier import Courier
from gateway.webhooks.endpoints import Webhooks
from gateway.webhooks.poster import Poster
from gateway.work import Reader
from tenants.adapters.blobs import BlobStore
from tenants.adapters.staged import StagedUploads
from tenants.database import BOOKS_S, Database
from tenants.directory import Directory
from tenants.ledger import Ledger
from tenants.quota.alerts import AlertFold
from tenants.quota.wallet import WalletFold
from tenants.secrets import Secrets
from tenants.slo.sums import SloFold

ENGINES_READY_S = 30.0
OTHER_FILES = 512  # beside connections: stores, engines, blobs, uploads
LAST_WORDS_S = 5.0  # for requests that the end of the drain cut off
_PR_SET_PDEATHSIG = 1
_log = logging.getLogger("gateway.main")


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers: ours drain first."""

    @contextlib.contextmanager
    def capture_signals(self):
        yield


@contextlib.asynccontextmanager
async def running_parts(settings: Settings, index: int) -> AsyncIterator[Parts]:
    """Everything a gateway needs, started; closed in reverse."""
    async with contextlib.AsyncExitStack() as stack:
        secrets = Secrets.load_or_create(settings.secrets)
        database = await _started(stack, Database(settings.database_url))
        redis = Redis.from_url(settings.redis_url)
        stack.push_async_callback(redis.aclose)
        directory = await _started(stack, Directory(database, redis, secrets))
        telemetry = _telemetry(settings, stack)
        blobs = BlobStore(settings.blobs)
        metrics = telemetry.metrics
        telemetry.on_refused = (await _started(stack, Refusals(database, metrics.count_slo))).count
        await _started(stack, SloWatcher(database))
        catalog = Catalog()
        spending = build_spending(settings, index, redis, database, directory, catalog.engines, metrics.fallback)
        await _started(stack, spending)
        settlement = await _started(stack, _settlement(database, directory, secrets, metrics, spending.bookings))
        prompt = database.within()  # for what callers wait for
        targets = Targets(catalog, prompt, secrets, blobs)
        await _connect(stack, settings.engines, catalog, _client_of(f"gateway-{index}", settlement, targets))
        if index == 0:
            await _started(stack, LeftBehind(settings.home / "engines", settlement.take_left))
        metrics.store_away.set_function(lambda: float(spending.limiter.is_away))
        admission = await _started(
            stack, Admission(spending.limiter, spending.credit, settlement, directory.rate_card, spending.tickets)
        )
        idempotency = await _started(stack, Idempotency(prompt, secrets))
        grammars = GrammarCheck()
        stack.push_async_callback(grammars.close)
        dispatch = Dispatch(admission, secrets, settlement.post_lost, directory.holds, metrics.fallback)
        directory.on_revoked = dispatch.revoke
        dispatch.on_corrupt = _corrupt_adapters(stack, database).report
        reader = Reader(targets, grammars)
        await _started(stack, _courier(settings, index, database, secrets, metrics, stack))
        yield Parts(
            pipeline=Pipeline(directory, FailedAttempts(), reader, idempotency, admission, dispatch, telemetry),
            catalog=catalog,
            targets=targets,
            adapters=Adapters(catalog, targets, prompt, blobs),
            database=prompt,
            blobs=blobs,
            uploads=StagedUploads(settings.blobs),
            webhooks=Webhooks(prompt, secrets, settings.webhook_loopback),
            started_unix_s=int(time.time()),
        )


def _corrupt_adapters(stack: contextlib.AsyncExitStack, database: Database) -> CorruptAdapters:
    corrupt = CorruptAdapters(database)
    stack.push_async_callback(corrupt.close)
    return corrupt


def _courier(
    settings: Settings,
    index: int,
    database: Database,
    secrets: Secrets,
    metrics: Metrics,
    stack: contextlib.AsyncExitStack,
) -> Courier:
    resolver = Resolver(allow_loopback=settings.webhook_loopback)
    stack.callback(resolver.close)
    poster = Poster(resolver, allow_loopback=settings.webhook_loopback)
    show = metrics.pending_webhooks.set if index == 0 else None  # one process: gauges are added up
    return Courier(database, secrets, poster, lambda result: metrics.webhooks.labels(result).inc(), show)


async def _started(stack: contextlib.AsyncExitStack, part):
    """Starts a part and has the stack close it."""
    await part.start()
    stack.push_async_callback(part.close)
    return part


def _settlement(
    database: Database, directory: Directory, secrets: Secrets, metrics: Metrics, bookings: Bookings
) -> Settlement:
    """With all that follows from records, in this order."""

    def count(reason: str) -> None:
        metrics.unbooked.labels(reason).inc()

    ledger = Ledger(folds=(SloFold(metrics.count_slo), WalletFold(), AlertFold(), bookings), count_unbooked=count)
    return Settlement(database, directory, secrets.every_context_key, count, ledger)


def _client_of(peer: str, settlement: Settlement, targets: Targets):
    """Makes the client of an engine's address."""

    def make(address: EngineAddress) -> EngineClient:
        client = EngineClient(
            address.address,
            peer,
            want_tokenizer=True,
            on_record=settlement.taker(lambda: client),
            adapter_source=targets.file,
        )
        return client

    return make


async def _connect(stack: contextlib.AsyncExitStack, addresses, catalog: Catalog, make) -> None:
    """Connects to every engine; one that isn't there yet is waited for a while, and comes later if it does."""
    for address in addresses:
        catalog.add(address.model, await _started(stack, make(address)))
    engines: list[EngineClient] = []
    catalog.each_engine(engines.append)
    for outcome in await asyncio.gather(*(e.ready(ENGINES_READY_S) for e in engines), return_exceptions=True):
        if isinstance(outcome, EngineLost):
            _log.warning("starting without an engine: %s", outcome)
        elif isinstance(outcome, BaseException):
            raise outcome
    for model in catalog.models.values():
        if model.connected():
            model.text()  # builds the tokenizer now, not at the first request


def _telemetry(settings: Settings, stack: contextlib.AsyncExitStack) -> Telemetry:
    telemetry = Telemetry()
    try:
        telemetry.spans = otlp_sink(dict(settings.otel), telemetry.metrics.dropped_spans.inc)
    except ValueError as error:
        _log.error("no traces: %s", error)
    if telemetry.spans is not None:
        stack.callback(telemetry.spans.close)
    stack.callback(telemetry.tell)
    return telemetry


async def serve(settings: Settings, listener: socket.socket, index: int) -> None:
    """Runs until SIGTERM or SIGINT, then drains. Raises what a part raises at its start."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with running_parts(settings, index) as parts:
        sweeping = asyncio.create_task(AdapterSweep(parts.adapters, parts.uploads).keep_sweeping(), name="sweep")
        meter = AdapterMeter(parts.catalog, parts.targets, parts.database.within(BOOKS_S))
        reading = asyncio.create_task(meter.keep_reading(), name="adapter-meter")
        registry = parts.pipeline.telemetry.metrics.registry
        bounds = Bounds(settings.max_connections, settings.receive_seconds)
        server = _Server(_uvicorn_config(build_app(parts), bounds))
        async with scrape.serve(settings.scrape_path(index), registry):
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            await _accepting(server, serving)
            gc.collect()
            give_back()
            gc.freeze()  # what lives as long as the process is never looked through again
            print(f"gateway ready {index}", flush=True)  # noqa: T201 (what the supervisor waits for)
            await asyncio.wait({serving, asyncio.create_task(stop.wait())}, return_when=asyncio.FIRST_COMPLETED)
            await _drain(parts, settings.drain_seconds)
            server.should_exit = True
            await serving
        sweeping.cancel()
        reading.cancel()


async def _accepting(server: uvicorn.Server, serving: asyncio.Task[None]) -> None:
    while not server.started and not serving.done():
        await asyncio.sleep(0.005)


async def _drain(parts: Parts, drain_s: float) -> None:
    """New requests get 503, running ones the time to finish; the rest end with an error event."""
    admission = parts.pipeline.admission
    admission.closed = True
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(drain_s):
            await admission.idle.wait()
    parts.pipeline.dispatch.interrupt_all()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LAST_WORDS_S):
            await admission.idle.wait()


def _uvicorn_config(app, bounds: Bounds = DEFAULT_BOUNDS) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        loop="none",
        http=functools.partial(HttpProtocol, bounds=bounds),  # pyright: ignore[reportArgumentType]
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=bounds.idle_s,  # pyright: ignore[reportArgumentType]
        timeout_graceful_shutdown=5,
    )


def _allow_files(wanted: int) -> None:
    """Many systems allow a process 1,024 open files until it asks for more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard)
        )


def main() -> int:
    """Exit status 0 after a drain, 1 when a part can't start."""
    parent = os.getppid()
    keep_small()
    if sys.platform == "linux":
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # below nohup it is ignored, and ignoring is inherited
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGHUP)
    if os.getppid() != parent:
        return 1
    parser = argparse.ArgumentParser(prog="python -m gateway.main", description=__doc__)
    parser.add_argument("--listen-fd", type=int, required=True, help="inherited descriptor of the listening socket")
    parser.add_argument("--index", type=int, default=0, help="number among the gateways of this machine")
    options = parser.parse_args()
    settings = Settings.from_env()
    log_to_stderr(settings.log_level)
    _allow_files(settings.max_connections + OTHER_FILES)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            runner.run(serve(settings, socket.socket(fileno=options.listen_fd), options.index))
        except Exception as error:
            _log.exception("gateway %d ends: %s", options.index, error)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
