"""One request's stream of events at an engine, and the gateway's end of the socket that carries it."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TypeAlias, cast

from engine import wire

logger = logging.getLogger("engine.client")

Event: TypeAlias = wire.Delta | wire.PromptScores | wire.Finished | wire.Rejected

RESUME_SENDING_BELOW_BYTES = 2 * wire.ADAPTER_CHUNK_BYTES


class EngineLost(Exception):
    """There is no connection, or it dropped: what the engine had of ours is aborted and journaled as lost."""


class EngineStream:
    """One request at the engine. Events come in order; ``Finished`` or ``Rejected`` is the last.

    ``submitted_ns`` and ``finished_ns`` are of this process's monotonic clock; 0 = not yet.
    """

    __slots__ = (
        "_close_sent",
        "_connection",
        "_events",
        "_loop",
        "_waiter",
        "_wanted",
        "finished_ns",
        "request_id",
        "submitted_ns",
    )

    def __init__(self, request_id: str, connection: "Connection") -> None:
        self.request_id = request_id
        self.submitted_ns = time.monotonic_ns()
        self.finished_ns = 0
        self._connection: Connection | None = connection
        self._loop = connection.loop
        self._events: list[Event] = []
        self._waiter: asyncio.Future[None] | None = None
        self._wanted = 1
        self._close_sent = False

    async def next(self, wanted: int = 1) -> list[Event]:
        """All events that have arrived: waits for ``wanted`` of them, or the last. One caller at a time.

        Raises EngineLost when the connection dropped and everything that came before it has been taken.
        """
        self._wanted = wanted
        while len(self._events) < wanted and not self._is_over:
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if not self._events:
            assert not self.finished_ns, "next() after the terminal event"
            raise EngineLost(f"connection lost during {self.request_id}")
        events, self._events = self._events, []
        return events

    @property
    def _is_over(self) -> bool:
        """Nothing more will come."""
        return bool(self.finished_ns) or self._connection is None

    def abort(self, choice: int = -1) -> None:
        """Ends one choice, or all; the terminal events still come. Nothing happens once it is over."""
        if not self.finished_ns:
            self._send(wire.Abort(self.request_id, choice))

    def grant(self, granted_tokens: int) -> None:
        """Raises the tokens that each choice may produce. Nothing happens once it is over."""
        if not self.finished_ns:
            self._send(wire.Grant(self.request_id, granted_tokens))

    def close(self, close: wire.Close) -> bool:
        """The last word: the engine journals the request with it. Aborts what is left; later events are dropped.

        Without effect the second time, after Rejected, and after the connection dropped: False then, since the
        engine, if it lives, has journaled the request as lost.
        """
        if self._close_sent or self._connection is None or self._connection.lost.done():
            return False
        self._close_sent = True
        self.abort()
        self._send(close)
        self._connection = None if self.finished_ns else self._connection
        return True

    def _send(self, message: wire.ToEngine) -> None:
        if self._connection is not None:
            self._connection.send(message)

    def push(self, event: Event) -> None:
        if not self._close_sent:
            self._events.append(event)
            if len(self._events) >= self._wanted or self.finished_ns:
                self._wake()

    def end(self, event: wire.Finished | wire.Rejected) -> None:
        self.finished_ns = time.monotonic_ns()
        self.push(event)
        if self._close_sent or isinstance(event, wire.Rejected):
            self._connection = None

    def drop(self) -> None:
        self._connection = None
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Connection(asyncio.Protocol):
    """One socket: frames in and out. Knows nothing of what they mean beyond the owner's ``receive``."""

    def __init__(self, receive: Callable[["Connection", wire.ToGateway], None]) -> None:
        self._receive = receive
        self._frames = wire.Frames()
        self._transport: asyncio.Transport | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._outgoing: list[bytes] = []
        self.loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[None] = self.loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self._transport.set_write_buffer_limits(high=RESUME_SENDING_BELOW_BYTES)

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._frames.feed(data):
                self._receive(self, wire.decode_to_gateway(body))
        except wire.WireError as error:
            logger.error("engine sent what is not our protocol: %s", error)
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._writable.set()
        if not self.lost.done():
            self.lost.set_result(None)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def send(self, message: wire.ToEngine) -> None:
        """Queues a message; dropped when the connection is gone. All of a turn of the loop are one write: each would
        wake the engine."""
        if self._transport is None or self.lost.done():
            return
        if not self._outgoing:
            self.loop.call_soon(self._flush)
        self._outgoing.append(wire.encode(message))

    def _flush(self) -> None:
        outgoing, self._outgoing = self._outgoing, []
        if self._transport is not None and not self.lost.done():
            self._transport.write(b"".join(outgoing))

    async def writable(self) -> None:
        """Waits until the peer has read most of what was sent. Raises EngineLost."""
        await self._writable.wait()
        if self.lost.done():
            raise EngineLost("connection lost")

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()
