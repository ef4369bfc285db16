"""What tenants have spent, counted anew when the store does not know it: after a flush, at a month's first request,
when a limit is new.

The sum of a window is the ledger's, and what is reserved or not yet booked. So every gateway that may hold
reservations says what it holds (a muster), every record that engines had journaled by then is booked, and then the
ledger is read. Until that is done, who has a limit of money is refused.
"""

import asyncio
import contextlib
import json
import logging
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from redis.asyncio import Redis
from redis.exceptions import RedisError
from sqlalchemy.exc import SQLAlchemyError

from engine.client import EngineClient, EngineLost
from gateway.limits.tickets import Tickets
from tenants.database import Database, one_snapshot
from tenants.directory import Directory
from tenants.errors import StoreUnavailable
from tenants.patience import patience
from tenants.quota.budgets import Spend, limited
from tenants.quota.quota import RENEW_EVERY_MS, Quota, Reservation
from tenants.quota.spend_repository import BookedAttempt, GatewayLeaseRepository, SpendRepository

LEASE_S = 10.0
WAIT_S = 2.0  # how long a request waits for the count before it is refused
GIVE_UP_S = 30.0
POLL_S = 0.25
ASK_AGAIN_S = 0.02
MUSTERS_KEY = "tn:q2:musters"
ANSWERED_FOR_S = 60
_RECORDS, _UNACKED = "tenora_usage_records", "tenora_usage_records_unacked"
_log = logging.getLogger("gateway.limits.recount")
_FAILURES = (StoreUnavailable, RedisError, SQLAlchemyError, OSError, EngineLost, TimeoutError)


