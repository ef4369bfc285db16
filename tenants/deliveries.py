"""Events on their way to webhook endpoints: told (numbered, and put on the way), claimed, settled.

Several processes may do all of this at once. What one has claimed is its alone until the lease ends; if it has died by
then another tries again: at least once, always under the event's one id. Times are the caller's ``now_ns``, so that of
several machines the clocks may differ by less than LEASE_NS.
"""

import random
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import bindparam, func
from sqlmodel import col, select
from sqlmodel.ext.asyncio.session import AsyncSession

from tenants.bulk import insert_new, remove
from tenants.database import locked
from tenants.events import TEST_KIND
from tenants.tables import Event, WebhookDelivery, WebhookEndpoint
from tenants.webhooks import set_status

_S = 10**9
LEASE_NS = 60 * _S  # an attempt takes seconds
RETRY_AFTER_S = (5, 300, 1800, 7200, 18_000, 36_000, 50_400, 72_000, 86_400)  # 3 days in all
JITTER = 0.2
GIVE_UP_NS = 5 * 86_400 * _S  # an endpoint that has failed for so long is disabled
KEEP_NS = 30 * 86_400 * _S  # finished deliveries are shown for so long
GONE = 410
TELL_AT_ONCE = 200
_COLUMNS = ("event_id", "endpoint_id", "tenant_id", "number", "state", "attempts", "due_unix_ns")
_MORE = {"last_status": 0, "last_error": ""}


@dataclass(frozen=True, slots=True)
class Claimed:
    """An event and the endpoint to which the claimer may bring it; ``lease`` proves the claim."""

    event: Event
    endpoint: WebhookEndpoint
    lease: int


@dataclass(frozen=True, slots=True)
class Attempt:
    """What came of it: an HTTP status, or 0 and a word for why there was none."""

    status: int
    error: str = ""

    @property
    def succeeded(self) -> bool:
        return 200 <= self.status < 300


@dataclass(frozen=True, slots=True)
class Busy:
    """Whom the claimer has as much to bring as it may."""

    endpoints: Collection[str] = ()
    tenants: Collection[str] = ()


NOBODY = Busy()


class Outlook(NamedTuple):
    """Whether there are events that nobody is told of yet, and deliveries to claim; how many deliveries wait in all."""

    untold: bool
    due: bool
    num_pending: int


_PENDING = col(WebhookDelivery.state) == "pending"
_DUE = (
    _PENDING,
    col(WebhookDelivery.due_unix_ns) <= bindparam("now_ns"),
    col(WebhookDelivery.endpoint_id).not_in(bindparam("busy_endpoints", expanding=True)),
    col(WebhookDelivery.tenant_id).not_in(bindparam("busy_tenants", expanding=True)),
)
_LOOK = select(
    select(Event.event_id).where(col(Event.number).is_(None)).exists(),
    select(WebhookDelivery.event_id).where(*_DUE).exists(),
    select(func.count()).select_from(WebhookDelivery).where(_PENDING).scalar_subquery(),
)


