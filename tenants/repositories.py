"""Tenants and prices: one small class an aggregate, bound to a session, never committing.

Every read of what a tenant owns takes ``tenant_id``; what is not the caller's is absent. Keys, adapters and records
have files of their own.
"""

import re
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import bindparam, delete
from sqlalchemy.exc import IntegrityError
from sqlmodel import col, select
from sqlmodel.ext.asyncio.session import AsyncSession

from tenants.database import locked
from tenants.errors import InvalidValue, NameTaken, NotFound
from tenants.limits import (
    check_anchor_day,
    check_choice,
    check_name,
    check_time_zone,
    set_limits,
)
from tenants.pricing import PriceKey, RateCard
from tenants.stamps import change_stamp, new_id
from tenants.tables import (
    AdapterAlias,
    AdapterVersion,
    ApiKey,
    Event,
    IdempotentRequest,
    RateCardItem,
    RateCardVersion,
    Tenant,
    WebhookDelivery,
    WebhookEndpoint,
)

_ID_PREFIX = "ten_"
NOTICE_NS = 10**9  # of new prices: every gateway hears of a change within a second (directory.py)
_OWN = (AdapterAlias, AdapterVersion, ApiKey, IdempotentRequest, WebhookDelivery, WebhookEndpoint)
_HELD = (
    select(Tenant.tenant_id)
    .where(col(Tenant.tenant_id).in_(bindparam("tenant_ids", expanding=True)))
    .order_by(col(Tenant.tenant_id))
    .with_for_update(key_share=True, read=True)
)


