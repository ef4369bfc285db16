"""What the ledger holds of a tenant and a time: the sums that invoices are made of, and those that they are held to."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import case
from sqlmodel import col, select
from sqlmodel.ext.asyncio.session import AsyncSession

from tenants.invoices.lines import LineKey, Sums
from tenants.money import exact_sum, total
from tenants.pricing import METERS
from tenants.tables import DetachedSum, Invoice, LedgerEntry, RequestRecord

_KEY = ("model", "base_model", "flow_class", "meter", "rate_card_id", "unit_price_picousd")


async def ledger_groups(session: AsyncSession, tenant_id: str, start_ns: int, end_ns: int) -> dict[LineKey, Sums]:
    """Entries of [start, end), by line."""
    keys: list[Any] = [getattr(LedgerEntry, name) for name in _KEY]
    sums: tuple[Any, ...] = (
        *exact_sum(LedgerEntry.quantity, "quantity"),
        *exact_sum(LedgerEntry.amount_picousd, "amount"),
    )
    query = select(*keys, *sums).where(*_within(tenant_id, start_ns, end_ns))
    rows = (await session.exec(query.group_by(*keys))).all()
    return {
        LineKey(*(getattr(row, name) for name in _KEY)): Sums(total(row, "quantity"), total(row, "amount"))
        for row in rows
    }


async def ledger_amount(session: AsyncSession, tenant_id: str, start_ns: int, end_ns: int) -> tuple[int, int]:
    """All of it in one sum, and what of it requests were charged."""
    amount = col(LedgerEntry.amount_picousd)
    of_requests = case((col(LedgerEntry.meter).in_(METERS), amount), else_=0)
    sums: tuple[Any, ...] = *exact_sum(amount, "everything"), *exact_sum(of_requests, "requests")
    row = (await session.exec(select(*sums).where(*_within(tenant_id, start_ns, end_ns)))).one()
    return total(row, "everything"), total(row, "requests")


async def receipts_amount(session: AsyncSession, tenant_id: str, start_ns: int, end_ns: int) -> int:
    """What the receipts of the same time say."""
    prices = exact_sum(RequestRecord.price_picousd, "price")
    within = select(*prices).where(
        RequestRecord.tenant_id == tenant_id,
        col(RequestRecord.finished_unix_ns) >= start_ns,
        col(RequestRecord.finished_unix_ns) < end_ns,
    )
    return total((await session.exec(within)).one(), "price")


async def detached_invoices(session: AsyncSession, invoices: Sequence[Invoice]) -> set[str]:
    """Those of which charges were detached: that was when all of them stood on invoices."""
    ids = [each.invoice_id for each in invoices]
    query = select(DetachedSum.owner).where(DetachedSum.kind == "charge", col(DetachedSum.owner).in_(ids))
    return set((await session.exec(query.distinct())).all())


def _within(tenant_id: str, start_ns: int, end_ns: int) -> tuple:
    time = col(LedgerEntry.occurred_unix_ns)
    return LedgerEntry.tenant_id == tenant_id, time >= start_ns, time < end_ns
