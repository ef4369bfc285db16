"""`serve`: starts the store, the engines and the gateways, watches them, owns the ops port, and drains.

It carries no tenant request: killing any child is the same fault here as in production.
"""

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import signal
import socket
import stat
import sys
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import uvicorn

from engine.client import EngineClient
from gateway.launchers import EngineSpec, Launcher, make_launcher
from gateway.serve import fetch, valkey
from gateway.serve.children import Child, ChildFailed, Command
from gateway.serve.fleet import Fleet, Replica
from gateway.settings import CannotStart, EngineAddress, Settings, host_in_url, parse_model

if TYPE_CHECKING:  # SQL and HTTP take seconds to import: the engines start first
    from gateway.serve.bootstrap import Start
    from gateway.serve.ops_app import OpsContext

log = logging.getLogger(__name__)

ENGINE_STOP_S = 35.0  # an engine bounds its own drain at 30 s
GATEWAY_EXTRA_S = 12.0  # for last words and open connections
STORE_STOP_S = 5.0
OPS_STOP_S = 3.0
BACKLOG = 2048


@dataclass(frozen=True, slots=True)
class Model:
    """A model to serve: its name and what an engine takes as its source."""

    name: str
    source: str


def serve(settings: Settings, launcher: Launcher | None = None) -> None:
    """Runs until SIGTERM or SIGINT and then drains. Raises CannotStart. ``launcher`` None: the one of --launcher."""
    os.umask(0o077)  # nothing that we or our children keep is for others
    prepare_folders(settings)
    with contextlib.ExitStack() as stack:
        stack.enter_context(only_one(settings.home))
        models = find_models(settings)
        public = stack.enter_context(listen(settings.host, settings.port, "--port"))
        ops = stack.enter_context(listen(settings.serve.ops_host, settings.serve.ops_port, "--ops-port"))
        settings = _with_ports(settings, public, ops)
        launcher = launcher or make_launcher(settings.serve.launcher, settings.child_environment())
        asyncio.run(Supervisor(settings, models, public, ops, launcher).run())


def prepare_folders(settings: Settings) -> None:
    """HOME and its run folder, which is ours alone. Raises CannotStart."""
    settings.home.mkdir(parents=True, exist_ok=True, mode=0o700)
    settings.run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = settings.run_dir.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise CannotStart(f"{settings.run_dir} is not a folder of ours: remove it")
    settings.run_dir.chmod(0o700)