class TenantRepository:
    """Tenants that are there. A deleted one is absent from every read but those that say so."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def create(self, name: str, time_zone: str = "UTC", limits: Mapping[str, Any] | None = None) -> Tenant:
        """Raises NameTaken, InvalidValue."""
        _check_tenant_name(name)
        check_time_zone(time_zone)
        now = await change_stamp(self._session)
        tenant = Tenant(
            tenant_id=new_id("ten"), name=name, time_zone=time_zone, created_unix_ns=now, changed_unix_ns=now
        )
        set_limits(tenant, limits or {})
        return await self._named(tenant, name)

    async def get(self, tenant_id: str) -> Tenant | None:
        tenant = await self._session.get(Tenant, tenant_id)
        return tenant if tenant and tenant.deleted_unix_ns is None else None

    async def lock(self, tenant_id: str) -> Tenant:
        """As it is now: one change after another, and nothing new of its own until this transaction ends. Whoever also
        locks what a tenant owns locks the tenant first. Raises NotFound."""
        query = select(Tenant).where(Tenant.tenant_id == tenant_id, col(Tenant.deleted_unix_ns).is_(None))
        tenant = (await locked(self._session, query)).first()
        if tenant is None:
            raise NotFound(f"no tenant {tenant_id}")
        return tenant

    async def hold(self, tenant_ids: Collection[str]) -> None:
        """Nobody changes these until this transaction ends; others may hold them too. A booking does so first: whoever
        sets a first limit then finds what is booked, and who books after that finds the limit. (A writer on SQLite is
        alone anyway.)"""
        if tenant_ids and self._session.get_bind().dialect.name == "postgresql":
            await (await self._session.connection()).execute(_HELD, {"tenant_ids": sorted(tenant_ids)})

    async def ever_was(self, tenant_id: str) -> bool:
        """Also of a deleted one, whose ledger stays."""
        return await self.even_deleted(tenant_id) is not None

    async def even_deleted(self, tenant_id: str) -> Tenant | None:
        """A deleted one has no name."""
        return await self._session.get(Tenant, tenant_id)

    async def by_name(self, name: str) -> Tenant | None:
        return (await self._session.exec(select(Tenant).where(Tenant.name == name))).first()

    async def list_all(self) -> list[Tenant]:
        """For operators: by name."""
        query = select(Tenant).where(col(Tenant.deleted_unix_ns).is_(None)).order_by(Tenant.name)
        return list((await self._session.exec(query)).all())

    async def list_deleted(self) -> list[str]:
        """The ids of those whose rows and files are to be gone."""
        query = select(Tenant.tenant_id).where(col(Tenant.deleted_unix_ns).is_not(None))
        return list((await self._session.exec(query)).all())

    async def set_limits(self, tenant_id: str, changes: Mapping[str, Any]) -> Tenant:
        """Changes only the limits named. Raises NotFound, InvalidValue (unknown field or bad value)."""
        return await self._change(tenant_id, lambda tenant: set_limits(tenant, changes))

    async def set_status(self, tenant_id: str, status: str) -> Tenant:
        """``suspended`` acts like a revocation of all keys; ``active`` undoes it."""
        check_choice("status", status, ("active", "suspended"))
        return await self._change(tenant_id, lambda tenant: setattr(tenant, "status", status))

    async def set_time_zone(self, tenant_id: str, time_zone: str) -> Tenant:
        """The zone of its days and months. Raises NotFound, InvalidValue."""
        check_time_zone(time_zone)
        return await self._change(tenant_id, lambda tenant: setattr(tenant, "time_zone", time_zone))

    async def set_billing_anchor_day(self, tenant_id: str, day: int) -> Tenant:
        """Its months begin on that day, or on their last where they are shorter. Raises NotFound, InvalidValue."""
        check_anchor_day(day)
        return await self._change(tenant_id, lambda tenant: setattr(tenant, "billing_anchor_day", day))

    async def set_billing_reference(self, tenant_id: str, reference: str | None) -> Tenant:
        """What the operator's billing system calls it; None: nothing. Raises NotFound, InvalidValue."""
        if reference is not None and not re.fullmatch(r"[!-~]{1,64}", reference):
            raise InvalidValue("billing_reference", "has 1 to 64 printable ASCII characters, and no blanks")
        return await self._change(tenant_id, lambda tenant: setattr(tenant, "billing_reference", reference))

    async def billing_references(self) -> dict[str, str]:
        """By tenant, the deleted ones too: what they owe is still to be told."""
        query = select(Tenant.tenant_id, Tenant.billing_reference).where(col(Tenant.billing_reference).is_not(None))
        return {tenant_id: reference for tenant_id, reference in (await self._session.exec(query)).all() if reference}

    async def rename(self, tenant_id: str, name: str) -> Tenant:
        """A name is what people call it; its id, and all that hangs on it, stays. Raises NotFound, NameTaken."""
        _check_tenant_name(name)
        tenant = await self._change(tenant_id, lambda _: None)
        return tenant if tenant.name == name else await self._named(tenant, name)

    async def delete(self, tenant_id: str) -> list[str]:
        """Takes its keys, adapters, webhooks and name away for ever; the hashes of the files that are now nobody's.

        Records and ledger entries stay for the books, and so does the bare row that they name. Raises NotFound.
        """
        tenant = await self._change(tenant_id, _bury)
        versions = select(AdapterVersion.sha256).where(AdapterVersion.tenant_id == tenant_id)
        orphans = sorted(set((await self._session.exec(versions)).all()))
        for event in await self._lock_webhooks(tenant_id):
            await self._session.delete(event)
        for table in _OWN:
            await self._session.exec(delete(table).where(col(table.tenant_id) == tenant.tenant_id))
        told = col(Event.number).is_not(None)
        await self._session.exec(delete(Event).where(col(Event.tenant_id) == tenant_id, told))
        return orphans

    async def _lock_webhooks(self, tenant_id: str) -> Sequence[Event]:
        """In the order in which deliveries.py locks them: events that are not told, then endpoints; those events."""
        untold = select(Event).where(Event.tenant_id == tenant_id, col(Event.number).is_(None))
        untold = untold.order_by(col(Event.occurred_unix_ns), col(Event.event_id))
        events = (await locked(self._session, untold)).all()
        endpoints = select(WebhookEndpoint).where(WebhookEndpoint.tenant_id == tenant_id)
        await locked(self._session, endpoints.order_by(WebhookEndpoint.endpoint_id))
        return events

    async def changed_since(self, unix_ns: int) -> list[Tenant]:
        """For the directory: tenants changed at or after that stamp, the deleted ones too."""
        return list((await self._session.exec(select(Tenant).where(Tenant.changed_unix_ns >= unix_ns))).all())

    async def _change(self, tenant_id: str, change) -> Tenant:
        tenant = await self.lock(tenant_id)
        change(tenant)
        tenant.changed_unix_ns = await change_stamp(self._session)
        self._session.add(tenant)
        await self._session.flush()
        return tenant

    async def _named(self, tenant: Tenant, name: str) -> Tenant:
        if await self.by_name(name) is not None:
            raise NameTaken(f"a tenant is called {name!r} already")
        tenant.name = name
        self._session.add(tenant)
        try:
            await self._session.flush()
        except IntegrityError:  # PostgreSQL: another transaction took it since
            raise NameTaken(f"a tenant is called {name!r} already") from None
        return tenant


