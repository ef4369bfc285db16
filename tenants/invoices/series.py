"""Numbers of invoices and credit notes: 1, 2, … each once, none left out, whoever issues and whoever crashes."""

from typing import Literal

from sqlmodel import select
from sqlmodel.ext.asyncio.session import AsyncSession

from tenants.bulk import insert_new
from tenants.database import locked
from tenants.tables import DocumentSeries


async def lock_series(session: AsyncSession, kind: Literal["invoice", "credit_note"]) -> DocumentSeries:
    """The series, for this transaction alone. Whoever issues adds one to ``number`` and uses it: a transaction that
    rolls back gives the number back."""
    query = select(DocumentSeries).where(DocumentSeries.kind == kind)
    found = (await locked(session, query)).first()
    if found is None:
        await insert_new(session, DocumentSeries, ("kind", "number"), [(kind, 0)])
        found = (await locked(session, query)).one()
    return found
