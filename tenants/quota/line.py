"""A connection to the store whose bytes are ours: the commands of one turn of the loop in one write, since each write
wakes the store, and the answers in the same order.

A call of the library's own takes a connection out of a pool, two locks, a timer and a dozen coroutines: three times the
processor time. The library still says where the store is, who we are there, and how that is kept secret.
"""

import asyncio
from collections import deque
from typing import Any, NamedTuple, TypeAlias

import hiredis
from redis.asyncio import Redis
from redis.asyncio.connection import Connection, SSLConnection, UnixDomainSocketConnection

from tenants.errors import StoreUnavailable
from tenants.patience import LOOKS

Answer: TypeAlias = "asyncio.Future[Any]"
Call: TypeAlias = tuple[str | int, ...]


async def connected(redis: Redis, deadline_s: float) -> "Line":
    """A line of its own to the store of ``redis``, for whoever closes it. Raises OSError, and StoreUnavailable for one
    that does not want us."""
    told = redis.connection_pool.make_connection()  # it stays unconnected: only what it says is wanted
    loop = asyncio.get_running_loop()
    if isinstance(told, UnixDomainSocketConnection):
        _, line = await loop.create_unix_connection(lambda: Line(deadline_s), told.path)
    else:
        assert isinstance(told, Connection), f"a store is not reached by a {type(told).__name__}"
        tls = told.ssl_context.get() if isinstance(told, SSLConnection) else None
        _, line = await loop.create_connection(lambda: Line(deadline_s), told.host, told.port, ssl=tls)
    try:
        who: list[str] = [name for name in (told.username, told.password) if name]
        if who:
            await line.ask(("AUTH", *who))
        if told.db:
            await line.ask(("SELECT", told.db))
    except BaseException:
        line.close()
        raise
    return line


class _Question(NamedTuple):
    """``in_full`` is asked when the store does not know the script by its name."""

    asked_at: int
    in_full: Call
    answer: Answer


class Line(asyncio.Protocol):
    """The connection. Each question has its own time; when all that were asked have had theirs, the line ends.
    Time passes in looks at the connection: a process that got no processor for so long finds the answers there, and
    nothing is wrong."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._loop = asyncio.get_running_loop()
        self._questions: deque[_Question] = deque()
        self._unsent: list[bytes] = []
        self._num_looks = 0
        self._watch: asyncio.TimerHandle | None = None
        self._replies = hiredis.Reader()

    def connection_made(self, transport: Any) -> None:
        self._transport: asyncio.Transport = transport

    @property
    def is_closed(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        self._end(ConnectionError("closed"))

    def ask(self, command: Call, in_full: Call = ()) -> Answer:
        answer: Answer = self._loop.create_future()
        self._put(command, _Question(self._num_looks, in_full, answer))
        return answer

    def data_received(self, data: bytes) -> None:
        self._replies.feed(data)
        try:
            while (reply := self._replies.gets()) is not False:
                self._take(reply)
        except hiredis.ProtocolError as error:
            self._end(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(exc or ConnectionError("closed"))

    def _put(self, command: Call, question: _Question) -> None:
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
            question.answer.set_exception(unavailable(reply))

    def _look_later(self) -> None:
        self._watch = self._loop.call_later(self._deadline_s / LOOKS, self._look)

    def _look(self) -> None:
        """One timer for all that is asked."""
        self._watch = None
        self._num_looks += 1
        for question in self._questions:
            if self._num_looks - question.asked_at <= LOOKS:
                self._look_later()
                return
            if not question.answer.done():
                question.answer.set_exception(unavailable(TimeoutError()))
        if self._questions:
            self._end(TimeoutError())

    def _end(self, error: Exception) -> None:
        if self._watch is not None:
            self._watch.cancel()
        self._transport.abort()
        while self._questions:
            self._take(error)


def unavailable(error: Exception) -> StoreUnavailable:
    return StoreUnavailable(f"the store failed: {type(error).__name__}")
