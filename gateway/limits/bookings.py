"""From the ledger to the spend windows: what a request came to, as soon as its record is booked for good."""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import event
from sqlmodel.ext.asyncio.session import AsyncSession

from gateway.limits.limiter import Limiter
from tenants.directory import Directory
from tenants.quota.budgets import Spend
from tenants.quota.quota import Reservation
from tenants.settled import Booked


@dataclass(slots=True)
class Bookings:
    """A fold of the ledger that tells the store after the commit: what is rolled back was never told."""

    limiter: Limiter
    directory: Directory

    async def fold(self, session: AsyncSession, booked: Sequence[Booked]) -> None:
        told = [(spent, one.request.context.attempt) for one in booked if (spent := self._spent(one)) is not None]
        if told:
            event.listen(session.sync_session, "after_commit", lambda _: self._tell(told), once=True)

    def _tell(self, told: Sequence[tuple[Reservation, int]]) -> None:
        for reservation, attempt in told:
            self.limiter.book(reservation, attempt)

    def _spent(self, booked: Booked) -> Reservation | None:
        """What it counts in the windows of its tenant's limits; None where there is none."""
        context = booked.request.context
        budget = self.directory.budget_of(context.key_id)
        adapter = context.model.partition("@")[0] if context.adapter_version_id else ""
        began = context.admitted_unix_ns
        windows = budget.windows(context.key_id, context.base_model, adapter, began) if budget else ()
        if not windows:
            return None
        picousd = sum(charge.amount_picousd for charge in booked.charges)
        return Reservation(context.request_id, 0, context.tenant_id, context.key_id, 0, (), Spend(picousd, windows))
