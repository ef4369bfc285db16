"""Records that were set aside, and what an operator does about one: settle it once its rate card is there, or write it
off. A write-off is an event of the audit log: the caller appends it, in the same transaction."""

from typing import Literal, TypeAlias

import msgspec
from sqlmodel import col, select
from sqlmodel.ext.asyncio.session import AsyncSession

from tenants.audit_log import Change
from tenants.database import locked
from tenants.errors import InvalidValue, NotFound
from tenants.ledger import Ledger
from tenants.settled import SettledRequest
from tenants.tables import AuditEvent, RequestRecord, UnbookedRecord

State: TypeAlias = Literal["open", "settled", "written_off"]
SETTLE, WRITE_OFF = "ledger.settle", "ledger.write_off"
MAX_REASON_LENGTH = 200


class UnbookedRepository:
    """Bound to a session, never committing. Of two operators at once one comes after the other."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def page(self, limit: int) -> list[tuple[UnbookedRecord, State]]:
        """At most ``limit``, the newest first."""
        query = select(UnbookedRecord).order_by(
            col(UnbookedRecord.set_aside_unix_ns).desc(), col(UnbookedRecord.request_id), col(UnbookedRecord.attempt)
        )
        return [(row, await self.state(row)) for row in (await self._session.exec(query.limit(limit))).all()]

    async def lock(self, request_id: str, attempt: int) -> UnbookedRecord:
        """Raises NotFound."""
        query = select(UnbookedRecord).where(UnbookedRecord.request_id == request_id, UnbookedRecord.attempt == attempt)
        row = (await locked(self._session, query)).first()
        if row is None:
            raise NotFound(f"attempt {attempt} of request {request_id} was not set aside")
        return row

    async def state(self, row: UnbookedRecord) -> State:
        if await self._session.get(RequestRecord, (row.request_id, row.attempt)) is not None:
            return "settled"
        query = select(AuditEvent.after).where(AuditEvent.action == WRITE_OFF, AuditEvent.target == row.request_id)
        attempts = [msgspec.json.decode(after)["attempt"] for after in (await self._session.exec(query)).all()]
        return "written_off" if row.attempt in attempts else "open"

    async def settle(self, row: UnbookedRecord, ledger: Ledger) -> Change | None:
        """Books it as it would have been; None: it is booked already. Raises InvalidValue as long as its rate card is
        unknown."""
        if await self.state(row) == "settled":
            return None
        await ledger.post(self._session, [settled_of(row)], {})
        if await self.state(row) != "settled":
            raise InvalidValue("request_id", "is of a request whose rate card is still unknown: it may be written off")
        return Change(SETTLE, row.request_id, None, _named(row))

    async def write_off(self, row: UnbookedRecord, reason: str) -> Change | None:
        """It is never to be charged; None: it was written off before. Raises InvalidValue for one that is booked."""
        if not 0 < len(reason) <= MAX_REASON_LENGTH or not reason.isprintable():
            raise InvalidValue("reason", f"is printable text of at most {MAX_REASON_LENGTH} characters")
        state = await self.state(row)
        if state == "settled":
            raise InvalidValue("request_id", "is of a request that is booked: a credit note gives back")
        return Change(WRITE_OFF, row.request_id, None, _named(row) | {"reason": reason}) if state == "open" else None


def settled_of(row: UnbookedRecord) -> SettledRequest:
    return msgspec.json.decode(row.record, type=SettledRequest)


def _named(row: UnbookedRecord) -> dict[str, str | int]:
    return {"attempt": row.attempt, "tenant_id": row.tenant_id, "set_aside_for": row.reason}
