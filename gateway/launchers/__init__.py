"""Who starts engines: a Launcher places one engine process and keeps it alive; tokens never pass through it.

Launchers import nothing of the engine: `python -m engine` and its flags are the contract.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

OnExit = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One engine to be: an id, what it serves, the folder that it keeps, and the flags of its sizes."""

    engine_id: str
    model: str
    source: str
    directory: Path
    run_dir: Path  # of sockets, for engines on this host
    flags: tuple[str, ...] = ()


class EngineHandle(Protocol):
    """An engine that a launcher keeps alive; ``incarnation`` rises with each start."""

    @property
    def address(self) -> str:
        """Where gateways connect; known from the start, and the same for every incarnation."""
        ...

    @property
    def incarnation(self) -> int: ...

    @property
    def pid(self) -> int | None:
        """None where it runs on another host, or not at all."""
        ...

    @property
    def is_ready(self) -> bool: ...

    async def ready(self) -> None:
        """Waits for readiness; raises children.ChildFailed when it ended before it ever was ready."""
        ...

    async def stop(self, timeout_s: float) -> None: ...


class Launcher(Protocol):
    async def start(self, spec: EngineSpec, on_exit: OnExit) -> EngineHandle:
        """Starts an engine in the background; ``on_exit(incarnation)`` is called when one has ended."""
        ...


def make_launcher(name: str, environment: dict[str, str]) -> Launcher:
    """The launcher of that name (--launcher)."""
    from gateway.launchers.local import LocalLauncher

    return {"local": LocalLauncher}[name](environment)
