"""Adapters: immutable versions, and names that move between them."""

import secrets
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass

from sqlalchemy import func, update
from sqlmodel import col, select
from sqlmodel.ext.asyncio.session import AsyncSession

from tenants.errors import LimitExceeded, NotFound, VersionConflict
from tenants.repositories import TenantRepository
from tenants.tables import AdapterAlias, AdapterVersion, Tenant


@dataclass(frozen=True, slots=True)
class NewVersion:
    """What an upload found out about its bytes."""

    sha256: str
    base_model: str
    lora_rank: int
    target_modules: list[str]
    num_pairs: int
    size_bytes: int
    warnings: list[str]


class AdapterRepository:
    """Publishing, moving and deleting names. Every method but ``all_in_use`` is about one tenant's adapters only."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def publish(
        self, tenant_id: str, name: str, fields: NewVersion, expected_version: int | None = None
    ) -> AdapterVersion:
        """The next version of ``name``, to which the name moves in the same transaction.

        ``expected_version`` is the one that the name must have now (0 = must be new). Numbers are never used
        again, even after a deletion. Raises VersionConflict, LimitExceeded (adapters, storage), NotFound (tenant).
        """
        tenant = await self._lock(tenant_id)
        alias = await self._alias(tenant_id, name)
        _expect(name, alias, expected_version)
        await self._check_room(tenant, fields, is_new_name=alias is None)
        newest = select(func.max(AdapterVersion.version)).where(
            AdapterVersion.tenant_id == tenant_id, AdapterVersion.name == name
        )
        version = AdapterVersion(
            adapter_version_id=f"adv_{secrets.token_hex(12)}",
            tenant_id=tenant_id,
            name=name,
            version=((await self._session.exec(newest)).one() or 0) + 1,
            created_unix_ns=time.time_ns(),
            sha256=fields.sha256,
            base_model=fields.base_model,
            lora_rank=fields.lora_rank,
            target_modules=fields.target_modules,
            num_pairs=fields.num_pairs,
            size_bytes=fields.size_bytes,
            warnings=fields.warnings,
        )
        self._session.add(version)
        await self._session.flush()
        await self._point(alias, version)
        return version

    async def rollback(
        self, tenant_id: str, name: str, version: int, expected_version: int | None = None
    ) -> AdapterVersion:
        """Moves the name to a version that it had before. Raises NotFound, VersionConflict."""
        await self._lock(tenant_id)
        alias = await self._alias(tenant_id, name)
        target = await self.resolve(tenant_id, name, version)
        if alias is None or target is None:
            raise NotFound(f"no adapter {name}@{version}")
        _expect(name, alias, expected_version)
        await self._point(alias, target)
        return target

    async def resolve(self, tenant_id: str, name: str, version: int | None = None) -> AdapterVersion | None:
        """What ``NAME`` or ``NAME@VERSION`` means now; None when absent, deleted or another tenant's."""
        query = select(AdapterVersion).where(
            AdapterVersion.tenant_id == tenant_id,
            AdapterVersion.name == name,
            col(AdapterVersion.deleted_unix_ns).is_(None),
        )
        if version is None:
            query = query.join(AdapterAlias, _is_current())
        else:
            query = query.where(AdapterVersion.version == version)
        return (await self._session.exec(query)).first()

    async def list_current(self, tenant_id: str) -> list[AdapterVersion]:
        """The version that each name means now, by name."""
        query = (
            select(AdapterVersion)
            .join(AdapterAlias, _is_current())
            .where(AdapterVersion.tenant_id == tenant_id)
            .order_by(AdapterVersion.name)
        )
        return list((await self._session.exec(query)).all())

    async def versions(self, tenant_id: str, name: str) -> list[AdapterVersion]:
        """All live versions of a name, oldest first; empty when there is no such name."""
        query = (
            select(AdapterVersion)
            .where(
                AdapterVersion.tenant_id == tenant_id,
                AdapterVersion.name == name,
                col(AdapterVersion.deleted_unix_ns).is_(None),
            )
            .order_by(col(AdapterVersion.version))
        )
        return list((await self._session.exec(query)).all())

    async def get_by_id(self, tenant_id: str, adapter_version_id: str) -> AdapterVersion | None:
        """Also a deleted one: receipts name it."""
        query = select(AdapterVersion).where(
            AdapterVersion.tenant_id == tenant_id, AdapterVersion.adapter_version_id == adapter_version_id
        )
        return (await self._session.exec(query)).first()

    async def delete(self, tenant_id: str, name: str) -> list[AdapterVersion]:
        """Takes the name and all its versions out of use; returns them. Raises NotFound.

        Their bytes may still be another name's: ask ``unused`` before deleting a blob.
        """
        await self._lock(tenant_id)
        alias = await self._alias(tenant_id, name)
        if alias is None:
            raise NotFound(f"no adapter {name!r}")
        doomed = await self.versions(tenant_id, name)
        await self._session.delete(alias)
        for version in doomed:
            version.deleted_unix_ns = time.time_ns()
            self._session.add(version)
        await self._session.flush()
        return doomed

    async def delete_version(self, tenant_id: str, name: str, version: int) -> AdapterVersion:
        """Takes one version out of use. Raises NotFound, VersionConflict when the name means it now."""
        await self._lock(tenant_id)
        alias = await self._alias(tenant_id, name)
        doomed = await self.resolve(tenant_id, name, version)
        if alias is None or doomed is None:
            raise NotFound(f"no adapter {name}@{version}")
        if alias.version == version:
            raise VersionConflict(name, version, alias.version)
        doomed.deleted_unix_ns = time.time_ns()
        self._session.add(doomed)
        await self._session.flush()
        return doomed

    async def unused(self, tenant_id: str, hashes: Collection[str]) -> list[str]:
        """Those that no live version of the tenant has, and, until this transaction ends, none will get: its
        publications wait. The time to unlink blobs."""
        with suppress(NotFound):  # a tenant that is gone uses nothing
            await self._lock(tenant_id)
        return [sha256 for sha256 in hashes if not await self.is_used(tenant_id, sha256)]

    async def all_in_use(self) -> set[tuple[str, str]]:
        """(tenant, sha256) of every live version of every tenant: for who looks after the stores, not for callers."""
        query = select(AdapterVersion.tenant_id, AdapterVersion.sha256).where(
            col(AdapterVersion.deleted_unix_ns).is_(None)
        )
        return set((await self._session.exec(query.distinct())).all())

    async def is_used(self, tenant_id: str, sha256: str) -> bool:
        """Whether a live version of this tenant has these bytes."""
        query = select(AdapterVersion.version).where(
            AdapterVersion.tenant_id == tenant_id,
            AdapterVersion.sha256 == sha256,
            col(AdapterVersion.deleted_unix_ns).is_(None),
        )
        return (await self._session.exec(query.limit(1))).first() is not None

    async def stored_bytes(self, tenant_id: str) -> int:
        """Bytes of the tenant's live adapters; equal bytes count once."""
        once = (
            select(func.max(AdapterVersion.size_bytes).label("size"))
            .where(AdapterVersion.tenant_id == tenant_id, col(AdapterVersion.deleted_unix_ns).is_(None))
            .group_by(AdapterVersion.sha256)
            .subquery()
        )
        return int((await self._session.exec(select(func.coalesce(func.sum(once.c.size), 0)))).one())

    async def _check_room(self, tenant: Tenant, fields: NewVersion, *, is_new_name: bool) -> None:
        names = select(func.count()).select_from(AdapterAlias).where(AdapterAlias.tenant_id == tenant.tenant_id)
        if is_new_name and (await self._session.exec(names)).one() >= tenant.max_adapters:
            raise LimitExceeded("max_adapters", tenant.max_adapters)
        more = 0 if await self.is_used(tenant.tenant_id, fields.sha256) else fields.size_bytes
        if await self.stored_bytes(tenant.tenant_id) + more > tenant.max_storage_bytes:
            raise LimitExceeded("max_storage_bytes", tenant.max_storage_bytes)

    async def _lock(self, tenant_id: str) -> Tenant:
        """One writer a tenant: FOR UPDATE on PostgreSQL; a SQLite transaction has the write lock already."""
        return await TenantRepository(self._session).lock(tenant_id)

    async def _alias(self, tenant_id: str, name: str) -> AdapterAlias | None:
        return await self._session.get(AdapterAlias, (tenant_id, name), populate_existing=True)

    async def _point(self, alias: AdapterAlias | None, target: AdapterVersion) -> None:
        """Moves the name from where ``alias`` saw it, and from nowhere else."""
        now = time.time_ns()
        if alias is None:
            fields = {"tenant_id": target.tenant_id, "name": target.name}
            self._session.add(AdapterAlias(**fields, version=target.version, changed_unix_ns=now))
            await self._session.flush()
            return
        seen = alias.version
        moved = await self._session.exec(
            update(AdapterAlias)
            .where(
                col(AdapterAlias.tenant_id) == target.tenant_id,
                col(AdapterAlias.name) == target.name,
                col(AdapterAlias.version) == seen,
            )
            .values(version=target.version, changed_unix_ns=now)
        )
        if moved.rowcount != 1:
            raise VersionConflict(target.name, seen, target.version)


def _is_current():
    return (
        (col(AdapterAlias.tenant_id) == col(AdapterVersion.tenant_id))
        & (col(AdapterAlias.name) == col(AdapterVersion.name))
        & (col(AdapterAlias.version) == col(AdapterVersion.version))
    )


def _expect(name: str, alias: AdapterAlias | None, expected_version: int | None) -> None:
    found = 0 if alias is None else alias.version
    if expected_version is not None and expected_version != found:
        raise VersionConflict(name, expected_version, found)
