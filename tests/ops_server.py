"""A real ops API on a free port, over SQLite in a folder and a Valkey: everything of it but the children."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import click

from gateway.serve import bootstrap, supervisor
from gateway.serve.fleet import Fleet
from gateway.settings import Settings, serve_options
from tests.stores import valkey_server


@dataclass
class OpsServer:
    """``home`` has the credentials.json that the CLI reads."""

    url: str
    home: Path
    settings: Settings
    context: bootstrap.OpsContext
    fleet: Fleet
    credentials: bootstrap.Credentials


def settings_of(home: Path, redis_url: str, *arguments: str) -> Settings:
    every = ["--home", str(home), "--redis-url", redis_url, *arguments]
    return Settings.from_options(click.Command("serve", params=list(serve_options())).make_context("", every).params)


@contextlib.asynccontextmanager
async def ops_server(settings: Settings) -> AsyncIterator[OpsServer]:
    """Serves in the running loop, on a migrated and prepared home."""
    supervisor.prepare_folders(settings)
    await asyncio.to_thread(bootstrap.migrate, settings.database_url)
    start = await bootstrap.prepare(settings)
    fleet = Fleet(settings)
    server = supervisor.serve_ops(start.context, fleet)
    listening = supervisor.listen("127.0.0.1", 0, "--ops-port")
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        yield OpsServer(url, settings.home, settings, start.context, fleet, start.credentials)
    finally:
        server.should_exit = True
        await serving
        await start.context.close()
        with contextlib.suppress(OSError):
            listening.shutdown(socket.SHUT_RDWR)
        listening.close()


@contextlib.contextmanager
def ops_server_in_thread(home: Path, *arguments: str) -> Iterator[OpsServer]:
    """The same with its own Valkey, in a thread: for callers that block, as the CLI does."""
    with valkey_server() as store:
        up, done = threading.Event(), None
        found: list[OpsServer] = []
        loop = asyncio.new_event_loop()

        async def main() -> None:
            nonlocal done
            done = asyncio.Event()
            async with ops_server(settings_of(home, store.url, *arguments)) as server:
                found.append(server)
                up.set()
                await done.wait()

        def work() -> None:
            try:
                loop.run_until_complete(main())
            finally:
                up.set()
                loop.run_until_complete(loop.shutdown_default_executor())
                loop.close()

        thread = threading.Thread(target=work)
        thread.start()
        try:
            assert up.wait(60)
            assert found, "the ops server did not start"
            yield found[0]
        finally:
            if done is not None and found:
                loop.call_soon_threadsafe(done.set)
            thread.join(30)
