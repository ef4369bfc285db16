"""Prepaid credit on the request path: held before the work, resolved by its record, given back when none can come."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from sqlalchemy.exc import SQLAlchemyError

from engine.client import EngineLost
from gateway.errors import ApiError
from gateway.limits.recount import Recount
from gateway.limits.tickets import Ticket
from tenants.database import Database
from tenants.quota.spend_repository import GatewayLeaseRepository
from tenants.quota.wallet import Hold, WalletRepository

SWEEP_EVERY_S = 30.0
YOUNG_S = 60.0  # a hold that a sweep does not look at
_log = logging.getLogger("gateway.limits.credit")
_FAILURES = (SQLAlchemyError, OSError, TimeoutError)


@dataclass(slots=True)
class Credit:
    """Costs a tenant that pays later nothing. ``recount`` knows which requests run, and what journals still have."""

    database: Database
    recount: Recount
    _sweeping: asyncio.Task[None] | None = field(default=None)

    async def start(self) -> None:
        self._sweeping = asyncio.create_task(self._keep_sweeping(), name="holds that nobody resolves")

    async def close(self) -> None:
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.gather(self._sweeping, return_exceptions=True)

    @contextlib.asynccontextmanager
    async def held(self, ticket: Ticket) -> AsyncIterator[None]:
        """Holds what a prepaid request may cost while it is not known what it does. Raises ApiError 402 and 503."""
        try:
            if not await self._ask(WalletRepository.reserve, self._hold(ticket, ticket.bound_picousd)):
                raise _exhausted(ticket)
            yield
        finally:
            if ticket.kind == "void":  # no record will come
                await asyncio.shield(self._void(ticket))

    async def extend(self, ticket: Ticket, more_picousd: int) -> bool:
        """False: not now and not later."""
        if not ticket.is_prepaid:
            return True
        with contextlib.suppress(ApiError):
            return await self._ask(WalletRepository.extend, self._hold(ticket, more_picousd))
        return False

    async def begin_attempt(self, ticket: Ticket, attempt: int) -> None:
        """Another dispatch of the same request. Raises ApiError 402 and 503."""
        ticket.attempt = attempt
        if ticket.is_prepaid and not await self._ask(
            WalletRepository.begin_attempt, self._hold(ticket, ticket.bound_picousd)
        ):
            raise _exhausted(ticket)

    def _hold(self, ticket: Ticket, picousd: int) -> Hold:
        reservation = ticket.reservation
        return Hold(reservation.tenant_id, reservation.request_id, ticket.attempt, self.recount.name, picousd)

    async def _ask(self, question, hold: Hold) -> bool:
        try:
            async with self.database.within().transaction() as session:
                return await question(WalletRepository(session), hold)
        except _FAILURES:
            raise ApiError("The ledger does not answer; try again.", code="billing_unavailable") from None

    async def _void(self, ticket: Ticket) -> None:
        """Where the database fails the sweep does it."""
        hold = self._hold(ticket, 0)
        with contextlib.suppress(*_FAILURES):
            async with self.database.within().transaction() as session:
                await WalletRepository(session).give_back(hold.tenant_id, hold.request_id, hold.attempt)

    async def _keep_sweeping(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_EVERY_S)
            with contextlib.suppress(*_FAILURES, EngineLost):
                await self.sweep()

    async def sweep(self) -> int:
        """Gives back holds of ours, and of gateways that are gone, whose requests have ended without a record: neither
        a gateway runs them nor has any journal one. While an engine is away it may, so nothing is given back."""
        older_ns = time.time_ns() - int(YOUNG_S * 1e9)
        async with self.database.session() as session:
            repository = WalletRepository(session)
            others = await GatewayLeaseRepository(session).alive() - {self.recount.name}
            names = sorted(await repository.holders() - others)
            stale = await repository.unresolved(names, older_ns) if names else []
        tickets = self.recount.tickets  # who has just ended may not be journaled yet
        ours = {ticket.reservation.request_id for ticket in (*tickets, *tickets.ended())}
        stale = [hold for hold in stale if hold.request_id not in ours]
        if not stale or not await self.recount.all_drained():
            return 0
        freed = 0
        async with self.database.transaction() as session:
            repository = WalletRepository(session)
            for hold in sorted(stale, key=lambda each: each.tenant_id):
                freed += await repository.give_back(hold.tenant_id, hold.request_id, hold.attempt)
        if freed:
            _log.warning("%d holds on credit are given back: no record of their requests can come", freed)
        return freed


def _exhausted(ticket: Ticket) -> ApiError:
    message = (
        f"The prepaid credit of this account can't hold this request of up to {ticket.reservation.tokens} tokens; "
        "a smaller max_tokens needs less."
    )
    return ApiError(message, code="credit_balance_exhausted")
