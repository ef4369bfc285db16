"""The gateway's side of an engine's stream: one connection, kept alive, and one ``EngineStream`` per request.

Everything here belongs to one event loop. A step's frame is decoded once and its deltas are dealt to the
streams that wait; nothing is awaited on that path.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple, TypeAlias

from engine import wire

logger = logging.getLogger("engine.client")

Event: TypeAlias = wire.Delta | wire.PromptScores | wire.Finished | wire.Rejected

FIRST_BACKOFF_S = 0.02
MAX_BACKOFF_S = 0.5
WELCOME_TIMEOUT_S = 10.0
MAX_ADAPTERS_SENT_AT_ONCE = 2
RESUME_SENDING_BELOW_BYTES = 2 * wire.ADAPTER_CHUNK_BYTES


class EngineLost(Exception):
    """There is no connection, or it dropped: what the engine had of ours is aborted and journaled as lost."""


class ProtocolMismatch(EngineLost):
    """The engine speaks a version of the wire that we don't."""


class AdapterFile(NamedTuple):
    """A canonical adapter file on the gateway's disk; ``sha256`` in hex is that of the whole file."""

    path: Path
    sha256: str
    size_bytes: int


OnRecord: TypeAlias = Callable[[wire.Record], Awaitable[None]]
AdapterSource: TypeAlias = Callable[[str], Awaitable[AdapterFile | None]]


