"""Objectives as they are kept, and their history. The caller owns the transaction."""

from collections.abc import Collection, Iterable
from dataclasses import fields, replace

from sqlalchemy import bindparam
from sqlmodel import col, select
from sqlmodel.ext.asyncio.session import AsyncSession

from tenants.slo.objectives import Objective, Objectives, effective_from
from tenants.stamps import new_id
from tenants.tables import SloObjective

_FIELDS = tuple(each.name for each in fields(Objective))
_VERSIONS = select(*(col(getattr(SloObjective, name)) for name in _FIELDS)).where(  # pyright: ignore[reportCallIssue]
    col(SloObjective.tenant_id).in_(bindparam("tenant_ids", expanding=True))
)
_IDENTITY = {"version_id": "", "version": 0, "effective_unix_ns": 0}


class ObjectiveRepository:
    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def of(self, tenant_ids: Collection[str]) -> Objectives:
        """Every version of these tenants' objectives."""
        return Objectives(await self._versions(tenant_ids))

    async def history(self, tenant_id: str) -> list[Objective]:
        """Every version, in the order of model, class, SLI and number."""
        return sorted(await self._versions([tenant_id]), key=lambda each: (*each.key, each.version))

    async def latest(self, tenant_id: str) -> list[Objective]:
        """The last version of each objective that has not ended; it may not be in force yet."""
        last = {each.key: each for each in await self.history(tenant_id)}
        return [each for each in last.values() if not each.retired]

    async def set(self, objectives: Iterable[Objective], now_ns: int) -> list[Objective]:
        """Makes each the next version of its line, in force from the next minute on. One that says what the last
        version says changes nothing. All of one tenant; returns them as they stand now."""
        drafts = list(objectives)
        last = {each.key: each for each in await self.history(drafts[0].tenant_id)}
        standing = [_following(draft, last.get(draft.key), now_ns) for draft in drafts]
        self.add((each for each in standing if each is not last.get(each.key)), now_ns)
        await self._session.flush()
        return standing

    async def retire(self, objectives: Iterable[Objective], now_ns: int) -> None:
        """From the next minute on nothing is promised there. ``objectives`` are last versions."""
        ends = (
            replace(_next(each, now_ns), version=each.version + 1, retired=True, description="") for each in objectives
        )
        self.add(ends, now_ns)
        await self._session.flush()

    def add(self, objectives: Iterable[Objective], now_ns: int) -> None:
        """New versions, as they stand."""
        for each in objectives:
            values = {name: getattr(each, name) for name in _FIELDS}
            self._session.add(SloObjective(**values, created_unix_ns=now_ns))

    async def _versions(self, tenant_ids: Collection[str]) -> list[Objective]:
        """Columns, no objects of the session, and a statement that is built already: the ledger asks at each batch."""
        connection = await self._session.connection()
        return [Objective(*row) for row in await connection.execute(_VERSIONS, {"tenant_ids": sorted(tenant_ids)})]


def _following(draft: Objective, last: Objective | None, now_ns: int) -> Objective:
    if last is not None and replace(last, **_IDENTITY) == replace(draft, **_IDENTITY):
        return last
    return replace(_next(draft, now_ns), version=last.version + 1 if last else 1)


def _next(objective: Objective, now_ns: int) -> Objective:
    return replace(objective, version_id=new_id("slo"), effective_unix_ns=effective_from(now_ns))