class DeliveryRepository:
    """Of all tenants; for the process that delivers."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def look(self, now_ns: int, busy: Busy = NOBODY) -> Outlook:
        """What there is to do. Each process asks every second: one statement, which is built already."""
        connection = await self._session.connection()
        return Outlook(*(await connection.execute(_LOOK, _asked(now_ns, busy))).one())

    async def tell(self, now_ns: int) -> int:
        """Numbers the events that have no number yet and puts them on the way; how many. Who does it at the same time
        waits for the rows, and finds them told: numbers are committed in their order."""
        untold = select(Event).where(col(Event.number).is_(None))
        untold = untold.order_by(col(Event.occurred_unix_ns), col(Event.event_id)).limit(TELL_AT_ONCE)
        events = list((await locked(self._session, untold)).all())
        if not events:
            return 0
        last = (await self._session.exec(select(func.max(Event.number)))).one() or 0
        for number, event in enumerate(events, last + 1):
            event.number = number
            self._session.add(event)
        await self._session.flush()
        await self._put_on_the_way(events, now_ns)
        return len(events)

    async def claim(self, now_ns: int, limit: int, busy: Busy = NOBODY) -> list[Claimed]:
        """At most one delivery of each tenant, the longest due first, out of the ``limit`` that are longest due."""
        due = (
            select(WebhookDelivery, Event, WebhookEndpoint)
            .join(Event, col(Event.event_id) == col(WebhookDelivery.event_id))
            .join(WebhookEndpoint, col(WebhookEndpoint.endpoint_id) == col(WebhookDelivery.endpoint_id))
            .where(*_DUE)
            .order_by(col(WebhookDelivery.due_unix_ns), col(WebhookDelivery.number))
            .limit(limit)
            .with_for_update(skip_locked=True, of=WebhookDelivery)
        )
        claimed: dict[str, Claimed] = {}
        for delivery, event, endpoint in (await self._session.exec(due, params=_asked(now_ns, busy))).all():
            if endpoint.tenant_id in claimed:
                continue
            delivery.due_unix_ns = now_ns + LEASE_NS
            self._session.add(delivery)
            claimed[endpoint.tenant_id] = Claimed(event, endpoint, delivery.due_unix_ns)
        return list(claimed.values())

    async def settle(self, claimed: Claimed, attempt: Attempt, now_ns: int) -> str:
        """Notes what came of a claim: the delivery's state from now on; '' when the claim was no longer one."""
        endpoint_id = claimed.endpoint.endpoint_id
        query = select(WebhookEndpoint).where(WebhookEndpoint.endpoint_id == endpoint_id)
        endpoint = (await locked(self._session, query)).first()
        of_event = select(WebhookDelivery).where(WebhookDelivery.event_id == claimed.event.event_id)
        delivery = (await locked(self._session, of_event.where(WebhookDelivery.endpoint_id == endpoint_id))).first()
        if endpoint is None or delivery is None or (delivery.state, delivery.due_unix_ns) != ("pending", claimed.lease):
            return ""
        delivery.attempts += 1
        delivery.last_status, delivery.last_error = attempt.status, attempt.error
        retry_ns = _retry_ns(delivery.attempts)
        delivery.due_unix_ns = now_ns
        if attempt.succeeded:
            delivery.state = "delivered"
        elif attempt.status == GONE or retry_ns is None:
            delivery.state = "failed"
        else:
            delivery.due_unix_ns += retry_ns
        self._session.add(delivery)
        await self._session.flush()
        await self._judge(endpoint, attempt, now_ns)
        return delivery.state

    async def purge(self, now_ns: int) -> int:
        """Removes what was finished long ago; how much that was. The events stay, but for tests."""
        finished = col(WebhookDelivery.state).in_(("delivered", "failed"))
        removed = await remove(
            self._session, WebhookDelivery, finished, col(WebhookDelivery.due_unix_ns) <= now_ns - KEEP_NS
        )
        on_the_way = select(WebhookDelivery.event_id).where(WebhookDelivery.event_id == col(Event.event_id)).exists()
        old = col(Event.occurred_unix_ns) <= now_ns - KEEP_NS
        await remove(self._session, Event, col(Event.kind) == TEST_KIND, old, ~on_the_way)
        return removed

    async def _put_on_the_way(self, events: Iterable[Event], now_ns: int) -> None:
        """One delivery for each enabled endpoint of the event's tenant that wants it. Endpoints stay until then, in the
        order in which others lock them; one that goes first is told nothing."""
        tenants = {event.tenant_id for event in events}
        query = select(WebhookEndpoint).where(
            col(WebhookEndpoint.tenant_id).in_(tenants), WebhookEndpoint.status == "enabled"
        )
        query = query.order_by(WebhookEndpoint.endpoint_id).with_for_update(read=True, key_share=True)
        endpoints = (await self._session.exec(query)).all()
        rows = [
            (event.event_id, endpoint.endpoint_id, event.tenant_id, event.number, "pending", 0, now_ns, 0, "")
            for event in events
            for endpoint in endpoints
            if _wants(endpoint, event)
        ]
        await insert_new(self._session, WebhookDelivery, (*_COLUMNS, *_MORE), rows)

    async def _judge(self, endpoint: WebhookEndpoint, attempt: Attempt, now_ns: int) -> None:
        """What the attempt says of the endpoint itself."""
        if attempt.succeeded:
            endpoint.failing_since_unix_ns = None
        elif attempt.status == GONE:
            await set_status(self._session, endpoint, "gone", now_ns)
        else:
            endpoint.failing_since_unix_ns = endpoint.failing_since_unix_ns or now_ns
            if now_ns - endpoint.failing_since_unix_ns >= GIVE_UP_NS:
                await set_status(self._session, endpoint, "failing", now_ns)
        self._session.add(endpoint)


def _asked(now_ns: int, busy: Busy) -> dict[str, Any]:
    return {"now_ns": now_ns, "busy_endpoints": list(busy.endpoints), "busy_tenants": list(busy.tenants)}


def _wants(endpoint: WebhookEndpoint, event: Event) -> bool:
    if endpoint.tenant_id != event.tenant_id:
        return False
    if event.kind == TEST_KIND:
        return event.endpoint_id == endpoint.endpoint_id
    return not endpoint.kinds or event.kind in endpoint.kinds


def _retry_ns(attempts: int) -> int | None:
    """How long to wait after so many attempts; None: no more. Spread, so that what failed together comes apart."""
    if attempts > len(RETRY_AFTER_S):
        return None
    return int(RETRY_AFTER_S[attempts - 1] * _S * random.uniform(1, 1 + JITTER))  # noqa: S311 (no secret)
