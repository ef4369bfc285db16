"""Child processes: started, awaited, restarted, ended. None outlives us, none is ended but by its own handle."""

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from gateway.settings import CannotStart

log = logging.getLogger(__name__)

FIRST_DELAY_S = 0.05
MAX_DELAY_S = 5.0
MAX_LINE_BYTES = 1 << 16
NOT_STARTED = 127
STABLE_S = 10.0  # a child that lived so long starts again at once
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


class ChildFailed(CannotStart):
    """A child ended before it was ever ready: no restart would help."""


@dataclass(frozen=True, slots=True)
class Command:
    """What to run. It is ready when a line of its stdout holds ``ready_text``; other lines go to our stderr,
    unless ``quiet``: then only the last few are shown, and only when it ends unasked."""

    name: str
    argv: Sequence[str]
    ready_text: str
    environment: Mapping[str, str]
    pass_fds: tuple[int, ...] = ()
    quiet: bool = False


@dataclass(slots=True)
class _State:
    process: asyncio.subprocess.Process | None = None
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    was_ready: bool = False
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=8))


class Child:
    """One process kept alive: restarted with growing delays when it ends, until `stop`.

    ``incarnation`` rises with each start; ``on_exit(incarnation)`` is called when one has ended.
    """

    def __init__(self, command: Command, on_exit: Callable[[int], None] = lambda incarnation: None) -> None:
        self.command = command
        self.incarnation = 0
        self._on_exit = on_exit
        self._state = _State()
        self._ready = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return self.command.name

    @property
    def pid(self) -> int | None:
        """None while no process runs."""
        process = self._state.process
        return process.pid if process and process.returncode is None else None

    @property
    def is_ready(self) -> bool:
        return self._ready.is_set()

    def start(self) -> None:
        """Starts it in the background."""
        self._watch = asyncio.create_task(self._keep_alive(), name=f"child {self.name}")

    async def ready(self) -> None:
        """Waits until it is ready. Raises ChildFailed when it ended before it ever was."""
        assert self._watch is not None, "start() comes first"
        waiting = asyncio.ensure_future(self._ready.wait())
        try:
            await asyncio.wait({waiting, self._watch}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        if self._watch.done():
            self._watch.result()
            raise ChildFailed(f"{self.name} was stopped")

    async def stop(self, timeout_s: float) -> None:
        """SIGTERM, then SIGKILL to what is left after ``timeout_s``; back when it has ended."""
        self._state.stopping.set()
        if self._watch is None:
            return
        self._signal(signal.SIGTERM)
        done, _ = await asyncio.wait({self._watch}, timeout=timeout_s)
        if not done:
            log.warning("%s did not end within %g s: killed", self.name, timeout_s)
            self._signal(signal.SIGKILL)
            await asyncio.wait({self._watch}, timeout=STABLE_S)
        self._watch.cancel()
        with contextlib.suppress(asyncio.CancelledError, ChildFailed):
            await self._watch

    def _signal(self, number: int) -> None:
        if self.pid is not None and self._state.process:
            with contextlib.suppress(ProcessLookupError):
                self._state.process.send_signal(number)

    async def _keep_alive(self) -> None:
        failures = 0
        while not self._state.stopping.is_set():
            started = time.monotonic()
            code = await self._run_once()
            if self._state.stopping.is_set():
                log.debug("%s ended with %s", self.name, _reason(code))
                return
            self._report(code)
            if not self._state.was_ready:
                raise ChildFailed(
                    f"{self.name} ended with {_reason(code)} before it was ready; its last words are above"
                )
            failures = 0 if time.monotonic() - started > STABLE_S else failures + 1
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._state.stopping.wait(), min(FIRST_DELAY_S * 2**failures, MAX_DELAY_S))

    async def _run_once(self) -> int:
        """One life of it; 127 when it could not even be started, as a shell has it."""
        state = self._state
        self.incarnation += 1
        try:
            state.process = process = await self._spawn()
        except OSError as error:  # no memory, no process id, no such file: perhaps later
            log.error("%s can't be started: %s", self.name, error)
            return NOT_STARTED
        if state.stopping.is_set():
            self._signal(signal.SIGTERM)
        try:
            await self._read(process)
            return await process.wait()
        except asyncio.CancelledError:
            self._signal(signal.SIGKILL)
            await process.wait()
            raise
        finally:
            self._ready.clear()
            self._on_exit(self.incarnation)

    async def _spawn(self) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *self.command.argv,
            env=dict(self.command.environment),
            pass_fds=self.command.pass_fds,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT if self.command.quiet else None,
            process_group=0,  # a terminal's Ctrl-C is for the supervisor alone: it drains in order
            preexec_fn=_die_with(os.getpid()),
        )

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for raw in _lines(process.stdout):
            line = raw.decode(errors="replace").rstrip()
            if self.command.ready_text in line:
                self._state.was_ready = True
                self._state.last_lines.clear()
                self._ready.set()
            elif self.command.quiet:
                self._state.last_lines.append(line)
            elif line:
                sys.stderr.write(f"{self.name}: {line}\n")

    def _report(self, code: int) -> None:
        for line in self._state.last_lines:
            sys.stderr.write(f"{self.name}: {line}\n")
        self._state.last_lines.clear()
        log.error("%s ended unasked with %s", self.name, _reason(code))


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Lines, an overlong one in pieces: what a child prints must never end the watch over it."""
    rest = b""
    while data := await stream.read(MAX_LINE_BYTES):
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line
        if len(rest) > MAX_LINE_BYTES:
            yield rest
            rest = b""
    if rest:
        yield rest


def _reason(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _die_with(parent: int) -> Callable[[], None]:
    """For the child between fork and exec: SIGTERM when the parent dies, also when it is dead by now."""

    def prepare() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)

    return prepare
