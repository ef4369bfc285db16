"""Usage records that can't be booked although they are ours: kept whole, told in the audit log, in nobody's way."""

import time
from collections.abc import Sequence

import msgspec
from sqlmodel.ext.asyncio.session import AsyncSession

from tenants.audit_log import SERVER, AuditLog, Change
from tenants.bulk import insert_telling
from tenants.settled import SettledRequest
from tenants.tables import UnbookedRecord

UNKNOWN_RATE_CARD = "unknown_rate_card"
_COLUMNS = ("request_id", "attempt", "tenant_id", "reason", "record", "set_aside_unix_ns")


async def set_aside(session: AsyncSession, requests: Sequence[SettledRequest], reason: str) -> int:
    """In the caller's transaction, each once for ever; how many were new. Takes the audit log's lock if there is any:
    call it last."""
    rows = sorted(_row(request, reason) for request in requests)
    new = await insert_telling(session, UnbookedRecord, _COLUMNS, rows, ("request_id", "attempt"))
    for request_id, attempt, tenant_id, *_ in rows:
        if (request_id, attempt) in new:
            told = {"attempt": attempt, "tenant_id": tenant_id, "reason": reason}
            await AuditLog(session).append(SERVER, Change("ledger.set_aside", request_id, None, told))
    return len(new)


def _row(request: SettledRequest, reason: str) -> tuple:
    context = request.context
    record = msgspec.json.encode(request).decode()
    return context.request_id, context.attempt, context.tenant_id, reason, record, time.time_ns()
