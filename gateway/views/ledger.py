"""Ledger entries of one tenant, as the operator reads them."""

from typing import Annotated, Any

import msgspec
from sqlmodel import col, select
from sqlmodel.ext.asyncio.session import AsyncSession

from tenants.tables import LedgerEntry

MAX_ENTRIES = 1000
_NS = 10**9


Seconds = Annotated[int, msgspec.Meta(ge=0, lt=1 << 33)]


class EntryQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Newest first; None filters nothing. ``start_time`` ≤ time < ``end_time``, in Unix seconds."""

    tenant_id: str
    request_id: str | None = None
    key_id: str | None = None
    meter: str | None = None
    start_time: Seconds | None = None
    end_time: Seconds | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=MAX_ENTRIES)] = 100
    offset: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)] = 0


async def entries(session: AsyncSession, query: EntryQuery) -> list[LedgerEntry]:
    """At most ``limit`` + 1 entries of that tenant: the last only shows that there are more."""
    found = select(LedgerEntry).where(LedgerEntry.tenant_id == query.tenant_id)
    for name in ("request_id", "key_id", "meter"):
        if (value := getattr(query, name)) is not None:
            found = found.where(col(getattr(LedgerEntry, name)) == value)
    if query.start_time is not None:
        found = found.where(col(LedgerEntry.occurred_unix_ns) >= query.start_time * _NS)
    if query.end_time is not None:
        found = found.where(col(LedgerEntry.occurred_unix_ns) < query.end_time * _NS)
    newest = found.order_by(col(LedgerEntry.occurred_unix_ns).desc(), col(LedgerEntry.entry_id))
    return list((await session.exec(newest.limit(query.limit + 1).offset(query.offset))).all())


def entry_body(entry: LedgerEntry) -> dict[str, Any]:
    """An entry as JSON: every column, under the name it has there."""
    return {"id": entry.entry_id, "object": "ledger_entry", **entry.model_dump(exclude={"entry_id"})}
