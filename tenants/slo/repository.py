"""Objectives as they are kept, and their history. The caller owns the transaction."""

from collections.abc import Collection, Iterable
from dataclasses import fields

from sqlmodel import col, select
from sqlmodel.ext.asyncio.session import AsyncSession

from tenants.slo.objectives import Objective, Objectives
from tenants.tables import SloObjective

_FIELDS = tuple(each.name for each in fields(Objective))


class ObjectiveRepository:
    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def of(self, tenant_ids: Collection[str]) -> Objectives:
        """Every version of these tenants' objectives."""
        return Objectives(await self._versions(tenant_ids))

    async def history(self, tenant_id: str) -> list[Objective]:
        """Every version, in the order of model, class, SLI and number."""
        versions = await self._versions([tenant_id])
        return sorted(versions, key=lambda each: (*each.key, each.version))

    async def _versions(self, tenant_ids: Collection[str]) -> list[Objective]:
        query = select(SloObjective).where(col(SloObjective.tenant_id).in_(sorted(tenant_ids)))
        return [_objective(row) for row in await self._session.exec(query)]

    def add(self, objectives: Iterable[Objective], now_ns: int) -> None:
        """New versions, as they stand."""
        for each in objectives:
            values = {name: getattr(each, name) for name in _FIELDS}
            self._session.add(SloObjective(**values, created_unix_ns=now_ns))


def _objective(row: SloObjective) -> Objective:
    return Objective(**{name: getattr(row, name) for name in _FIELDS})
