"""Whether a grammar can be compiled, found out in a process of its own, with a deadline: what reads it may be killed.

The child is ``python -m engine.grammar.worker``, one for each model, kept warm. A verdict is remembered for its tenant
alone. No more than one grammar of a tenant is looked at at a time, so that many hard ones make others wait for one.
"""

import asyncio
import contextlib
import hashlib
import sys
from collections import OrderedDict
from collections.abc import AsyncIterator

import msgspec

from engine.wire import Frames, frame
from gateway.errors import invalid
from gateway.models import TextSide
from gateway.text.grammar import Form

DEADLINE_S = 1.0
START_S = 30.0  # for a process and a vocabulary of 250,000 tokens on a busy machine
MAX_TENANTS = 1024
MAX_VERDICTS = 64  # of a tenant
_encode = msgspec.msgpack.Encoder().encode


class GrammarCheck:
    """``check`` before a request is admitted; ``close`` at the end."""

    def __init__(self, deadline_s: float = DEADLINE_S) -> None:
        self._deadline_s = deadline_s
        self._workers: dict[str, Worker] = {}
        self._verdicts: OrderedDict[str, OrderedDict[bytes, str]] = OrderedDict()
        self._turns: dict[str, tuple[asyncio.Lock, int]] = {}

    async def check(self, tenant_id: str, text: TextSide, form: Form) -> None:
        """Raises ApiError 400 that names the field and says why."""
        if not form.grammar:
            return
        key = hashlib.sha256(f"{text.card.revision}\n{form.grammar}".encode()).digest()
        reason = self._known(tenant_id, key)
        if reason is None:
            async with self._turn(tenant_id):
                reason = await self._find_out(tenant_id, key, text, form.grammar)
        if reason:
            raise invalid(f"Invalid schema for '{form.param}': {reason}", form.param)

    async def close(self) -> None:
        for worker in self._workers.values():
            await worker.close()

    async def _find_out(self, tenant_id: str, key: bytes, text: TextSide, grammar: str) -> str:
        reason = self._known(tenant_id, key)  # while we waited for our turn
        if reason is not None:
            return reason
        worker = self._workers.setdefault(text.card.revision, Worker(text))
        try:
            reason = await worker.ask(grammar, self._deadline_s)
        except TimeoutError:  # not remembered: on a quieter day it may be quick enough
            return f"it is not compiled within {self._deadline_s:g} s"
        self._remember(tenant_id, key, reason)
        return reason

    def _known(self, tenant_id: str, key: bytes) -> str | None:
        own = self._verdicts.get(tenant_id)
        if own is None or key not in own:
            return None
        self._verdicts.move_to_end(tenant_id)
        own.move_to_end(key)
        return own[key]

    def _remember(self, tenant_id: str, key: bytes, reason: str) -> None:
        own = self._verdicts.setdefault(tenant_id, OrderedDict())
        own[key] = reason
        self._verdicts.move_to_end(tenant_id)
        if len(own) > MAX_VERDICTS:
            own.popitem(last=False)
        if len(self._verdicts) > MAX_TENANTS:
            self._verdicts.popitem(last=False)

    @contextlib.asynccontextmanager
    async def _turn(self, tenant_id: str) -> AsyncIterator[None]:
        """One at a time of a tenant; nothing is kept of tenants that have none."""
        lock, waiting = self._turns.get(tenant_id, (asyncio.Lock(), 0))
        self._turns[tenant_id] = lock, waiting + 1
        try:
            async with lock:
                yield
        finally:
            lock, waiting = self._turns.pop(tenant_id)
            if waiting > 1:
                self._turns[tenant_id] = lock, waiting - 1


class Worker:
    """The process for one model's vocabulary, started when it is first asked, and anew after it had to be ended."""

    def __init__(self, text: TextSide) -> None:
        self._text = text
        self._turn = asyncio.Lock()
        self._starting: asyncio.Task[tuple[asyncio.subprocess.Process, str]] | None = None

    async def ask(self, grammar: str, deadline_s: float) -> str:
        """The reason against a grammar, "" = none. Raises TimeoutError."""
        async with self._turn:
            process, reason = await self._started()
            if reason:
                return reason
            try:
                async with asyncio.timeout(deadline_s):
                    return await _ask(process, grammar)
            except EOFError:
                self._start_anew()
                return "compiling it takes too much memory"
            except BaseException:
                _kill(process)
                self._start_anew()
                raise

    async def close(self) -> None:
        """Ends the process."""
        if self._starting is not None:
            with contextlib.suppress(Exception):
                process, _ = await self._starting
                _kill(process)
                await process.wait()

    async def _started(self) -> tuple[asyncio.subprocess.Process, str]:
        """The process, and why it takes no grammar at all ("" = it does)."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        try:
            return await asyncio.shield(self._starting)
        except Exception:
            self._starting = None
            raise

    def _start_anew(self) -> None:
        """So that the next one finds it warm."""
        ended, self._starting = self._starting, None

        async def start() -> tuple[asyncio.subprocess.Process, str]:
            assert ended is not None
            await (await ended)[0].wait()
            return await self._start()

        self._starting = asyncio.create_task(start())

    async def _start(self) -> tuple[asyncio.subprocess.Process, str]:
        card = self._text.card
        tokenizer_json = await asyncio.to_thread(self._text.tokenizer.to_json)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "engine.grammar.worker",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            async with asyncio.timeout(START_S):
                return process, await _ask(process, (tokenizer_json, card.vocab_size, card.eos_token_ids))
        except BaseException:
            _kill(process)
            raise


async def _ask(process: asyncio.subprocess.Process, question: object) -> str:
    """A frame there, a frame back. Raises EOFError when it ended instead."""
    assert process.stdin is not None
    assert process.stdout is not None
    frames = Frames()
    with contextlib.suppress(ConnectionError):  # the end of its output says the same
        process.stdin.write(frame(_encode(question)))
        await process.stdin.drain()
    while data := await process.stdout.read(1 << 16):
        for body in frames.feed(data):
            return msgspec.msgpack.decode(body, type=str)
    raise EOFError


def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