@dataclass(slots=True)
class Recount:
    """``name`` is this gateway's, the same after a restart: whoever has it now holds what is held under it."""

    name: str
    quota: Quota
    redis: Redis
    database: Database
    directory: Directory
    engines: Callable[[], Iterable[EngineClient]]
    tickets: Tickets = field(default_factory=Tickets)
    _fenced_at_s: float = 0.0
    _renewing: asyncio.Task[None] | None = None
    _counting: dict[tuple[str, ...], asyncio.Task[None]] = field(default_factory=dict)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def start(self) -> None:
        """Takes a lease, and answers musters from then on. Raises what the database raises."""
        await self._renew_lease()
        self._tasks = [
            asyncio.create_task(self._forever(self._renew_lease, RENEW_EVERY_MS / 1000), name="gateway's lease"),
            asyncio.create_task(self._forever(self._answer_musters, POLL_S), name="musters"),
        ]

    async def close(self) -> None:
        tasks = [*self._tasks, *self._counting.values(), *([self._renewing] if self._renewing else ())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with contextlib.suppress(*_FAILURES):
            async with self.database.transaction() as session:
                await GatewayLeaseRepository(session).end(self.name)

    @property
    def is_fenced(self) -> bool:
        """Our lease has run out: others may count without us, so we take nothing on that counts as money."""
        return time.monotonic() > self._fenced_at_s

    async def unfenced(self) -> None:
        """Returns when our lease counts: who stood still for longer than it lasts renews it, once for all who ask.
        Raises what the database raises."""
        while self.is_fenced:
            if self._renewing is None or self._renewing.done():
                self._renewing = asyncio.create_task(self._renew_lease(), name="gateway's lease, late")
            await asyncio.shield(self._renewing)

    async def recount(self, reservation: Reservation) -> None:
        """Returns when the reservation's windows are known. Raises StoreUnavailable when that takes WAIT_S; the count
        goes on."""
        assert reservation.spend is not None
        key = (reservation.tenant_id, *(window.name for window in limited(reservation.spend.windows)))
        counting = self._counting.get(key)
        if counting is None:
            counting = self._counting[key] = asyncio.create_task(self._count(reservation), name="recount")
            counting.add_done_callback(lambda _: self._counting.pop(key, None))
        try:
            async with patience(WAIT_S):
                await asyncio.shield(counting)
        except _FAILURES as error:
            raise StoreUnavailable("what was spent is being counted") from error

    async def _count(self, reservation: Reservation) -> None:
        """Again when the store loses what was said meanwhile."""
        async with asyncio.timeout(GIVE_UP_S):
            while not await self._counted(reservation):
                _log.warning("the store was lost while spend was counted; once more")

    async def _counted(self, reservation: Reservation) -> bool:
        assert reservation.spend is not None
        mark, tenant_id = secrets.token_hex(8), reservation.tenant_id
        await self.quota.mark(tenant_id, mark)
        await self._muster()
        await self._drained()
        held = {request_id: json.loads(hold) for request_id, hold in (await self.quota.held(tenant_id)).items()}
        unbooked = [request_id for request_id, hold in held.items() if not hold["booked"]]
        windows = replace(reservation.spend, windows=tuple(limited(reservation.spend.windows)))
        wanted = replace(reservation, spend=windows)
        sums, attempts = await self._ledger(wanted, unbooked)
        booked = (held.keys() - set(unbooked)) | await self._booked(reservation, attempts)
        return await self.quota.open(wanted, sums, booked, mark)

    async def _ledger(self, wanted: Reservation, unbooked: list[str]) -> tuple[dict[str, int], list[BookedAttempt]]:
        """The sums by window, and the records among them of what is still held: of one moment."""
        assert wanted.spend is not None
        async with self.database.session() as session:
            repository = SpendRepository(session)
            await one_snapshot(session)
            sums = {window.name: await repository.spent(wanted.tenant_id, window) for window in wanted.spend.windows}
            return sums, await repository.attempts(unbooked)

    async def _booked(self, reservation: Reservation, attempts: list[BookedAttempt]) -> set[str]:
        """Tells the store of records that it has not heard of; the requests that are now booked there."""
        booked = set()
        for found in attempts:
            spent = replace(reservation, request_id=found.request_id, scopes=(), spend=Spend(found.price_picousd, ()))
            if await self.quota.book(spent, found.attempt):
                booked.add(found.request_id)
        return booked

    # ── musters ──────────────────────────────────────────────────────────────────────────────────────

    async def _muster(self) -> None:
        """Returns when every gateway with a lease has said what it holds, or its lease has run out."""
        await self._announce()
        token = secrets.token_hex(8)
        if not await self._others():
            return
        try:
            await self.redis.hset(MUSTERS_KEY, token, self.name)  # pyright: ignore[reportGeneralTypeIssues]
            while await self._others() - await self._answers(token):
                await asyncio.sleep(ASK_AGAIN_S)
                await self.redis.hset(MUSTERS_KEY, token, self.name)  # pyright: ignore[reportGeneralTypeIssues]
        finally:
            with contextlib.suppress(*_FAILURES):
                await self.redis.hdel(MUSTERS_KEY, token)  # pyright: ignore[reportGeneralTypeIssues]

    async def _others(self) -> set[str]:
        async with self.database.session() as session:
            return await GatewayLeaseRepository(session).alive() - {self.name}

    async def _answers(self, token: str) -> set[str]:
        names = await self.redis.smembers(f"{MUSTERS_KEY}:{token}")  # pyright: ignore[reportGeneralTypeIssues]
        return {name.decode() if isinstance(name, bytes) else name for name in names}

    async def _answer_musters(self) -> None:
        """Again as long as they last: a store that is lost once more has forgotten what was said."""
        called = await self.redis.hkeys(MUSTERS_KEY)  # pyright: ignore[reportGeneralTypeIssues]
        if called:
            await self._announce()
        for token in called:
            key = f"{MUSTERS_KEY}:{token.decode() if isinstance(token, bytes) else token}"
            await self.redis.sadd(key, self.name)  # pyright: ignore[reportGeneralTypeIssues]
            await self.redis.expire(key, ANSWERED_FOR_S)

    async def _announce(self) -> None:
        """What we hold, by the limits as they are now."""
        await self.directory.refresh()
        running, ended = list(self.tickets), self.tickets.ended()
        for ticket in (*running, *ended):
            ticket.count(self.directory.budget_of(ticket.reservation.key_id))
        await self.quota.renew([ticket.reservation for ticket in running if ticket.reservation.spend])
        await self.quota.announce_ended([ticket.spent() for ticket in ended if ticket.reservation.spend])

    async def all_drained(self) -> bool:
        """Whether no journal has a record that is not booked; returns when those that had are done. Raises EngineLost.
        False: an engine is away, and nobody knows what it has."""
        if not all(engine.connected for engine in self.engines()):
            return False
        await self._drained()
        return True

    async def _drained(self) -> None:
        """Returns when every record that a connected engine has journaled by now is booked. What an absent one has is
        counted when it comes."""
        await asyncio.gather(*(self._drained_of(engine) for engine in self.engines() if engine.connected))

    async def _drained_of(self, engine: EngineClient) -> None:
        target, booked = (await self._records(engine))[0], -1
        while booked < target:
            records, unacked = await self._records(engine)
            booked = records - unacked
            if booked < target:
                await asyncio.sleep(ASK_AGAIN_S)

    async def _records(self, engine: EngineClient) -> tuple[int, int]:
        told = {family.name: family.samples[0][2] for family in await engine.stats() if family.samples}
        return int(told[_RECORDS]), int(told[_UNACKED])

    # ── the lease ────────────────────────────────────────────────────────────────────────────────────

    async def _renew_lease(self) -> None:
        """Fenced from a moment on that lies before others think so."""
        fenced_at_s = time.monotonic() + LEASE_S - 1
        async with self.database.within().transaction() as session:
            await GatewayLeaseRepository(session).renew(self.name, int(LEASE_S * 1e9))
        self._fenced_at_s = max(self._fenced_at_s, fenced_at_s)

    async def _forever(self, work: Callable, every_s: float) -> None:
        """Soon again after a failure, which may have taken as long as the database waits for a lock."""
        wait_s = every_s
        while True:
            await asyncio.sleep(wait_s)
            wait_s = every_s
            try:
                await work()
            except _FAILURES:
                wait_s = POLL_S
