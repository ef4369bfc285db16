"""Tenants, keys and prices: one small class an aggregate, bound to a session, never committing.

Every read of what a tenant owns takes ``tenant_id``; what is not the caller's is absent. Adapters and records
have files of their own; their classes are importable from here.
"""

import secrets
import time
from collections.abc import Mapping
from typing import Any
from zoneinfo import ZoneInfo

from sqlalchemy import func
from sqlalchemy.exc import IntegrityError
from sqlmodel import col, select
from sqlmodel.ext.asyncio.session import AsyncSession

from tenants.adapter_repository import AdapterRepository, NewVersion
from tenants.errors import InvalidValue, NameTaken, NotFound
from tenants.keys import Minted
from tenants.pricing import PriceKey, RateCard
from tenants.quota import Limits
from tenants.record_repository import RecordRepository, UsageBucket, UsageQuery, UsageRow
from tenants.tables import MAX_NAME_LENGTH, ApiKey, OperatorKey, RateCardItem, RateCardVersion, Tenant

__all__ = [
    "AdapterRepository",
    "KeyRepository",
    "NewVersion",
    "RateCardRepository",
    "RecordRepository",
    "TenantRepository",
    "UsageBucket",
    "UsageQuery",
    "UsageRow",
]

CLASSES = ("interactive", "standard", "batch")
CACHE_POLICIES = ("private", "shared", "off")
OPERATOR_SCOPES = ("read", "billing", "admin")
RATE_LIMITS = ("requests_per_minute", "tokens_per_minute", "concurrent_requests")
_SPEND = "spend_limit_picousd_per_month"
_SMALLEST = {  # limits that are never null, with their least value
    "default_output_tokens": 1,
    "max_adapters": 0,
    "max_adapter_rank": 0,
    "max_adapter_bytes": 0,
    "max_storage_bytes": 0,
    "weight": 1,
}
_CHOICES = {"max_class": CLASSES, "cache_policy": CACHE_POLICIES}
TENANT_LIMITS = (*RATE_LIMITS, _SPEND, *_SMALLEST, *_CHOICES)
KEY_LIMITS = (*RATE_LIMITS, _SPEND)
_MAX_INTEGER = (1 << 63) - 1


class TenantRepository:
    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def create(self, name: str, time_zone: str = "UTC", limits: Mapping[str, Any] | None = None) -> Tenant:
        """Raises NameTaken, InvalidValue."""
        _check_name(name)
        _check_time_zone(time_zone)
        if await self.by_name(name) is not None:
            raise NameTaken(f"a tenant is called {name!r} already")
        now = await _change_stamp(self._session)
        tenant = Tenant(
            tenant_id=new_id("ten"), name=name, time_zone=time_zone, created_unix_ns=now, changed_unix_ns=now
        )
        _set_limits(tenant, limits or {}, TENANT_LIMITS)
        self._session.add(tenant)
        try:
            await self._session.flush()
        except IntegrityError:  # PostgreSQL: another transaction took it since
            raise NameTaken(f"a tenant is called {name!r} already") from None
        return tenant

    async def get(self, tenant_id: str) -> Tenant | None:
        return await self._session.get(Tenant, tenant_id)

    async def by_name(self, name: str) -> Tenant | None:
        return (await self._session.exec(select(Tenant).where(Tenant.name == name))).first()

    async def list_all(self) -> list[Tenant]:
        """For operators: by name."""
        return list((await self._session.exec(select(Tenant).order_by(Tenant.name))).all())

    async def set_limits(self, tenant_id: str, changes: Mapping[str, Any]) -> Tenant:
        """Changes only the limits named. Raises NotFound, InvalidValue (unknown field or bad value)."""
        return await self._change(tenant_id, lambda tenant: _set_limits(tenant, changes, TENANT_LIMITS))

    async def set_status(self, tenant_id: str, status: str) -> Tenant:
        """``suspended`` acts like a revocation of all keys; ``active`` undoes it."""
        _check_choice("status", status, ("active", "suspended"))
        return await self._change(tenant_id, lambda tenant: setattr(tenant, "status", status))

    async def set_time_zone(self, tenant_id: str, time_zone: str) -> Tenant:
        """The zone of its days and months. Raises NotFound, InvalidValue."""
        _check_time_zone(time_zone)
        return await self._change(tenant_id, lambda tenant: setattr(tenant, "time_zone", time_zone))

    async def changed_since(self, unix_ns: int) -> list[Tenant]:
        """For the directory: tenants changed at or after that stamp."""
        return list((await self._session.exec(select(Tenant).where(Tenant.changed_unix_ns >= unix_ns))).all())

    async def _change(self, tenant_id: str, change) -> Tenant:
        tenant = await self.get(tenant_id)
        if tenant is None:
            raise NotFound(f"no tenant {tenant_id}")
        change(tenant)
        tenant.changed_unix_ns = await _change_stamp(self._session)
        self._session.add(tenant)
        await self._session.flush()
        return tenant


