"""Usage records on their way: into the journal, to a gateway, until the ledger has them.

An ack covers all records before it, so that one gateway at a time gets all of them in order; another one
starts again behind the last ack. The ledger ignores what it has.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from engine import wire
from engine.journal import Journal
from engine.serve.connection import Connection

logger = logging.getLogger("engine.records")

MAX_UNACKED_RECORDS = 1024  # on the wire
MAX_RECORDS_AT_ONCE = 128
MAX_BUFFERED_BYTES = 1 << 20
REDELIVER_AFTER_S = 5.0
RETRY_WRITE_S = 0.5


class RecordDelivery:
    """Belongs to the event loop; the journal's blocking work is done by one thread of its own.

    ``failing``: the disk refuses; records are kept in memory and tried again, and no new request should be
    taken. ``run`` raises JournalCorrupt when the file was changed under it.
    """

    def __init__(self, journal: Journal, clock: Callable[[], float] = time.monotonic) -> None:
        self.failing = False
        self._journal = journal
        self._clock = clock
        self._writer = ThreadPoolExecutor(1, "journal")
        self._changed = asyncio.Event()
        self._pending: list[bytes] = []
        self._acks: list[wire.Ack] = []
        self._gateways: list[Connection] = []  # the first is the one that gets the records
        self._sent = journal.acked
        self._progress_s = self._waiting_s = clock()
        self._ack_saved = journal.acked
        self._settled = asyncio.Event()
        self._ending = False

    @property
    def num_records(self) -> int:
        """Written, or about to be, since the journal's beginning."""
        return self._journal.last + len(self._pending)

    @property
    def num_unacked(self) -> int:
        """Records that the ledger isn't known to have."""
        return self._journal.last - self._journal.acked + len(self._pending)

    @property
    def stalled_s(self) -> float:
        """How long records have waited without any being acknowledged."""
        return self._clock() - self._waiting_s if self.num_unacked else 0.0

    def append(self, payload: bytes) -> None:
        if not self.num_unacked:
            self._waiting_s = self._clock()
        self._pending.append(payload)
        self._changed.set()

    def connected(self, gateway: Connection) -> None:
        self._gateways.append(gateway)
        self._changed.set()

    def disconnected(self, gateway: Connection) -> None:
        if gateway in self._gateways:
            first = gateway is self._gateways[0]
            self._gateways.remove(gateway)
            if first:
                self._start_again()

    def acked(self, ack: wire.Ack) -> None:
        self._acks.append(ack)
        self._changed.set()

    def tick(self) -> None:
        """Once a second or so: another gateway's turn if this one doesn't acknowledge."""
        overdue = self._clock() - self._progress_s >= REDELIVER_AFTER_S
        if self._gateways and self._sent > self._journal.acked and overdue:
            logger.warning("record %d isn't acknowledged by %r", self._journal.acked + 1, self._gateways[0].name)
            self._gateways.append(self._gateways.pop(0))
            self._start_again()
        self._changed.set()

    async def run(self) -> None:
        """Until ``end`` was called and what was pending then has been tried."""
        while not self._ending:
            await self._changed.wait()
            self._changed.clear()
            self._take_acks()
            await self._write_pending()
            await self._save_ack()
            self._deliver()
            if not self.num_unacked or (not self._gateways and not self._pending):
                self._settled.set()

    async def settle(self) -> None:
        """Waits until all is acknowledged, or durable while there is nobody to deliver to."""
        while self.num_unacked if self._gateways else self._pending:
            self._settled.clear()
            self._changed.set()
            await self._settled.wait()

    def end(self) -> None:
        self._ending = True
        self._changed.set()

    def close(self) -> None:
        """Makes durable what isn't yet, as far as the disk lets us. Blocks. After ``run`` has ended."""
        self._writer.shutdown(wait=True)
        try:
            if self._pending:
                self._journal.append(self._pending)
            self._journal.save_ack()
        except OSError as error:
            logger.error("%d usage records are lost with this process: %s", len(self._pending), error)
        self._journal.close()

    def _take_acks(self) -> None:
        acks, self._acks = self._acks, []
        for ack in acks:
            before = self._journal.acked
            if not self._journal.acknowledge(ack.number, ack.hash):
                logger.warning("an ack of record %d doesn't match it", ack.number)
            if self._journal.acked > before:
                self._progress_s = self._waiting_s = self._clock()

    async def _write_pending(self) -> None:
        """One group: what gathered while the one before was written."""
        group = list(self._pending)
        if not group:
            return
        try:
            await self._in_writer(self._journal.append, group)
        except OSError as error:
            if not self.failing:
                logger.error("the journal can't be written: %s", error)
            self.failing = True
            asyncio.get_running_loop().call_later(RETRY_WRITE_S, self._changed.set)
            return
        self.failing = False
        del self._pending[: len(group)]

    async def _save_ack(self) -> None:
        """Lazily: a cursor that is lost only means that records come twice."""
        if self._journal.acked == self._ack_saved or self._pending:
            return
        acked = self._journal.acked
        try:
            await self._in_writer(self._journal.save_ack)
            self._ack_saved = acked
        except OSError as error:
            logger.error("the journal's cursor can't be written: %s", error)

    def _deliver(self) -> None:
        if not self._gateways:
            return
        gateway = self._gateways[0]
        room = self._journal.acked + MAX_UNACKED_RECORDS - self._sent
        if room <= 0 or gateway.buffered_bytes > MAX_BUFFERED_BYTES:
            return
        if self._sent == self._journal.acked:
            self._progress_s = self._clock()
        for record in self._journal.entries(self._sent, min(room, MAX_RECORDS_AT_ONCE)):
            gateway.send(record)
            self._sent = record.number
        if room > MAX_RECORDS_AT_ONCE and self._sent < self._journal.last:
            self._changed.set()

    def _start_again(self) -> None:
        self._sent = self._journal.acked
        self._changed.set()

    async def _in_writer(self, call: Callable[..., None], *args: object) -> None:
        await asyncio.get_running_loop().run_in_executor(self._writer, call, *args)
