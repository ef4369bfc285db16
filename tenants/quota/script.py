"""A Lua script in the store, called often: no call waits for another one's answer.

The library connects; what then goes over that connection is ours: the commands of one turn of the loop in one write,
since each write wakes the store, and the answers in the same order. A call of the library's own takes a connection out
of a pool, two locks, a timer and a dozen coroutines: three times the processor time.
"""

import asyncio
import hashlib
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import hiredis
from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import RedisError

from tenants.errors import StoreUnavailable

Answer: TypeAlias = "asyncio.Future[Any]"
_Call: TypeAlias = tuple[str | int, ...]
_LOOKS = 5  # within a deadline


class Script:
    """``text`` in the store of ``redis``, whose end it does not outlive. All calls of a process share a connection; it
    is made at the first call, and at the next one after it broke."""

    def __init__(self, redis: Redis, text: str, deadline_s: float) -> None:
        self._pool = redis.connection_pool
        self._text = text
        self._name = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
        self._deadline_s = deadline_s
        self._line: _Line | None = None
        self._connecting = asyncio.Lock()

    def __call__(self, keys: Sequence[str], arguments: Sequence[str | int]) -> Answer:
        """What the script returns. It is called whether or not anybody awaits the answer, in the order of these calls
        as long as the connection holds. The answer raises StoreUnavailable after ``deadline_s``."""
        call = (len(keys), *keys, *arguments)
        if self._line is None or self._line.is_closed:
            return asyncio.ensure_future(self._ask_anew(call))
        return self._ask(self._line, call)

    async def _ask_anew(self, call: _Call) -> Any:
        try:
            async with asyncio.timeout(self._deadline_s):
                return await self._ask(await self._connected(), call)
        except (RedisError, OSError, TimeoutError) as error:
            raise _unavailable(error) from error

    def _ask(self, line: "_Line", call: _Call) -> Answer:
        return line.ask(("EVALSHA", self._name, *call), ("EVAL", self._text, *call))

    async def _connected(self) -> "_Line":
        async with self._connecting:
            line = self._line
            if line is not None and line.is_closed:
                self._line = None
                await line.connection.disconnect(nowait=True)
                await self._pool.release(line.connection)
            if self._line is None:
                self._line = _Line(await self._pool.get_connection(), self._deadline_s)
            return self._line


class _Question(NamedTuple):
    """``in_full`` is asked when the store does not know the script by its name."""

    asked_at: int
    in_full: _Call
    answer: Answer


class _Line(asyncio.Protocol):
    """The connection's bytes. Each question has its own time; when all that were asked have had theirs, the line ends.
    Time passes in looks at the connection: a process that got no processor for so long finds the answers there, and
    nothing is wrong."""

    def __init__(self, connection: AbstractConnection, deadline_s: float) -> None:
        self.connection = connection
        self._deadline_s = deadline_s
        self._loop = asyncio.get_running_loop()
        self._questions: deque[_Question] = deque()
        self._unsent: list[bytes] = []
        self._num_looks = 0
        self._watch: asyncio.TimerHandle | None = None
        self._replies = hiredis.Reader()
        writer: Any = connection._writer
        self._transport = writer.transport
        self._before = self._transport.get_protocol()  # the library's, which closes by it
        self._transport.set_protocol(self)

    @property
    def is_closed(self) -> bool:
        return self._transport.is_closing()

    def ask(self, command: _Call, in_full: _Call) -> Answer:
        answer: Answer = self._loop.create_future()
        self._put(command, _Question(self._num_looks, in_full, answer))
        return answer

    def data_received(self, data: bytes) -> None:
        self._replies.feed(data)
        try:
            while (reply := self._replies.gets()) is not False:
                if not isinstance(reply, hiredis.PushNotification):
                    self._take(reply)
        except hiredis.ProtocolError as error:
            self._end(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._before.connection_lost(exc)
        self._end(exc or ConnectionError("closed"))

    def _put(self, command: _Call, question: _Question) -> None:
        if not self._unsent:
            self._loop.call_soon(self._send)
        self._unsent.append(hiredis.pack_command(command))  # pyright: ignore[reportArgumentType]
        self._questions.append(question)
        if self._watch is None:
            self._look_later()

    def _send(self) -> None:
        """What was asked in this turn of the loop."""
        commands, self._unsent = self._unsent, []
        self._transport.write(b"".join(commands))

    def _take(self, reply: Any) -> None:
        question = self._questions.popleft()
        if question.answer.done():  # who asked waits no more
            return
        if not isinstance(reply, Exception):
            question.answer.set_result(reply)
        elif question.in_full and str(reply).startswith("NOSCRIPT"):
            self._put(question.in_full, question._replace(in_full=()))
        else:
            question.answer.set_exception(_unavailable(reply))

    def _look_later(self) -> None:
        self._watch = self._loop.call_later(self._deadline_s / _LOOKS, self._look)

    def _look(self) -> None:
        """One timer for all that is asked."""
        self._watch = None
        self._num_looks += 1
        for question in self._questions:
            if self._num_looks - question.asked_at <= _LOOKS:
                self._look_later()
                return
            if not question.answer.done():
                question.answer.set_exception(_unavailable(TimeoutError()))
        if self._questions:
            self._end(TimeoutError())

    def _end(self, error: Exception) -> None:
        if self._watch is not None:
            self._watch.cancel()
        self._transport.abort()
        while self._questions:
            self._take(error)


def _unavailable(error: Exception) -> StoreUnavailable:
    return StoreUnavailable(f"the store failed: {type(error).__name__}")
