"""The gateway's side of an engine's stream: one connection, kept alive, and one ``EngineStream`` per request.

Everything here belongs to one event loop. A step's frame is decoded once and its deltas are dealt to the
streams that wait; nothing is awaited on that path.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from engine import wire
from engine.client.adapters import AdapterFile, AdapterSource, AdapterSupply
from engine.client.stream import Connection, EngineLost, EngineStream, Event

__all__ = ["AdapterFile", "EngineClient", "EngineLost", "EngineStream", "Event", "ProtocolMismatch"]

logger = logging.getLogger("engine.client")

FIRST_BACKOFF_S = 0.02
MAX_BACKOFF_S = 0.5
WELCOME_TIMEOUT_S = 10.0


class ProtocolMismatch(EngineLost):
    """The engine speaks a version of the wire that we don't."""


OnRecord: TypeAlias = Callable[[wire.Record], Awaitable[None]]


class EngineClient:
    """A gateway's (or an observer's) connection to one engine, made again whenever it drops.

    ``on_record`` is awaited for one record after the other, in journal order; it hands the record to the
    ledger, and ``ack`` follows when that has committed. An ack covers all earlier records: never acknowledge past
    one that hasn't committed. What isn't acknowledged for 5 s comes again. ``adapter_source`` finds an adapter's
    file by its key, or None when it is deleted; a file that isn't where it should be is damage.
    """

    def __init__(
        self,
        address: str,
        peer: str,
        *,
        role: wire.Role = "gateway",
        want_tokenizer: bool = False,
        on_record: OnRecord | None = None,
        adapter_source: AdapterSource | None = None,
    ) -> None:
        self.address = address
        self.welcome: wire.Welcome | None = None
        self._hello = wire.Hello(peer, role, wire.PROTOCOL_VERSION, want_tokenizer)
        self._on_record = on_record
        self._supply = AdapterSupply(adapter_source)
        self._connection: Connection | None = None
        self._mismatch: str = ""
        self._changed = asyncio.Event()
        self._streams: dict[str, EngineStream] = {}
        self._records: deque[wire.Record] = deque()
        self._records_arrived = asyncio.Event()
        self._last_record = 0  # the last that we looked at; what doesn't follow it begins another delivery
        self._failed_record = 0  # 0 = none; of this delivery nothing behind it is taken
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._num_questions = 0
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def connected(self) -> bool:
        return self.welcome is not None

    @property
    def load(self) -> int:
        """Requests of ours that the engine hasn't ended."""
        return len(self._streams)

    async def start(self) -> None:
        """Begins to connect, and to connect again, until ``close``. Returns at once."""
        assert not self._tasks, "started twice"
        for name, work in (("connect", self._keep_connected()), ("records", self._take_records())):
            self._tasks.append(asyncio.create_task(work, name=f"engine client {name}"))

    async def close(self) -> None:
        """Drops the connection; streams that are left raise EngineLost."""
        connection, tasks = self._connection, [*self._tasks, *self._supply.drop()]
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if connection is not None:
            connection.abort()
            await connection.lost

    async def ready(self, timeout_s: float) -> wire.Welcome:
        """The engine's Welcome, as soon as there is one. Raises EngineLost after ``timeout_s``, and
        ProtocolMismatch at once when the engine speaks another version."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.welcome is None and not self._mismatch:
                    self._changed.clear()
                    await self._changed.wait()
        if self.welcome is not None:
            return self.welcome
        if self._mismatch:
            raise ProtocolMismatch(self._mismatch)
        raise EngineLost(f"no engine at {self.address} within {timeout_s} s")

    def submit(self, submit: wire.Submit) -> EngineStream:
        """Sends a request. Raises EngineLost when not connected, ValueError for an id of ours in flight."""
        connection = self._connected()
        if submit.request_id in self._streams:
            raise ValueError(f"request {submit.request_id} is in flight")
        stream = EngineStream(submit.request_id, connection)
        self._streams[submit.request_id] = stream
        connection.send(submit)
        return stream

    async def ack(self, number: int, hash: bytes) -> None:  # noqa: A002 (the wire's word)
        """Tells the engine what the ledger has. Without a connection it is dropped: the record comes again."""
        if self._connection is not None:
            self._connection.send(wire.Ack(number, hash))

    def forget_adapter(self, key: str) -> None:
        """A deleted version. Without a connection it is dropped: no request names that key again."""
        if self._connection is not None:
            self._connection.send(wire.AdapterForget(key))

    async def stats(self, timeout_s: float = 1.0) -> list[wire.Family]:
        """The engine's metric families now. Raises EngineLost when not connected or not answered in time."""
        return (await self.report(timeout_s)).families

    async def report(self, timeout_s: float = 1.0) -> wire.StatsReply:
        """The families, and what the engine last had no room for. Raises EngineLost as ``stats``."""
        return await self._ask(wire.StatsRequest, timeout_s)

    async def residency(self, keys: list[str] | None = None, timeout_s: float = 1.0) -> dict[str, list[wire.Tier]]:
        """Which tiers hold these adapters (None: all that any holds), fastest first. Raises EngineLost as ``stats``."""
        return (await self._ask(wire.ResidencyRequest, timeout_s, keys)).tiers

    async def _ask(self, question: Callable[..., Any], timeout_s: float, *more: object) -> Any:
        connection = self._connected()
        self._num_questions += 1
        seq = self._num_questions
        reply = self._replies[seq] = asyncio.get_running_loop().create_future()
        connection.send(question(seq, *more))
        try:
            async with asyncio.timeout(timeout_s):
                return await reply
        except TimeoutError:
            raise EngineLost(f"no answer from {self.address} within {timeout_s} s") from None
        finally:
            self._replies.pop(seq, None)

    # ── the connection ───────────────────────────────────────────────────────────────────────────

    def _connected(self) -> Connection:
        if self._connection is None or self.welcome is None or self._connection.lost.done():
            raise EngineLost(f"not connected to {self.address}")
        return self._connection

    async def _keep_connected(self) -> None:
        backoff_s = FIRST_BACKOFF_S
        while True:
            if await self._connect_once():
                backoff_s = FIRST_BACKOFF_S
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    async def _connect_once(self) -> bool:
        """Lives as long as one connection does; True when the engine welcomed us on it."""
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_unix_connection(lambda: Connection(self._receive), self.address)
        except OSError:
            return False
        self._connection = connection
        connection.send(self._hello)
        overdue = loop.call_later(WELCOME_TIMEOUT_S, lambda: None if self.connected else connection.abort())
        try:
            await asyncio.shield(connection.lost)
        finally:
            overdue.cancel()
            connection.abort()
            welcomed = self.connected
            self._disconnected()
        return welcomed

    def _disconnected(self) -> None:
        if self.welcome is not None:
            logger.warning("connection to engine %s lost, %d requests with it", self.welcome.engine_id, self.load)
        self._connection = self.welcome = None
        self._records.clear()  # unacknowledged: they come again
        self._last_record = self._failed_record = 0
        self._supply.drop()
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.drop()
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(EngineLost(f"connection to {self.address} lost"))

    # ── what the engine says ─────────────────────────────────────────────────────────────────────

    def _receive(self, connection: Connection, message: wire.ToGateway) -> None:
        match message:
            case wire.StepFrame():
                self._deal(message)
            case wire.Finished() | wire.Rejected():
                stream = self._streams.pop(message.request_id, None)
                if stream is not None:
                    stream.end(message)
            case wire.Record():
                self._enqueue(message)
            case wire.Welcome():
                self._welcomed(connection, message)
            case wire.StatsReply() | wire.ResidencyReply():
                reply = self._replies.get(message.seq)
                if reply is not None and not reply.done():
                    reply.set_result(message)
            case wire.AdapterWanted():
                self._supply.wanted(connection, message.adapter_key)

    def _welcomed(self, connection: Connection, welcome: wire.Welcome) -> None:
        if welcome.version not in wire.ACCEPTED_VERSIONS:
            self._mismatch = (
                f"engine {welcome.engine_id} speaks protocol {welcome.version}, we {sorted(wire.ACCEPTED_VERSIONS)}"
            )
            logger.error(self._mismatch)
            connection.abort()
        else:
            self._mismatch = ""
            self.welcome = welcome
            logger.info("connected to engine %s at %s", welcome.engine_id, self.address)
        self._changed.set()

    def _deal(self, frame: wire.StepFrame) -> None:
        streams = self._streams
        for event in (*frame.scores, *frame.deltas):
            stream = streams.get(event.request_id)
            if stream is not None:
                stream.push(event)

    def _enqueue(self, record: wire.Record) -> None:
        """What comes again while it waits here still is dropped: a slow ledger must not fill the memory."""
        if not self._records or record.number > self._records[-1].number:
            self._records.append(record)
            self._records_arrived.set()

    async def _take_records(self) -> None:
        while True:
            await self._records_arrived.wait()
            self._records_arrived.clear()
            while self._records:
                await self._take_record(self._records.popleft())

    async def _take_record(self, record: wire.Record) -> None:
        """Hands on without a gap: an ack covers all that came before it, so nothing may overtake a failure.

        A delivery that begins anew does so behind the last ack, whoever's that was."""
        if record.number != self._last_record + 1:
            self._failed_record = 0
        self._last_record = record.number
        if self._on_record is None or self._failed_record:
            return
        try:
            await self._on_record(record)
        except Exception:
            logger.exception("record %d was not taken; it will come again", record.number)
            self._failed_record = record.number
