"""Events of a tenant: written in the transaction of what they tell, told afterwards (webhooks, and a list to read).

An event that a rolled-back transaction wrote never was; one that is committed is told, whoever crashes.
"""

import hashlib
import json
import time
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, get_args

from sqlalchemy import func
from sqlmodel import col, select
from sqlmodel.ext.asyncio.session import AsyncSession

from tenants.bulk import insert_new
from tenants.errors import LimitExceeded, NotFound
from tenants.stamps import is_id, new_id
from tenants.tables import Event

Kind: TypeAlias = Literal[
    "budget.alert",
    "credit.low",
    "invoice.issued",
    "adapter.ready",
    "adapter.deleted",
    "adapter.corrupt",
    "slo.burn",
    "slo.recovered",
]
KINDS: tuple[str, ...] = get_args(Kind)
TEST_KIND = "webhook.test"  # for one endpoint, when its owner asks
MAX_DATA_BYTES = 16 << 10
MAX_TESTS_PER_MINUTE = 20  # of a tenant
_MINUTE_NS = 60 * 10**9
_COLUMNS = ("event_id", "tenant_id", "kind", "data", "endpoint_id", "occurred_unix_ns")


async def emit(session: AsyncSession, tenant_id: str, kind: str, data: Mapping[str, Any], *, once: str = "") -> None:
    """Writes an event of one of KINDS in the caller's transaction. ``data`` is what JSON can hold, at most
    MAX_DATA_BYTES of it. Of the events of a tenant and kind with one ``once`` only the first ever is."""
    assert kind in KINDS, kind
    await _write(session, _id_of(tenant_id, kind, once) if once else new_id("evt"), tenant_id, kind, data, "")


async def emit_test(session: AsyncSession, tenant_id: str, endpoint_id: str) -> str:
    """Writes an event that only this endpoint is told of; its id. Raises LimitExceeded after many in a minute."""
    since = col(Event.occurred_unix_ns) > time.time_ns() - _MINUTE_NS
    lately = select(func.count()).where(Event.tenant_id == tenant_id, Event.kind == TEST_KIND, since)
    if (await session.exec(lately)).one() >= MAX_TESTS_PER_MINUTE:
        raise LimitExceeded("webhook tests per minute", MAX_TESTS_PER_MINUTE)
    event_id = new_id("evt")
    await _write(session, event_id, tenant_id, TEST_KIND, {"endpoint_id": endpoint_id}, endpoint_id)
    return event_id


async def _write(
    session: AsyncSession, event_id: str, tenant_id: str, kind: str, data: Mapping[str, Any], endpoint_id: str
) -> None:
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    assert len(text) <= MAX_DATA_BYTES, f"{kind}: {len(text)} bytes"
    await insert_new(session, Event, _COLUMNS, [(event_id, tenant_id, kind, text, endpoint_id, time.time_ns())])


def _id_of(tenant_id: str, kind: str, once: str) -> str:
    """One of few: 96 bits of a hash of length-prefixed fields."""
    fields = (field.encode("utf-8", "surrogatepass") for field in (tenant_id, kind, once))
    message = b"".join(len(field).to_bytes(4, "big") + field for field in fields)
    return f"evt_{hashlib.sha256(message).hexdigest()[:24]}"


class EventRepository:
    """A tenant's events as it reads them."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def number_of(self, tenant_id: str, event_id: str) -> int:
        """Of a told event. Raises NotFound."""
        query = select(Event.number).where(Event.tenant_id == tenant_id, Event.event_id == event_id)
        number = (await self._session.exec(query)).first() if is_id("evt", event_id) else None
        if number is None:
            raise NotFound(f"no event {event_id}")
        return number

    async def page(self, tenant_id: str, after: int, limit: int) -> list[Event]:
        """At most ``limit`` told events with a higher number, in their order."""
        query = select(Event).where(Event.tenant_id == tenant_id, col(Event.number) > after)
        return list((await self._session.exec(query.order_by(col(Event.number)).limit(limit))).all())
