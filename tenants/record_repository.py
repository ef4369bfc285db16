"""Receipts: what is read back of single requests."""

from sqlalchemy import desc
from sqlmodel import col, select
from sqlmodel.ext.asyncio.session import AsyncSession

from tenants.tables import RequestRecord


class RecordRepository:
    """Reads of one tenant's records; Ledger writes them."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def get(self, tenant_id: str, request_id: str) -> RequestRecord | None:
        """The receipt: of the dispatch that was billed, else of the last one."""
        query = (
            select(RequestRecord)
            .where(RequestRecord.tenant_id == tenant_id, RequestRecord.request_id == request_id)
            .order_by(desc(col(RequestRecord.billed)), desc(col(RequestRecord.attempt)))
        )
        return (await self._session.exec(query)).first()
