"""Soft limits: an event as soon as what is booked passes a threshold, once a period and threshold, exactly there."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import or_
from sqlmodel import col, select
from sqlmodel.ext.asyncio.session import AsyncSession

from tenants.bulk import insert_new
from tenants.database import locked
from tenants.events import emit
from tenants.quota.budgets import Window, period_of
from tenants.quota.spend_repository import SpendRepository
from tenants.settled import Booked
from tenants.tables import SpendTotal, Tenant, Wallet


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
        is_watched = or_(col(Tenant.spend_limit_picousd_per_month).is_not(None), col(Tenant.is_prepaid))
        query = select(Tenant).where(col(Tenant.tenant_id).in_(sorted(spent)), is_watched).order_by(Tenant.tenant_id)
        for tenant in (await session.exec(query)).all():
            if tenant.spend_limit_picousd_per_month is not None:
                await _alert_of_budget(session, tenant, spent[tenant.tenant_id])
            if tenant.is_prepaid:
                await _alert_of_credit(session, tenant)


async def _alert_of_budget(session: AsyncSession, tenant: Tenant, spent: Sequence[tuple[int, int]]) -> None:
    limit = tenant.spend_limit_picousd_per_month
    assert limit is not None
    periods = {unix_ns: period_of(unix_ns, tenant.time_zone, tenant.billing_anchor_day) for unix_ns, _ in spent}
    for period in sorted(set(periods.values()), key=lambda each: each.start_unix_ns):
        more = sum(picousd for unix_ns, picousd in spent if periods[unix_ns] == period)
        window = Window(f"tenant@{period.label}", limit, tenant.changed_unix_ns, period)
        before, now = await _add(session, tenant.tenant_id, window, more)
        for percent in tenant.spend_alerts:
            if before * 100 < percent * limit <= now * 100 or (limit == 0 and before == 0):
                data = {"period": period.label, "percent": percent, "limit_picousd": limit, "spent_picousd": now}
                await emit(session, tenant.tenant_id, "budget.alert", data, once=f"{period.label}/{percent}")


async def _alert_of_credit(session: AsyncSession, tenant: Tenant) -> None:
    """Once a threshold as long as nothing is granted: more credit begins anew."""
    wallet = await session.get(Wallet, tenant.tenant_id)
    if wallet is None or not wallet.granted_picousd:
        return
    for percent in tenant.spend_alerts:
        if wallet.spent_picousd * 100 >= percent * wallet.granted_picousd:
            data = {
                "percent": percent,
                "granted_picousd": wallet.granted_picousd,
                "spent_picousd": wallet.spent_picousd,
            }
            once = f"{wallet.num_grants}/{percent}"
            await emit(session, tenant.tenant_id, "credit.low", data, once=once)


async def _add(session: AsyncSession, tenant_id: str, window: Window, more: int) -> tuple[int, int]:
    """(before, now) of the window's total. One that is new, or older than its limit, is summed from the records: those
    of this transaction are among them, those of another one that waits for this row are not."""
    await insert_new(session, SpendTotal, ("tenant_id", "period", "stamp"), [(tenant_id, window.period.label, -1)])
    query = select(SpendTotal).where(SpendTotal.tenant_id == tenant_id, SpendTotal.period == window.period.label)
    row = (await locked(session, query)).one()
    before, row.picousd = row.picousd, row.picousd + more
    if row.stamp < window.stamp:
        before, row.stamp = 0, window.stamp
        row.picousd = await SpendRepository(session).spent(tenant_id, window)
    session.add(row)
    await session.flush()
    return before, row.picousd
