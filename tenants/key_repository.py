"""Keys: the tenants' and the operators'. Digests are stored; the text of a key is its caller's to show and forget."""

import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from sqlmodel import col, select
from sqlmodel.ext.asyncio.session import AsyncSession

from tenants.errors import InvalidValue, LastAdministrator, NotFound
from tenants.keys import NewKey
from tenants.limits import (
    CLASSES,
    KEY_LIMITS,
    KEY_SCOPES,
    OPERATOR_SCOPES,
    SCOPE_KINDS,
    ScopeKind,
    check_choice,
    check_expiry,
    check_label,
    check_name,
    check_scopes,
    set_limits,
    set_scoped_limits,
)
from tenants.stamps import change_stamp
from tenants.tables import ApiKey, OperatorKey, Tenant

_Key = TypeVar("_Key", ApiKey, OperatorKey)
_NS = 10**9


class KeyRepository:
    """Every method but ``owner`` and ``changed_since`` is about one tenant's keys only."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def create(  # one argument a column
        self,
        tenant_id: str,
        new: NewKey,
        *,
        name: str = "",
        flow_class: str = "standard",
        scopes: Sequence[str] = KEY_SCOPES,
        expires_unix_ns: int | None = None,
        is_demo: bool = False,
    ) -> ApiKey:
        """Raises NotFound (no such tenant), InvalidValue."""
        check_choice("class", flow_class, CLASSES)
        check_label("name", name)
        check_expiry(expires_unix_ns, time.time_ns())
        await self._lock_tenant(tenant_id)
        now = await change_stamp(self._session)
        key = ApiKey(
            key_id=new.minted.key_id,
            tenant_id=tenant_id,
            digest=new.digest,
            pepper=new.pepper,
            name=name,
            last4=new.minted.last4,
            flow_class=flow_class,
            scopes=check_scopes(scopes, KEY_SCOPES),
            is_demo=is_demo,
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
        """Changes only the limits named; with ``model`` or ``adapter`` among them, those for it alone.

        Raises NotFound, InvalidValue.
        """
        limits = dict(changes)
        scopes: list[tuple[ScopeKind, Any]] = [
            (kind, limits.pop(kind)) for kind in SCOPE_KINDS if limits.get(kind) is not None
        ]
        for kind in SCOPE_KINDS:
            limits.pop(kind, None)
        if len(scopes) > 1:
            raise InvalidValue("adapter", "goes without model: a limit is for one or for the other")

        def change(key: ApiKey) -> None:
            set_limits(key, limits) if not scopes else set_scoped_limits(key, *scopes[0], limits)

        return await self._change(tenant_id, key_id, change)

    async def rotate(self, tenant_id: str, key_id: str, new: NewKey, overlap_seconds: int) -> ApiKey:
        """A new key with all that the old one has but its text. The old one lives on for ``overlap_seconds`` at
        most; 0 revokes it. Raises NotFound, InvalidValue (revoked or expired)."""
        old = await self._change(tenant_id, key_id, _check_usable)
        same = {name: getattr(old, name) for name in ("name", "flow_class", "scopes", "expires_unix_ns", "is_demo")}
        key = await self.create(tenant_id, new, **same)
        set_limits(key, {name: getattr(old, name) for name in KEY_LIMITS})
        key.scoped_limits = old.scoped_limits
        self._session.add(key)
        await self._change(tenant_id, key_id, _retire(overlap_seconds))
        return key

    async def revoke(self, tenant_id: str, key_id: str) -> ApiKey:
        """For ever; a second time changes nothing. Raises NotFound."""
        return await self._change(tenant_id, key_id, _revoke)

    async def live_demo_keys(self) -> list[ApiKey]:
        """Of all tenants: those that a first start made for everybody to read."""
        query = select(ApiKey).where(col(ApiKey.is_demo), col(ApiKey.revoked_unix_ns).is_(None))
        return list((await self._session.exec(query)).all())

    async def changed_since(self, unix_ns: int) -> list[ApiKey]:
        """For the directory, of all tenants."""
        return list((await self._session.exec(select(ApiKey).where(ApiKey.changed_unix_ns >= unix_ns))).all())

    async def _change(self, tenant_id: str, key_id: str, change) -> ApiKey:
        query = select(ApiKey).where(ApiKey.tenant_id == tenant_id, ApiKey.key_id == key_id).with_for_update()
        return await _changed(self._session, (await self._session.exec(query)).first(), key_id, change)

    async def _lock_tenant(self, tenant_id: str) -> None:
        """No key is made while its tenant is being deleted."""
        query = select(Tenant).where(Tenant.tenant_id == tenant_id, col(Tenant.deleted_unix_ns).is_(None))
        if (await self._session.exec(query.with_for_update())).first() is None:
            raise NotFound(f"no tenant {tenant_id}")


class OperatorRepository:
    """Named operators of the ops port."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def create(
        self, new: NewKey, name: str, scopes: Sequence[str], expires_unix_ns: int | None = None
    ) -> OperatorKey:
        """Raises InvalidValue for an unknown scope."""
        check_name(name)
        check_expiry(expires_unix_ns, time.time_ns())
        now = await change_stamp(self._session)
        key = OperatorKey(
            key_id=new.minted.key_id,
            digest=new.digest,
            pepper=new.pepper,
            name=name,
            last4=new.minted.last4,
            scopes=check_scopes(scopes, OPERATOR_SCOPES),
            created_unix_ns=now,
            changed_unix_ns=now,
            expires_unix_ns=expires_unix_ns,
        )
        self._session.add(key)
        await self._session.flush()
        return key

    async def get(self, key_id: str) -> OperatorKey | None:
        return await self._session.get(OperatorKey, key_id)

    async def list_all(self) -> list[OperatorKey]:
        """By age, the revoked ones too."""
        query = select(OperatorKey).order_by(col(OperatorKey.created_unix_ns))
        return list((await self._session.exec(query)).all())

    async def rotate(self, key_id: str, new: NewKey, overlap_seconds: int) -> OperatorKey:
        """As KeyRepository.rotate."""
        old = await self._change(key_id, _check_usable)
        key = await self.create(new, old.name, old.scopes, old.expires_unix_ns)
        await self._change(key_id, _retire(overlap_seconds))
        return key

    async def revoke(self, key_id: str) -> OperatorKey:
        """For ever. Raises NotFound, LastAdministrator."""
        every = list((await self._session.exec(select(OperatorKey).with_for_update())).all())
        now = time.time_ns()
        if not any("admin" in key.scopes and _is_usable(key, now) for key in every if key.key_id != key_id):
            raise LastAdministrator("nobody else could administer this installation: make another admin key first")
        return await self._change(key_id, _revoke)

    async def changed_since(self, unix_ns: int) -> list[OperatorKey]:
        """For the directory."""
        query = select(OperatorKey).where(OperatorKey.changed_unix_ns >= unix_ns)
        return list((await self._session.exec(query)).all())

    async def _change(self, key_id: str, change) -> OperatorKey:
        query = select(OperatorKey).where(OperatorKey.key_id == key_id).with_for_update()
        return await _changed(self._session, (await self._session.exec(query)).first(), key_id, change)


async def _changed(session: AsyncSession, key: _Key | None, key_id: str, change) -> _Key:
    if key is None:
        raise NotFound(f"no key {key_id}")
    change(key)
    key.changed_unix_ns = await change_stamp(session)
    session.add(key)
    await session.flush()
    return key


def _is_usable(key: ApiKey | OperatorKey, now_unix_ns: int) -> bool:
    return key.revoked_unix_ns is None and (key.expires_unix_ns is None or key.expires_unix_ns > now_unix_ns)


def _check_usable(key: ApiKey | OperatorKey) -> None:
    if not _is_usable(key, time.time_ns()):
        raise InvalidValue("key", f"{key.key_id} is revoked or expired: create another")


def _revoke(key: ApiKey | OperatorKey) -> None:
    key.revoked_unix_ns = key.revoked_unix_ns or time.time_ns()


def _retire(overlap_seconds: int):
    """Ends a key so many seconds from now, or when it would have ended anyway."""

    def retire(key: ApiKey | OperatorKey) -> None:
        end = time.time_ns() + overlap_seconds * _NS
        if overlap_seconds:
            key.expires_unix_ns = min(end, key.expires_unix_ns or end)
        else:
            _revoke(key)

    return retire
