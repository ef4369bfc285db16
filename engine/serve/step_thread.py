"""The thread that owns the Engine: commands in, results out, nothing shared.

Whoever wants something of the engine posts it; it is done between two steps, in order. Results go to
``deliver`` on the event loop, one call a step.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from engine import wire
from engine.engine import Engine, StepResult
from engine.errors import EngineError
from engine.intake import Grammar

logger = logging.getLogger("engine.step")

Answer = TypeVar("Answer")

# A waiting request may need no command to go on (a slot that was pinned is free now): look again, at leisure.
IDLE_WITH_WORK_S = 0.02


@dataclass(slots=True)
class StepOutput:
    """What a turn of the step thread has for the gateways."""

    rejected: list[wire.Rejected] = field(default_factory=list)
    result: StepResult | None = None


class StepThread:
    """Runs ``engine.step`` while there is work. ``failed`` is called on the loop when the engine broke: the
    process must end then, since nobody knows the state of its requests."""

    def __init__(
        self,
        engine: Engine,
        deliver: Callable[[StepOutput], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._engine = engine
        self._deliver = deliver
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        self._inbox: deque[tuple[Callable[..., object], tuple[object, ...]]] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._idling = False
        self._rejected: list[wire.Rejected] = []
        self._thread = threading.Thread(target=self._run, name="step", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends after the step that is running. Blocks for that step."""
        self._stopping = True
        self._wake.set()
        self._thread.join()

    def post(self, call: Callable[..., object], *args: object) -> None:
        """Has ``call(*args)`` done on the step thread before the next step. From any thread."""
        self._inbox.append((call, args))
        self._wake.set()

    def submit(self, submit: wire.Submit, grammar: Grammar | None = None) -> None:
        """Adds a request; if the engine won't have it, a Rejected comes with the next output."""
        self.post(self._add, submit, grammar)

    def stats(self, reply: Callable[[list[wire.Family]], None]) -> None:
        """Calls ``reply`` on the loop with the engine's families. From the loop only.

        A step may take longer than a scrape waits, so that they are read beside it; an idle thread is asked,
        for its idle time counts until now.
        """
        if self._idling:
            self.post(lambda: self._on_loop(reply, self._engine.stats.families()))
        else:
            reply(self._engine.stats.families())

    def ask(self, question: Callable[[], Answer], reply: Callable[[Answer], None]) -> None:
        """Has ``question()`` answered between two steps, and calls ``reply`` with the answer on the loop."""
        self.post(lambda: self._on_loop(reply, question()))

    def _add(self, submit: wire.Submit, grammar: Grammar | None) -> None:
        try:
            self._engine.add(submit, grammar)
        except EngineError as error:
            self._rejected.append(wire.Rejected(submit.request_id, error.code, str(error)))

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._take_commands()
                if not self._step():
                    self._idle()
        except BaseException as error:
            logger.exception("the engine broke")
            self._on_loop(self._failed, error)

    def _take_commands(self) -> None:
        self._wake.clear()
        while self._inbox:
            call, args = self._inbox.popleft()
            call(*args)

    def _step(self) -> bool:
        """One step, if there is work; False when it computed nothing."""
        result = self._engine.step() if self._engine.has_work else None
        if self._rejected or (result and (result.deltas or result.scores or result.finished or result.wanted)):
            rejected, self._rejected = self._rejected, []
            self._on_loop(self._deliver, StepOutput(rejected, result))
        return result is not None and (result.stats.num_tokens > 0 or result.in_flight)

    def _idle(self) -> None:
        if self._stopping:  # its wake may have been taken for a command's
            return
        started_ns = time.monotonic_ns()
        self._idling = True
        self._wake.wait(IDLE_WITH_WORK_S if self._engine.has_work else None)
        self._idling = False
        self._engine.stats.idle(time.monotonic_ns() - started_ns)

    def _on_loop(self, call: Callable[..., object], *args: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, *args)
