"""Requests with a grammar wait here until it is compiled, beside the steps; all that is said of them waits too."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from engine import wire
from engine.errors import InvalidGrammar
from engine.grammar import Compiler, Grammar
from engine.serve.step_thread import StepThread

logger = logging.getLogger("engine.grammar")

DEADLINE_S = 5.0  # the gateway has compiled it before, within one second
MAX_WAITING = 256
NUM_THREADS = 2
REASONS = ("slow_mask", "too_complex")


class GrammarGate:
    """In front of the step thread. A request reaches the engine once, with its grammar, and then what was posted about
    it meanwhile, in order; or ``reject`` is called with (request id, code, message). Used on the loop only."""

    def __init__(self, steps: StepThread, compiler: Compiler, reject: Callable[[str, str, str], None]) -> None:
        self.compiler = compiler
        self._steps = steps
        self._reject = reject
        self._held: dict[str, list[tuple[Callable[..., object], tuple[object, ...]]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammar")

    @property
    def is_full(self) -> bool:
        return len(self._held) >= MAX_WAITING

    def submit(self, submit: wire.Submit) -> None:
        if not submit.sampling.grammar:
            self._steps.submit(submit)
            return
        self._held[submit.request_id] = []
        task = asyncio.create_task(self._compile(submit))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def post(self, request_id: str, call: Callable[..., object], *args: object) -> None:
        """``StepThread.post`` about a request, in its turn."""
        held = self._held.get(request_id)
        if held is None:
            self._steps.post(call, *args)
        else:
            held.append((call, args))

    async def close(self) -> None:
        """Waits for nobody: what is compiled now is of no use any more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def families(self) -> list[wire.Family]:
        cut = [("_total", {"reason": reason}, float(self.compiler.num_cut[reason])) for reason in REASONS]
        masks, seconds = float(self.compiler.num_masks), self.compiler.mask_ns / 1e9
        return [
            wire.Family("tenora_grammar_cut", "counter", "Choices that their grammar's cost has ended.", cut),
            wire.Family("tenora_grammar_masks", "counter", "Masks computed.", [("_total", {}, masks)]),
            wire.Family("tenora_grammar_mask_seconds", "counter", "Time they took.", [("_total", {}, seconds)]),
        ]

    async def _compile(self, submit: wire.Submit) -> None:
        try:
            async with asyncio.timeout(DEADLINE_S):
                grammar = await self._in_thread(submit.sampling.grammar)
        except InvalidGrammar as error:
            self._refuse(submit, error.code, str(error))
        except TimeoutError:
            self._refuse(submit, InvalidGrammar.code, f"its grammar is not compiled within {DEADLINE_S:g} s")
        except Exception:  # whatever it is: the request is not to wait for ever
            logger.exception("a grammar can't be compiled")
            self._refuse(submit, InvalidGrammar.code, "its grammar can't be compiled")
        else:
            self._steps.submit(submit, grammar)
            for call, args in self._held.pop(submit.request_id):
                self._steps.post(call, *args)

    async def _in_thread(self, text: str) -> Grammar:
        return await asyncio.get_running_loop().run_in_executor(self._threads, self.compiler.compile, text)

    def _refuse(self, submit: wire.Submit, code: str, message: str) -> None:
        del self._held[submit.request_id]
        self._reject(submit.request_id, code, message)
