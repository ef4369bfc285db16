"""What the ledger knows of spend windows, and who else may know more."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sqlalchemy import func, or_
from sqlmodel import col, delete, select
from sqlmodel.ext.asyncio.session import AsyncSession

from tenants.money import exact_sum, total
from tenants.quota.budgets import Window
from tenants.tables import GatewayLease, RequestRecord

_CHUNK = 500
_CLOCKS_NS = 86_400 * 10**9  # a request may end before it begins by no more than clocks of several hosts differ


@dataclass(frozen=True, slots=True)
class BookedAttempt:
    request_id: str
    attempt: int
    price_picousd: int


class SpendRepository:
    """Reads of one moment: begin with ``one_snapshot`` (database.py) where sums and records must agree."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def spent(self, tenant_id: str, window: Window) -> int:
        """Picousd of the window's requests that are booked: those that began in its period."""
        period = window.period
        records = select(*exact_sum(col(RequestRecord.price_picousd), "price")).where(
            RequestRecord.tenant_id == tenant_id,
            RequestRecord.finished_unix_ns >= period.start_unix_ns - _CLOCKS_NS,  # for the index
            RequestRecord.admitted_unix_ns >= period.start_unix_ns,
            RequestRecord.admitted_unix_ns < period.end_unix_ns,
            *_of_scope(window.name.rpartition("@")[0]),
        )
        return total((await self._session.exec(records)).one(), "price")

    async def attempts(self, request_ids: Iterable[str]) -> list[BookedAttempt]:
        """The records of these requests."""
        ids, found = list(request_ids), []
        for start in range(0, len(ids), _CHUNK):
            query = select(RequestRecord.request_id, RequestRecord.attempt, RequestRecord.price_picousd)
            chunk = query.where(col(RequestRecord.request_id).in_(ids[start : start + _CHUNK]))
            found += [BookedAttempt(*row) for row in (await self._session.exec(chunk)).all()]
        return found


class GatewayLeaseRepository:
    """The gateways that may hold reservations."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def renew(self, name: str, for_ns: int) -> None:
        await self._session.merge(GatewayLease(name=name, until_unix_ns=await self._now_ns() + for_ns))
        await self._session.flush()

    async def end(self, name: str) -> None:
        await self._session.exec(delete(GatewayLease).where(col(GatewayLease.name) == name))

    async def alive(self) -> set[str]:
        query = select(GatewayLease.name).where(GatewayLease.until_unix_ns > await self._now_ns())
        return set((await self._session.exec(query)).all())

    async def _now_ns(self) -> int:
        """By the database's clock: those of several hosts may differ by more than a lease. (SQLite serves one host.)"""
        if self._session.get_bind().dialect.name != "postgresql":
            return time.time_ns()
        seconds = func.extract("epoch", func.clock_timestamp())
        return int((await self._session.exec(select(seconds))).one() * 10**9)


def _of_scope(scope: str) -> Sequence:
    """Conditions on a record: `tenant`, `key:ID`, `key:ID:model:NAME`, `key:ID:adapter:NAME`."""
    if scope == "tenant":
        return ()
    _, key_id, *rest = scope.split(":", 3)
    of_key = col(RequestRecord.key_id) == key_id
    if not rest:
        return (of_key,)
    kind, name = rest
    if kind == "model":
        return (of_key, col(RequestRecord.base_model) == name)
    model = col(RequestRecord.model)
    is_named = or_(model == name, func.substr(model, 1, len(name) + 1) == f"{name}@")
    return (of_key, col(RequestRecord.adapter_version_id) != "", is_named)
