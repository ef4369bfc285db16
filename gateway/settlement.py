"""From the engines' journals to the ledger: records are unsealed, booked in batches, and only then acknowledged."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from engine import wire
from engine.client import EngineClient, OnRecord
from tenants import replica_times
from tenants.database import Database
from tenants.directory import Directory
from tenants.errors import ForgedContext, InvalidRecord
from tenants.ledger import Ledger
from tenants.meter import unseal
from tenants.patience import Patience
from tenants.replica_times import ReplicaSpan
from tenants.secrets import Secret
from tenants.settled import SettledRequest

BATCH_RECORDS = 500
BATCH_S = 0.02
BOOKING_EVERY_S = 0.2  # a booking of one record costs as much as that of fifty
RETRY_FIRST_S, RETRY_MAX_S = 0.05, 2.0
STUCK_S = 5.0  # two were not enough for a healthy ledger on a machine at five times its load
MAX_UNBOOKED = 5_000  # records that wait here; over that nothing new is run
MAX_QUEUED = 10_000  # records that wait here; over that an engine's delivery waits
_TIME_FIELDS = wire.TimeRecord.__struct_fields__
_FIELDS = tuple(name for name in wire.UsageRecord.__struct_fields__ if name not in ("request_id", "context"))
_log = logging.getLogger("gateway.settlement")

Count = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class _Item:
    """A record as it came, or what a lost request came to. ``engine`` None: nobody waits."""

    told: bytes | SettledRequest
    engine: EngineClient | None = None
    number: int = 0
    hash: bytes = b""


@dataclass(slots=True)
class Settlement:
    """The ledger's feeder. A record whose context isn't ours is counted and acknowledged, never booked."""

    database: Database
    directory: Directory
    context_keys: tuple[Secret, ...]
    count_unfit: Count
    ledger: Ledger
    _queue: asyncio.Queue[_Item] = field(default_factory=lambda: asyncio.Queue(MAX_QUEUED))
    _worker: asyncio.Task[None] | None = None
    _next_booking_s: float = 0.0
    _taking: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_stuck(self) -> bool:
        """The ledger has not taken a batch for STUCK_S: nobody knows what was spent since."""
        return not self._taking.is_set()

    async def unstuck(self) -> None:
        """Returns when the ledger takes batches (again)."""
        await self._taking.wait()

    @property
    def is_full(self) -> bool:
        """As many records wait as we want to owe the ledger."""
        return self._queue.qsize() >= MAX_UNBOOKED

    async def start(self) -> None:
        self._taking.set()
        self._worker = asyncio.create_task(self._work(), name="settlement")

    async def close(self, timeout_s: float = 2.0) -> None:
        """Books what is queued, if the database answers in time. What isn't acknowledged comes again."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._queue.join()
        if self._worker is not None:
            self._worker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._worker

    def taker(self, engine: Callable[[], EngineClient]) -> OnRecord:
        """What an engine's client calls for each record, in journal order."""

        async def take(record: wire.Record) -> None:
            await self._queue.put(_Item(record.payload, engine(), record.number, record.hash))

        return take

    async def take_left(self, payload: bytes) -> None:
        """A record of a journal that no engine delivers any more."""
        await self._queue.put(_Item(payload))

    def post_lost(self, record: wire.UsageRecord) -> None:
        """Books what an engine that died can't report. The engine's own record of it, if it comes, is the same row."""
        settled = self._settled(record)
        if settled is None or self._queue.full():
            _log.error("no receipt for lost request %s", record.request_id)
            return
        self._queue.put_nowait(_Item(settled))

    def _told(self, batch: list[_Item]) -> list[SettledRequest | ReplicaSpan]:
        """Read here, one behind the other, and not as they come. What is unfit is only acknowledged."""
        told = (self._read(item.told) if isinstance(item.told, bytes) else item.told for item in batch)
        return [record for record in told if record is not None]

    def _read(self, payload: bytes) -> SettledRequest | ReplicaSpan | None:
        try:
            record = wire.read_record(payload)
            return self._span(record) if isinstance(record, wire.TimeRecord) else self._settled(record)
        except msgspec.MsgspecError as error:
            self._unfit("malformed", str(error))
            return None

    def _settled(self, record: wire.UsageRecord) -> SettledRequest | None:
        try:
            context = unseal(record.context, *self.context_keys)
            return SettledRequest(context, **{name: getattr(record, name) for name in _FIELDS})
        except ForgedContext as error:
            self._unfit("forged", str(error))
        except InvalidRecord as error:
            self._unfit("invalid", str(error))
        return None

    def _span(self, record: wire.TimeRecord) -> ReplicaSpan | None:
        try:
            return ReplicaSpan(**{name: getattr(record, name) for name in _TIME_FIELDS})
        except InvalidRecord as error:
            self._unfit("invalid", str(error))
            return None

    def _unfit(self, reason: str, detail: str) -> None:
        _log.error("a record is not booked: %s (%s)", reason, detail)
        self.count_unfit(reason)

    async def _work(self) -> None:
        while True:
            batch = await self._batch()
            waiting = Patience(STUCK_S, self._taking.clear)
            try:
                await self._book(batch)
            finally:
                waiting.end()
                self._taking.set()
            await self._acknowledge(batch)
            for _ in batch:
                self._queue.task_done()

    async def _batch(self) -> list[_Item]:
        """At least one record; those with it that follow within BATCH_S, or before the next booking is due."""
        batch = [await self._queue.get()]
        if self._queue.qsize() < BATCH_RECORDS:
            await asyncio.sleep(max(BATCH_S, self._next_booking_s - time.monotonic()))
        while len(batch) < BATCH_RECORDS and not self._queue.empty():
            batch.append(self._queue.get_nowait())
        self._next_booking_s = time.monotonic() + BOOKING_EVERY_S
        return batch

    async def _book(self, batch: list[_Item]) -> None:
        """Until it is done: an unbooked record is never acknowledged, and none may overtake it."""
        told, wait_s, failed = None, RETRY_FIRST_S, False
        while True:
            try:
                told = self._told(batch) if told is None else told
                await self._post(told)
                break
            except Exception as error:
                if not failed:
                    _log.error("the ledger does not take records: %s", type(error).__name__)
                failed = True
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, RETRY_MAX_S)
        if failed:
            _log.warning("the ledger takes records again")

    async def _post(self, told: list[SettledRequest | ReplicaSpan]) -> None:
        if told:
            async with self.database.transaction() as session:
                await replica_times.post(session, [record for record in told if isinstance(record, ReplicaSpan)])
                settled = [record for record in told if isinstance(record, SettledRequest)]
                await self.ledger.post(session, settled, self.directory.rate_cards)

    async def _acknowledge(self, batch: list[_Item]) -> None:
        """The last of each engine covers all before it."""
        last = {id(item.engine): item for item in batch if item.engine is not None}
        for item in last.values():
            assert item.engine is not None
            await item.engine.ack(item.number, item.hash)
