"""What the ledger knows of spend windows, and who else may know more."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, or_
from sqlmodel import col, delete, select
from sqlmodel.ext.asyncio.session import AsyncSession

from tenants.money import exact_sum, total
from tenants.periods import Period
from tenants.quota.budgets import KEPT_MS, Window
from tenants.stamps import clock_ns
from tenants.tables import GatewayLease, RequestRecord, UsageRollup, UsageSeries
from tenants.usage.cover import WIDTHS_S
from tenants.usage.rollups import SUMMED_METERS

_CHUNK = 500
_CLOCKS_NS = 86_400 * 10**9  # a request may end before it begins by no more than clocks of several hosts differ
_DAY_S = max(WIDTHS_S)
_NS = 10**9
_KEPT_NS = KEPT_MS * 10**6


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
        """Picousd of the window's requests that are booked: those that began in its period.

        What ended on a whole day (UTC) of the period, but for the first day and a bit, began in it: such days are
        summed up already. Of what ended before them, or behind them, each record says when it began."""
        first_s, last_s = _whole_days(window.period)
        records = await self._of_records(tenant_id, window, first_s * _NS, last_s * _NS)
        return records + await self._of_days(tenant_id, window, first_s, last_s)

    async def _of_records(self, tenant_id: str, window: Window, first_ns: int, last_ns: int) -> int:
        period, finished = window.period, col(RequestRecord.finished_unix_ns)
        records = select(*exact_sum(col(RequestRecord.price_picousd), "price")).where(
            RequestRecord.tenant_id == tenant_id,
            finished >= period.start_unix_ns - _CLOCKS_NS,  # for the index
            or_(finished < first_ns, finished >= last_ns),
            RequestRecord.admitted_unix_ns >= period.start_unix_ns,
            RequestRecord.admitted_unix_ns < period.end_unix_ns,
            *_of_scope(window.name, RequestRecord),
        )
        return total((await self._session.exec(records)).one(), "price")

    async def _of_days(self, tenant_id: str, window: Window, first_s: int, last_s: int) -> int:
        limbs = [f"{meter}_{limb}" for meter in SUMMED_METERS for limb in ("quotient", "remainder")]
        days: Any = select(*(func.sum(getattr(UsageRollup, name)).label(name) for name in limbs))
        summed = days.join(UsageSeries, col(UsageSeries.series_id) == col(UsageRollup.series_id)).where(
            UsageSeries.tenant_id == tenant_id,
            UsageRollup.width_s == _DAY_S,
            UsageRollup.start_s >= first_s,
            UsageRollup.start_s < last_s,
            *_of_scope(window.name, UsageSeries),
        )
        row = (await self._session.exec(summed)).one()
        return sum(total(row, meter) for meter in SUMMED_METERS)

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
        await self._session.merge(GatewayLease(name=name, until_unix_ns=await clock_ns(self._session) + for_ns))
        await self._session.flush()

    async def end(self, name: str) -> None:
        await self._session.exec(delete(GatewayLease).where(col(GatewayLease.name) == name))

    async def alive(self) -> set[str]:
        query = select(GatewayLease.name).where(GatewayLease.until_unix_ns > await clock_ns(self._session))
        return set((await self._session.exec(query)).all())


def _whole_days(period: Period) -> tuple[int, int]:
    """[from, until) in Unix seconds, whole days of UTC that may be none: what ended then began in the period, since
    nothing runs for longer than a sum is kept, and no two clocks differ by more than a day."""
    first_s = -(-(period.start_unix_ns + _KEPT_NS) // (_DAY_S * _NS)) * _DAY_S
    return first_s, max(first_s, (period.end_unix_ns - _CLOCKS_NS) // (_DAY_S * _NS) * _DAY_S)


def _of_scope(window: str, table: type[RequestRecord] | type[UsageSeries]) -> Sequence:
    """Conditions of a window's name on a row: its scope is `tenant`, `key:ID`, `key:ID:model:NAME` or
    `key:ID:adapter:NAME`."""
    scope = window.rpartition("@")[0]
    if scope == "tenant":
        return ()
    _, key_id, *rest = scope.split(":", 3)
    of_key = col(table.key_id) == key_id
    if not rest:
        return (of_key,)
    kind, name = rest
    if kind == "model":
        return (of_key, col(table.base_model) == name)
    model = col(table.model)
    is_named = or_(model == name, func.substr(model, 1, len(name) + 1) == f"{name}@")
    return (of_key, col(table.adapter_version_id) != "", is_named)
