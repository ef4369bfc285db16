"""Soft limits: an event as soon as what is booked passes a threshold, once a period and threshold, exactly there."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sqlalchemy import bindparam, or_, update
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlmodel import col, select
from sqlmodel.ext.asyncio.session import AsyncSession

from tenants.bulk import insert_new
from tenants.events import emit
from tenants.periods import Period
from tenants.quota.budgets import Window, period_of
from tenants.quota.spend_repository import SpendRepository
from tenants.settled import Booked
from tenants.tables import SpendTotal, Tenant, Wallet


class _Watched(NamedTuple):
    """A tenant with a limit, or with credit."""

    tenant_id: str
    limit_picousd: int | None
    is_prepaid: bool
    alerts: list[int]
    time_zone: str
    anchor_day: int
    changed_unix_ns: int


# Statements of columns, built once: each booking needs them.
_WATCHED = (
    select(  # pyright: ignore[reportCallIssue]
        col(Tenant.tenant_id),
        col(Tenant.spend_limit_picousd_per_month),
        col(Tenant.is_prepaid),
        col(Tenant.spend_alerts),
        col(Tenant.time_zone),
        col(Tenant.billing_anchor_day),
        col(Tenant.changed_unix_ns),
    )
    .where(
        col(Tenant.tenant_id).in_(bindparam("tenant_ids", expanding=True)),
        or_(col(Tenant.spend_limit_picousd_per_month).is_not(None), col(Tenant.is_prepaid)),
    )
    .order_by(col(Tenant.tenant_id))
)
_OF_MONTH = col(SpendTotal.tenant_id) == bindparam("of_tenant"), col(SpendTotal.period) == bindparam("of_period")
_TOTAL = select(SpendTotal.picousd, SpendTotal.stamp).where(*_OF_MONTH).with_for_update()
_SET_TOTAL = update(SpendTotal).where(*_OF_MONTH).values(picousd=bindparam("now_picousd"), stamp=bindparam("now_stamp"))


@dataclass(frozen=True, slots=True)
class AlertFold:
    """``budget.alert``: percent of a tenant's limit of the month; ``credit.low``: percent of its credit. It comes
    behind the wallets' fold."""

    async def fold(self, session: AsyncSession, booked: Sequence[Booked]) -> None:
        spent: dict[str, list[tuple[int, int]]] = defaultdict(list)  # tenant → (when it began, picousd)
        for one in booked:
            if picousd := sum(charge.amount_picousd for charge in one.charges):
                spent[one.request.context.tenant_id].append((one.request.context.admitted_unix_ns, picousd))
        if not spent:
            return
        connection = await session.connection()
        for row in (await connection.execute(_WATCHED, {"tenant_ids": sorted(spent)})).all():
            tenant = _Watched(*row)
            if tenant.limit_picousd is not None:
                await _alert_of_budget(session, tenant, spent[tenant.tenant_id])
            if tenant.is_prepaid:
                await _alert_of_credit(session, tenant)


async def alert_of_limits(session: AsyncSession, tenant_id: str, now_unix_ns: int) -> None:
    """Of limits that were just changed in this transaction, by whoever has locked the tenant: what is spent already may
    have passed them, and then no booking may ever come that says so."""
    connection = await session.connection()
    for row in (await connection.execute(_WATCHED, {"tenant_ids": [tenant_id]})).all():
        tenant = _Watched(*row)
        if tenant.limit_picousd is not None:
            window = _window(tenant, period_of(now_unix_ns, tenant.time_zone, tenant.anchor_day))
            await _emit_passed(session, tenant, window, 0, (await _add(session, tenant_id, window, 0)).now)
        if tenant.is_prepaid:
            await _alert_of_credit(session, tenant)


async def _alert_of_budget(session: AsyncSession, tenant: _Watched, spent: Sequence[tuple[int, int]]) -> None:
    months: dict[Period, int] = defaultdict(int)
    for unix_ns, picousd in spent:
        months[period_of(unix_ns, tenant.time_zone, tenant.anchor_day)] += picousd
    for period in sorted(months, key=lambda each: each.start_unix_ns):
        added = await _add(session, tenant.tenant_id, _window(tenant, period), months[period])
        # the limit was changed since we read it, and nothing of ours was in it
        if added.stamp > tenant.changed_unix_ns:
            changed = (await (await session.connection()).execute(_WATCHED, {"tenant_ids": [tenant.tenant_id]})).first()
            if changed is None or changed.spend_limit_picousd_per_month is None:
                return
            tenant = _Watched(*changed)
        await _emit_passed(session, tenant, _window(tenant, period), added.before, added.now)


def _window(tenant: _Watched, period: Period) -> Window:
    return Window(f"tenant@{period.label}", tenant.limit_picousd, tenant.changed_unix_ns, period)


async def _emit_passed(session: AsyncSession, tenant: _Watched, window: Window, before: int, now: int) -> None:
    limit, label = tenant.limit_picousd, window.period.label
    assert limit is not None
    for percent in tenant.alerts:
        if before * 100 < percent * limit <= now * 100 or (limit == 0 and before == 0 < now):
            data = {"period": label, "percent": percent, "limit_picousd": limit, "spent_picousd": now}
            await emit(session, tenant.tenant_id, "budget.alert", data, once=f"{label}/{percent}")


async def _alert_of_credit(session: AsyncSession, tenant: _Watched) -> None:
    """Once a threshold as long as nothing is granted: more credit begins anew."""
    wallet = await session.get(Wallet, tenant.tenant_id)
    if wallet is None or not wallet.granted_picousd:
        return
    for percent in tenant.alerts:
        if wallet.spent_picousd * 100 >= percent * wallet.granted_picousd:
            data = {
                "percent": percent,
                "granted_picousd": wallet.granted_picousd,
                "spent_picousd": wallet.spent_picousd,
            }
            once = f"{wallet.num_grants}/{percent}"
            await emit(session, tenant.tenant_id, "credit.low", data, once=once)


class _Added(NamedTuple):
    """A total before and now, and the stamp of the limit that it was last counted for."""

    before: int
    now: int
    stamp: int


async def _add(session: AsyncSession, tenant_id: str, window: Window, more: int) -> _Added:
    """To the window's total, which is nobody else's until the commit. One that is new, or older than its
    limit, is summed from the records: those of this transaction are among them, those of another one that waits for
    this row are not."""
    connection, month = await session.connection(), {"of_tenant": tenant_id, "of_period": window.period.label}
    before, stamp = await _total(session, connection, month)
    now = before + more
    if stamp < window.stamp:
        before, stamp = 0, window.stamp
        now = await SpendRepository(session).spent(tenant_id, window)
    await connection.execute(_SET_TOTAL, month | {"now_picousd": now, "now_stamp": stamp})
    return _Added(before, now, stamp)


async def _total(session: AsyncSession, connection: AsyncConnection, month: dict[str, str]) -> tuple[int, int]:
    """(picousd, stamp), locked."""
    row = (await connection.execute(_TOTAL, month)).first()
    if row is None:
        await insert_new(session, SpendTotal, ("tenant_id", "period", "stamp"), [(*month.values(), -1)])
        row = (await connection.execute(_TOTAL, month)).one()
    return row.picousd, row.stamp
