"""A Lua script in the store, called often: no call waits for another one's answer.

The library connects; what then goes over that connection is ours: the commands of one turn of the loop in one write,
since each write wakes the store, and the answers in the same order. A call of the library's own takes a connection out
of a pool, two locks, a timer and a dozen coroutines: three times the processor time.
"""

import asyncio
import hashlib
from collections import deque
from collections.abc import Sequence
from typing import Any

import hiredis
from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import RedisError

from tenants.errors import StoreUnavailable

_FAILURES = (RedisError, hiredis.HiredisError, OSError, TimeoutError)


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

    async def __call__(self, keys: Sequence[str], arguments: Sequence[str | int]) -> Any:
        """What the script returns. Raises StoreUnavailable when that takes longer than ``deadline_s``."""
        try:
            line = self._line
            if line is None or line.is_closed:
                line = await self._connected()
            try:
                return await line.ask("EVALSHA", self._name, len(keys), *keys, *arguments)
            except hiredis.ReplyError as error:
                if not str(error).startswith("NOSCRIPT"):  # the store is new, or was emptied
                    raise
                return await line.ask("EVAL", self._text, len(keys), *keys, *arguments)
        except _FAILURES as error:
            raise StoreUnavailable(f"the store failed: {type(error).__name__}") from error

    async def _connected(self) -> "_Line":
        async with asyncio.timeout(self._deadline_s), self._connecting:
            line = self._line
            if line is not None and line.is_closed:
                self._line = None
                await line.connection.disconnect(nowait=True)
                await self._pool.release(line.connection)
            if self._line is None:
                self._line = _Line(await self._pool.get_connection(), self._deadline_s)
            return self._line


class _Line(asyncio.Protocol):
    """The connection's bytes. It ends when the oldest question has waited for ``deadline_s``, and all others with it:
    what does not answer that one answers none behind it."""

    def __init__(self, connection: AbstractConnection, deadline_s: float) -> None:
        self.connection = connection
        self._deadline_s = deadline_s
        self._loop = asyncio.get_running_loop()
        self._asked: deque[tuple[float, asyncio.Future[Any]]] = deque()  # when, and who waits
        self._unsent: list[bytes] = []
        self._watch: asyncio.TimerHandle | None = None
        self._answers = hiredis.Reader()
        self._transport: Any = connection._writer.transport  # pyright: ignore[reportAttributeAccessIssue]
        self._before = self._transport.get_protocol()  # the library's, which closes by it
        self._transport.set_protocol(self)

    @property
    def is_closed(self) -> bool:
        return self._transport.is_closing()

    def ask(self, *command: str | int) -> asyncio.Future[Any]:
        """Raises, when awaited, ReplyError, ConnectionError, TimeoutError."""
        answer = self._loop.create_future()
        self._asked.append((self._loop.time(), answer))
        if not self._unsent:
            self._loop.call_soon(self._send)
        self._unsent.append(hiredis.pack_command(command))
        if self._watch is None:
            self._watch = self._loop.call_later(self._deadline_s, self._look)
        return answer

    def data_received(self, data: bytes) -> None:
        self._answers.feed(data)
        try:
            while (reply := self._answers.gets()) is not False:
                if not isinstance(reply, hiredis.PushNotification):
                    self._answer(reply)
        except hiredis.ProtocolError as error:
            self._end(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._before.connection_lost(exc)
        self._end(exc or ConnectionError("the store closed the connection"))

    def _send(self) -> None:
        """What was asked in this turn of the loop."""
        commands, self._unsent = self._unsent, []
        self._transport.write(b"".join(commands))

    def _answer(self, reply: Any) -> None:
        _, answer = self._asked.popleft()
        if answer.done():  # who asked waits no more
            return
        if isinstance(reply, Exception):
            answer.set_exception(reply)
        else:
            answer.set_result(reply)

    def _look(self) -> None:
        """One timer for all that is asked."""
        self._watch = None
        if not self._asked:
            return
        left_s = self._asked[0][0] + self._deadline_s - self._loop.time()
        if left_s > 0:
            self._watch = self._loop.call_later(left_s, self._look)
        else:
            self._end(TimeoutError("the store does not answer"))

    def _end(self, error: Exception) -> None:
        if self._watch is not None:
            self._watch.cancel()
        self._transport.abort()
        while self._asked:
            self._answer(error)