class KeyRepository:
    """Tenants' keys, and the operators'. It stores digests; the text of a key is its caller's to show and forget."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def create(  # one argument a column
        self,
        tenant_id: str,
        minted: Minted,
        digest: bytes,
        *,
        name: str = "",
        flow_class: str = "standard",
        expires_unix_ns: int | None = None,
    ) -> ApiKey:
        """Raises NotFound (no such tenant), InvalidValue."""
        _check_choice("class", flow_class, CLASSES)
        _check_length("name", name)
        if await TenantRepository(self._session).get(tenant_id) is None:
            raise NotFound(f"no tenant {tenant_id}")
        now = await _change_stamp(self._session)
        key = ApiKey(
            key_id=minted.key_id,
            tenant_id=tenant_id,
            digest=digest,
            name=name,
            last4=minted.last4,
            flow_class=flow_class,
            created_unix_ns=now,
            changed_unix_ns=now,
            expires_unix_ns=expires_unix_ns,
        )
        self._session.add(key)
        await self._session.flush()
        return key

    async def get(self, tenant_id: str, key_id: str) -> ApiKey | None:
        query = select(ApiKey).where(ApiKey.tenant_id == tenant_id, ApiKey.key_id == key_id)
        return (await self._session.exec(query)).first()

    async def list_all(self, tenant_id: str) -> list[ApiKey]:
        """By age, the revoked ones too."""
        query = select(ApiKey).where(ApiKey.tenant_id == tenant_id).order_by(col(ApiKey.created_unix_ns))
        return list((await self._session.exec(query)).all())

    async def owner(self, key_id: str) -> str | None:
        """For operators, who name a key by its id alone: the tenant that has it."""
        return (await self._session.exec(select(ApiKey.tenant_id).where(ApiKey.key_id == key_id))).first()

    async def set_limits(self, tenant_id: str, key_id: str, changes: Mapping[str, Any]) -> ApiKey:
        """Changes only the limits named. Raises NotFound, InvalidValue."""
        return await self._change(tenant_id, key_id, lambda key: _set_limits(key, changes, KEY_LIMITS))

    async def revoke(self, tenant_id: str, key_id: str) -> ApiKey:
        """For ever; a second time changes nothing. Raises NotFound."""
        return await self._change(tenant_id, key_id, _revoke)

    async def changed_since(self, unix_ns: int) -> list[ApiKey]:
        """For the directory, of all tenants."""
        return list((await self._session.exec(select(ApiKey).where(ApiKey.changed_unix_ns >= unix_ns))).all())

    async def create_operator(self, minted: Minted, digest: bytes, name: str, scopes: list[str]) -> OperatorKey:
        """Raises InvalidValue for an unknown scope."""
        _check_name(name)
        for scope in scopes:
            _check_choice("scopes", scope, OPERATOR_SCOPES)
        now = await _change_stamp(self._session)
        key = OperatorKey(
            key_id=minted.key_id,
            digest=digest,
            name=name,
            last4=minted.last4,
            scopes=sorted(set(scopes)),
            created_unix_ns=now,
            changed_unix_ns=now,
        )
        self._session.add(key)
        await self._session.flush()
        return key

    async def list_operators(self) -> list[OperatorKey]:
        query = select(OperatorKey).order_by(col(OperatorKey.created_unix_ns))
        return list((await self._session.exec(query)).all())

    async def revoke_operator(self, key_id: str) -> OperatorKey:
        """For ever. Raises NotFound."""
        key = await self._session.get(OperatorKey, key_id)
        return await self._changed(key, key_id, _revoke)

    async def operators_changed_since(self, unix_ns: int) -> list[OperatorKey]:
        """For the directory."""
        query = select(OperatorKey).where(OperatorKey.changed_unix_ns >= unix_ns)
        return list((await self._session.exec(query)).all())

    async def _change(self, tenant_id: str, key_id: str, change) -> ApiKey:
        return await self._changed(await self.get(tenant_id, key_id), key_id, change)

    async def _changed(self, key, key_id: str, change):
        if key is None:
            raise NotFound(f"no key {key_id}")
        change(key)
        key.changed_unix_ns = await _change_stamp(self._session)
        self._session.add(key)
        await self._session.flush()
        return key


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


def new_id(kind: str) -> str:
    """``ten_`` (or adv_, rc_) and 24 hex digits of chance."""
    return f"{kind}_{secrets.token_hex(12)}"


async def _change_stamp(session: AsyncSession) -> int:
    """Now in ns, but later than every stamp given so far, wherever the clock has jumped."""
    latest = 0
    for table in (Tenant, ApiKey, OperatorKey):
        found = (await session.exec(select(func.max(table.changed_unix_ns)))).one()
        latest = max(latest, found or 0)
    return max(time.time_ns(), latest + 1)


def _revoke(key: ApiKey | OperatorKey) -> None:
    key.revoked_unix_ns = key.revoked_unix_ns or time.time_ns()


def _set_limits(row: Tenant | ApiKey, changes: Mapping[str, Any], allowed: tuple[str, ...]) -> None:
    for field, value in changes.items():
        if field not in allowed:
            raise InvalidValue(field, f"is no limit here; limits are {', '.join(allowed)}")
        if field in RATE_LIMITS:
            Limits(**{field: value})
        elif field in _CHOICES:
            _check_choice(field, value, _CHOICES[field])
        elif not (field == _SPEND and value is None):
            _check_integer(field, value, _SMALLEST.get(field, 0))
        setattr(row, field, value)


def _check_integer(field: str, value: Any, smallest: int) -> None:
    if type(value) is not int or not smallest <= value <= _MAX_INTEGER:
        raise InvalidValue(field, f"is a whole number from {smallest}")


def _check_choice(field: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise InvalidValue(field, f"is one of {', '.join(choices)}")


def _check_name(name: str) -> None:
    _check_length("name", name)
    if not name.strip() or not name.isprintable():
        raise InvalidValue("name", "is printable text")


def _check_length(field: str, text: str) -> None:
    if len(text.encode()) > MAX_NAME_LENGTH:
        raise InvalidValue(field, f"has at most {MAX_NAME_LENGTH} bytes")


def _check_time_zone(name: str) -> None:
    try:
        ZoneInfo(name)
    except (ValueError, OSError, KeyError) as error:
        raise InvalidValue("time_zone", f"{name!r} is no IANA time zone") from error