def _check_tenant_name(name: str) -> None:
    check_name(name)
    if name.startswith(_ID_PREFIX):
        raise InvalidValue("name", f"does not begin with {_ID_PREFIX}: ids do")


def _bury(tenant: Tenant) -> None:
    tenant.deleted_unix_ns = time.time_ns()
    tenant.status = "suspended"
    tenant.name = tenant.tenant_id  # unique, and free for nobody else


class RateCardRepository:
    """Versions of the prices. A published one never changes; the past is never repriced."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def publish(self, prices: Mapping[PriceKey, int], effective_unix_ns: int, now_unix_ns: int) -> RateCard:
        """The next version. It takes effect in the future, the very first one may at once; raises InvalidValue."""
        existing = await self.list_all()
        latest = max((card.effective_unix_ns for card in existing), default=0)
        if existing and effective_unix_ns <= max(now_unix_ns, latest):
            raise InvalidValue("effective_from", "lies in the future, and after every earlier version's")
        version = max((card.version for card in existing), default=0) + 1
        card = RateCard(new_id("rc"), version, effective_unix_ns, dict(prices))
        self._session.add(
            RateCardVersion(
                rate_card_id=card.rate_card_id,
                version=version,
                effective_unix_ns=effective_unix_ns,
                created_unix_ns=now_unix_ns,
            )
        )
        try:
            await self._session.flush()
        except IntegrityError:  # PostgreSQL: another transaction has published that version since
            raise InvalidValue("effective_from", "another version was published at this moment") from None
        for (meter, model, flow_class), price in card.prices.items():
            item = {"meter": meter, "model": model, "flow_class": flow_class, "price_picousd": price}
            self._session.add(RateCardItem(rate_card_id=card.rate_card_id, **item))
        await self._session.flush()
        return card

    async def revise(
        self, changes: Mapping[PriceKey, int | None], effective_unix_ns: int, now_unix_ns: int
    ) -> RateCard:
        """As ``publish``: the newest version's prices with these changes. None takes an item away: a more general one
        holds then. It takes effect NOTICE_NS from now or later, so that every gateway has heard of it by then: what
        one admits is charged at the prices that it knows."""
        if effective_unix_ns < now_unix_ns + NOTICE_NS:
            raise InvalidValue("effective_from", f"lies at least {NOTICE_NS // 10**9} s ahead, so that all hear of it")
        newest = (await self.list_all())[-1:]
        prices = {**(newest[0].prices if newest else {}), **changes}
        kept = {key: price for key, price in prices.items() if price is not None}
        return await self.publish(kept, effective_unix_ns, now_unix_ns)

    async def get(self, rate_card_id: str) -> RateCard | None:
        return next((card for card in await self.list_all() if card.rate_card_id == rate_card_id), None)

    async def list_all(self) -> list[RateCard]:
        """In the order in which they take effect."""
        query = select(RateCardVersion).order_by(col(RateCardVersion.effective_unix_ns))
        rows = (await self._session.exec(query)).all()  # first: a card committed since has items, but no row here
        prices: dict[str, dict[PriceKey, int]] = {}
        for item in (await self._session.exec(select(RateCardItem))).all():
            prices.setdefault(item.rate_card_id, {})[item.meter, item.model, item.flow_class] = item.price_picousd
        return [
            RateCard(row.rate_card_id, row.version, row.effective_unix_ns, prices[row.rate_card_id], row.currency)
            for row in rows
        ]
