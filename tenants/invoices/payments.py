"""What of invoiced charges was debited from prepaid credit, where the wallet's holds of those requests say so.

What was debited below zero is in it: the wallet claims it with the next grant. Adapters' hours are never debited: they
are due, and so is what was used before the first grant.
"""

from collections.abc import Sequence

from sqlalchemy import and_
from sqlmodel import col, select
from sqlmodel.ext.asyncio.session import AsyncSession

from tenants.money import exact_sum, total
from tenants.tables import Invoice, InvoicePayment, RequestRecord, Wallet, WalletHold


async def payments_of(session: AsyncSession, invoice: Invoice, earlier: Sequence[Invoice]) -> list[InvoicePayment]:
    """For the invoice's own month, and for what came late of earlier ones, of the moment of its lines."""
    if await session.get(Wallet, invoice.tenant_id) is None:
        return []
    found = []
    for month in (invoice, *earlier):
        amount = await _debited(session, month) - await _invoiced(session, month)
        if amount:
            payment = {"invoice_id": invoice.invoice_id, "month_of": month.invoice_id, "amount_picousd": amount}
            found.append(InvoicePayment(**payment))
    return found


async def _debited(session: AsyncSession, month: Invoice) -> int:
    of_record = and_(
        col(WalletHold.request_id) == col(RequestRecord.request_id),
        col(WalletHold.attempt) == col(RequestRecord.attempt),
    )
    query = (
        select(*exact_sum(col(WalletHold.spent_picousd), "spent"))
        .select_from(RequestRecord)
        .join(WalletHold, of_record)
        .where(
            RequestRecord.tenant_id == month.tenant_id,
            RequestRecord.finished_unix_ns >= month.start_unix_ns,
            RequestRecord.finished_unix_ns < month.end_unix_ns,
            col(WalletHold.resolved_unix_ns).is_not(None),
        )
    )
    return total((await session.exec(query)).one(), "spent")


async def _invoiced(session: AsyncSession, month: Invoice) -> int:
    amounts = select(InvoicePayment.amount_picousd).where(InvoicePayment.month_of == month.invoice_id)
    return sum((await session.exec(amounts)).all())