@contextlib.contextmanager
def only_one(home: Path) -> Iterator[None]:
    """Holds HOME's lock: a second serve would take the first one's sockets away. Raises CannotStart."""
    with (home / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CannotStart(f"{home} is in use by another `tenora serve`: stop it, or give another --home") from None
        yield


def find_models(settings: Settings) -> list[Model]:
    """Every --model as files that are there, fetched if need be. Raises FetchError."""
    options = settings.serve
    models = []
    for text in options.models:
        name, source = parse_model(text)
        found = fetch.engine_source(source, options.model_cache, may_fetch=options.fetch, say=say)
        models.append(Model(name, found))
    return models


def listen(host: str, port: int, option: str) -> socket.socket:
    """A bound, listening TCP socket. Raises CannotStart."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with contextlib.ExitStack() as on_failure:
            bound = on_failure.enter_context(socket.socket(family, socket.SOCK_STREAM))
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            bound.listen(BACKLOG)
            on_failure.pop_all()
    except OSError as error:
        is_host = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
        wrong = option.replace("port", "host") if is_host else option
        raise CannotStart(f"cannot listen on {host}:{port} ({error.strerror}): choose another {wrong}") from error
    bound.setblocking(False)
    return bound


def say(line: str) -> None:
    """A line of progress."""
    sys.stderr.write(f"serve: {line}\n")
    sys.stderr.flush()


def _with_ports(settings: Settings, public: socket.socket, ops: socket.socket) -> Settings:
    options = replace(settings.serve, ops_port=ops.getsockname()[1])
    return replace(settings, port=public.getsockname()[1], serve=options)


class _OpsServer(uvicorn.Server):
    """Leaves the signals to the supervisor."""

    @contextlib.contextmanager
    def capture_signals(self):
        yield


class Supervisor:
    """One installation on this machine, from first start to drained."""

    def __init__(
        self,
        settings: Settings,
        models: list[Model],
        public: socket.socket,
        ops: socket.socket,
        launcher: Launcher,
    ) -> None:
        self._settings = settings
        self._launcher = launcher
        self._models = models
        self._public = public
        self._ops_socket = ops
        self._fleet = Fleet(settings)
        self._store: Child | None = None
        self._context: OpsContext | None = None
        self._ops: _OpsServer | None = None
        self._ops_task: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[Any]] = []

    async def run(self) -> None:
        """Starts everything, serves until told to stop, drains. Raises ChildFailed, BootstrapError."""
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        try:
            if await _unless(stop, self._start()):
                await stop.wait()
                say("draining")
        finally:
            await self._drain()

    # ── starting ─────────────────────────────────────────────────────────────────────────────────

    async def _start(self) -> None:
        say(f"loading {', '.join(model.name for model in self._models)}")
        await self._start_engines()
        await self._start_store()
        from gateway.serve import bootstrap

        await asyncio.to_thread(bootstrap.migrate, self._settings.database_url)
        start = await bootstrap.prepare(self._settings)
        self._context = start.context
        await self._start_ops(start.context)
        self._start_gateways()
        await _together(*(replica.ready() for replica in self._fleet.replicas), *(g.ready() for g in self._gateways))
        self._tasks.append(asyncio.create_task(self._fleet.keep_pulling()))
        await bootstrap.upload_demo_adapters(self._settings, start)
        self._announce(start)

    @property
    def _gateways(self) -> list[Child]:
        return self._fleet.gateways

    async def _start_store(self) -> None:
        if self._settings.redis_url:
            return
        socket_path = self._settings.run_dir / "valkey.sock"
        environment = self._settings.child_environment()
        self._store = Child(valkey.store_command(valkey.find_binary(), socket_path, environment))
        self._store.start()
        await self._store.ready()
        self._settings = replace(self._settings, redis_url=f"unix://{quote(str(socket_path))}")

    async def _start_engines(self) -> None:
        for spec in engine_specs(self._settings, self._models):
            handle = await self._launcher.start(spec, self._retire(spec.engine_id))
            client = EngineClient(handle.address, "supervisor", role="observer")
            await client.start()
            self._fleet.replicas.append(Replica(spec, handle, client))
        addresses = tuple(EngineAddress(r.spec.model, r.handle.address) for r in self._fleet.replicas)
        self._settings = replace(self._settings, engines=addresses)

    def _start_gateways(self) -> None:
        descriptor = self._public.fileno()
        environment = self._settings.child_environment()
        for index in range(self._settings.serve.gateways):
            command = Command(
                name=f"gateway {index}",
                argv=[sys.executable, "-m", "gateway.main", "--listen-fd", str(descriptor), "--index", str(index)],
                ready_text=f"gateway ready {index}",
                environment=environment,
                pass_fds=(descriptor,),
            )
            gateway = Child(command, self._retire(command.name))
            gateway.start()
            self._gateways.append(gateway)

    def _retire(self, source: str) -> Callable[[int], None]:
        return lambda incarnation: self._fleet.registry.retire(source, incarnation)

    async def _start_ops(self, context: "OpsContext") -> None:
        self._ops = serve_ops(context, self._fleet)
        self._ops_task = asyncio.create_task(self._ops.serve(sockets=[self._ops_socket]))
        self._tasks.append(self._ops_task)

    def _announce(self, start: "Start") -> None:
        for line in banner(self._settings, start, self._models):
            sys.stdout.write(line + "\n")
        sys.stdout.write(f"ready {self._settings.url}\n")
        sys.stdout.flush()

    # ── ending ───────────────────────────────────────────────────────────────────────────────────

    async def _drain(self) -> None:
        """Gateways first, so that running streams finish; then engines, so that journals are delivered or kept."""
        self._fleet.draining = True
        grace_s = self._settings.drain_seconds + GATEWAY_EXTRA_S
        await asyncio.gather(*(gateway.stop(grace_s) for gateway in self._gateways))
        await asyncio.gather(*(replica.client.close() for replica in self._fleet.replicas))
        await asyncio.gather(*(replica.handle.stop(ENGINE_STOP_S) for replica in self._fleet.replicas))
        await self._stop_ops()
        await _ended(self._tasks)
        if self._context:
            await self._context.close()
        if self._store:
            await self._store.stop(STORE_STOP_S)

    async def _stop_ops(self) -> None:
        if self._ops and self._ops_task:
            self._ops.should_exit = True
            await asyncio.wait({self._ops_task}, timeout=OPS_STOP_S)


def engine_specs(settings: Settings, models: list[Model]) -> list[EngineSpec]:
    """Ids e0-<model>, e1-<model>, …; engines that share this machine's cores share them evenly."""
    options = settings.serve
    total = len(models) * options.engines_per_model
    flags = ["--device", options.device, "--dtype", options.dtype, "--log-level", settings.log_level]
    sizes = settings.sizes
    if total > 1 and sizes.threads is None and options.device != "cuda":
        sizes = replace(sizes, threads=max(1, (os.cpu_count() or 1) // total))
    specs = []
    for model in [model for model in models for _ in range(options.engines_per_model)]:
        engine_id = f"e{len(specs)}-{model.name.replace('/', '-')}"
        folder = settings.home / "engines" / engine_id
        every = (*flags, *sizes.to_args())
        specs.append(EngineSpec(engine_id, model.name, model.source, folder, settings.run_dir, every))
    return specs


def serve_ops(context: "OpsContext", fleet: Fleet) -> _OpsServer:
    """The ops port's server, not yet serving."""
    from gateway.methods import with_our_methods
    from gateway.protocol import HttpProtocol
    from gateway.serve.ops_app import build_ops_app

    app = with_our_methods(build_ops_app(context, fleet))
    config = uvicorn.Config(
        app, http=HttpProtocol, log_config=None, log_level="warning", access_log=False, lifespan="on"
    )
    config.timeout_graceful_shutdown = 1
    return _OpsServer(config)


def banner(settings: Settings, start: "Start", models: list[Model]) -> list[str]:
    """What a newcomer reads: what is served, and a command that works when pasted."""
    ops = f"http://{host_in_url(settings.serve.ops_host)}:{settings.serve.ops_port}"
    lines = [
        "",
        f"Tenora serves {', '.join(model.name for model in models)} at {settings.url}",
        f"operations at {ops}, credentials in {settings.credentials}",
    ]
    tenants = start.credentials.tenants if settings.wants_demo else {}
    for name, tenant in tenants.items():
        lines.append(f"demo tenant {name}: key {tenant.api_key}" + (", model " if name in start.demo_models else ""))
        lines[-1] += start.demo_models.get(name, "")
    if tenants:
        key = next(iter(tenants.values())).api_key
        lines += ["", "Try it:", *_curl(settings.url, key, models[0].name), ""]
    else:
        lines.append("make a tenant: tenora tenant create NAME; and its key: tenora key create TENANT_ID")
    return lines


def _curl(url: str, key: str, model: str) -> list[str]:
    body = '{"model": "%s", "messages": [{"role": "user", "content": "What is the capital of Japan?"}], '
    body = body % model + '"temperature": 0, "max_tokens": 32}'
    headers = f'-H "Authorization: Bearer {key}" -H "Content-Type: application/json"'
    return [f"curl -s {url}/chat/completions {headers} -d '{body}'"]


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Does the work, or cancels it when told to stop: False. Its errors are raised."""
    doing, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    await asyncio.wait({doing, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not doing.done():
        await _ended([doing])
        return False
    await doing
    return True


async def _together(*work: Coroutine[Any, Any, Any]) -> None:
    """All of it at once; the first failure is raised at once."""
    try:
        async with asyncio.TaskGroup() as group:
            for each in work:
                group.create_task(each)
    except* ChildFailed as failures:
        raise failures.exceptions[0] from None


async def _ended(tasks: list[asyncio.Task[Any]]) -> None:
    """Cancels tasks and waits for them."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