class EngineStream:
    """One request at the engine. Events come in order; ``Finished`` or ``Rejected`` is the last.

    ``submitted_ns`` and ``finished_ns`` are of this process's monotonic clock; 0 = not yet.
    """

    __slots__ = ("_close_sent", "_connection", "_events", "_waiter", "finished_ns", "request_id", "submitted_ns")

    def __init__(self, request_id: str, connection: "_Connection") -> None:
        self.request_id = request_id
        self.submitted_ns = time.monotonic_ns()
        self.finished_ns = 0
        self._connection: _Connection | None = connection
        self._events: deque[Event] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._close_sent = False

    async def next(self) -> list[Event]:
        """All events that have arrived, at least one: waits for it. One caller at a time.

        Raises EngineLost when the connection dropped and everything that came before it has been taken.
        """
        while not self._events:
            if self._connection is None and not self.finished_ns:
                raise EngineLost(f"connection lost during {self.request_id}")
            assert not self.finished_ns, "next() after the terminal event"
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        events = list(self._events)
        self._events.clear()
        return events

    def abort(self, choice: int = -1) -> None:
        """Ends one choice, or all; the terminal events still come. Nothing happens once it is over."""
        if not self.finished_ns:
            self._send(wire.Abort(self.request_id, choice))

    def grant(self, granted_tokens: int) -> None:
        """Raises the tokens that each choice may produce. Nothing happens once it is over."""
        if not self.finished_ns:
            self._send(wire.Grant(self.request_id, granted_tokens))

    def close(self, close: wire.Close) -> None:
        """The last word: the engine journals the request with it. Aborts what is left; later events are dropped.

        Without effect the second time, after Rejected, and after the connection dropped (the engine then has
        journaled the request as lost).
        """
        if self._close_sent:
            return
        self._close_sent = True
        self.abort()
        self._send(close)
        self._connection = None if self.finished_ns else self._connection

    def _send(self, message: wire.ToEngine) -> None:
        if self._connection is not None:
            self._connection.send(message)

    def _push(self, event: Event) -> None:
        if not self._close_sent:
            self._events.append(event)
            self._wake()

    def _end(self, event: wire.Finished | wire.Rejected) -> None:
        self.finished_ns = time.monotonic_ns()
        self._push(event)
        if self._close_sent or isinstance(event, wire.Rejected):
            self._connection = None

    def _drop(self) -> None:
        self._connection = None
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _Connection(asyncio.Protocol):
    """One socket: frames in and out. Knows nothing of what they mean beyond the owner's ``receive``."""

    def __init__(self, receive: Callable[["_Connection", wire.ToGateway], None]) -> None:
        self._receive = receive
        self._frames = wire.Frames()
        self._transport: asyncio.Transport | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(high=RESUME_SENDING_BELOW_BYTES)

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
        """Queues a message; dropped when the connection is gone."""
        if self._transport is not None and not self.lost.done():
            self._transport.write(wire.encode(message))

    async def writable(self) -> None:
        """Waits until the peer has read most of what was sent. Raises EngineLost."""
        await self._writable.wait()
        if self.lost.done():
            raise EngineLost("connection lost")

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class EngineClient:
    """A gateway's (or an observer's) connection to one engine, made again whenever it drops.

    ``on_record`` is awaited for one record after the other, in journal order; it hands the record to the
    ledger, and ``ack`` follows when that has committed. An ack covers all earlier records: never acknowledge past
    one that hasn't committed. What isn't acknowledged for 5 s comes again. ``adapter_source`` finds an adapter's
    file by its key, or None.
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
        self._adapter_source = adapter_source
        self._connection: _Connection | None = None
        self._mismatch: str = ""
        self._changed = asyncio.Event()
        self._streams: dict[str, EngineStream] = {}
        self._records: deque[wire.Record] = deque()
        self._records_arrived = asyncio.Event()
        self._next_record: int | None = None  # None: the connection's first record says where we are
        self._stats: dict[int, asyncio.Future[list[wire.Family]]] = {}
        self._num_stats = 0
        self._sending = asyncio.Semaphore(MAX_ADAPTERS_SENT_AT_ONCE)
        self._tasks: dict[str, asyncio.Task[None]] = {}

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
        self._spawn("connect", self._keep_connected())
        self._spawn("records", self._take_records())

    async def close(self) -> None:
        """Drops the connection; streams that are left raise EngineLost."""
        connection, tasks = self._connection, list(self._tasks.values())
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
        connection = self._connected()
        self._num_stats += 1
        seq = self._num_stats
        reply = self._stats[seq] = asyncio.get_running_loop().create_future()
        connection.send(wire.StatsRequest(seq))
        try:
            async with asyncio.timeout(timeout_s):
                return await reply
        except TimeoutError:
            raise EngineLost(f"no stats from {self.address} within {timeout_s} s") from None
        finally:
            self._stats.pop(seq, None)

    # ── the connection ───────────────────────────────────────────────────────────────────────────

    def _connected(self) -> _Connection:
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
            _, connection = await loop.create_unix_connection(lambda: _Connection(self._receive), self.address)
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
        self._next_record = None
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream._drop()
        for reply in self._stats.values():
            if not reply.done():
                reply.set_exception(EngineLost(f"connection to {self.address} lost"))

    # ── what the engine says ─────────────────────────────────────────────────────────────────────

    def _receive(self, connection: _Connection, message: wire.ToGateway) -> None:
        match message:
            case wire.StepFrame():
                self._deal(message)
            case wire.Finished() | wire.Rejected():
                stream = self._streams.pop(message.request_id, None)
                if stream is not None:
                    stream._end(message)
            case wire.Record():
                self._records.append(message)
                self._records_arrived.set()
            case wire.Welcome():
                self._welcomed(connection, message)
            case wire.StatsReply():
                reply = self._stats.get(message.seq)
                if reply is not None and not reply.done():
                    reply.set_result(message.families)
            case wire.AdapterWanted():
                name = f"adapter {message.adapter_key}"
                if name not in self._tasks:
                    self._spawn(name, self._give_adapter(connection, message.adapter_key))

    def _welcomed(self, connection: _Connection, welcome: wire.Welcome) -> None:
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
        for event in frame.deltas:
            stream = streams.get(event.request_id)
            if stream is not None:
                stream._push(event)
        for event in frame.scores:
            stream = streams.get(event.request_id)
            if stream is not None:
                stream._push(event)

    async def _take_records(self) -> None:
        while True:
            await self._records_arrived.wait()
            self._records_arrived.clear()
            while self._records:
                await self._take_record(self._records.popleft())

    async def _take_record(self, record: wire.Record) -> None:
        """Hands on without a gap: an ack covers all that came before it, so nothing may overtake a failure."""
        if self._on_record is None or (self._next_record is not None and record.number > self._next_record):
            return
        try:
            await self._on_record(record)
            self._next_record = record.number + 1
        except Exception:
            logger.exception("record %d was not taken; it will come again", record.number)
            self._next_record = record.number

    async def _give_adapter(self, connection: _Connection, key: str) -> None:
        try:
            async with self._sending:
                file = None if self._adapter_source is None else await self._adapter_source(key)
                if file is None:
                    raise FileNotFoundError("the adapter is not in the store")
                await _send_adapter(connection, key, file)
        except EngineLost:
            return
        except Exception as error:
            logger.warning("adapter %.12s can't be given: %s", key, type(error).__name__)
            connection.send(wire.AdapterUnavailable(key, "adapter_unavailable", "the adapter's file can't be read"))

    def _spawn(self, name: str, coroutine) -> None:
        task = asyncio.create_task(coroutine, name=f"engine client {name}")
        self._tasks[name] = task
        task.add_done_callback(lambda _: self._tasks.pop(name, None))


async def _send_adapter(connection: _Connection, key: str, file: AdapterFile) -> None:
    """The file in chunks, each sent when the engine has taken most of what came before. Raises OSError."""
    with await asyncio.to_thread(file.path.open, "rb") as source:
        for offset in range(0, file.size_bytes, wire.ADAPTER_CHUNK_BYTES):
            num_bytes = min(wire.ADAPTER_CHUNK_BYTES, file.size_bytes - offset)
            data = await asyncio.to_thread(source.read, num_bytes)
            if len(data) != num_bytes:
                raise OSError("the file is shorter than its record says")
            await connection.writable()
            connection.send(wire.AdapterChunk(key, offset, file.size_bytes, file.sha256, data))
