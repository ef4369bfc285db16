"""Receipts: what is read back of single requests."""

from sqlalchemy import desc, func
from sqlmodel import col, select
from sqlmodel.ext.asyncio.session import AsyncSession

from tenants.tables import RequestRecord

_NS = 10**9


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

    async def first_finished_s(self, tenant_id: str) -> int | None:
        """When the tenant's first request ended, Unix seconds; None: there was none."""
        query = select(func.min(RequestRecord.finished_unix_ns)).where(RequestRecord.tenant_id == tenant_id)
        first_ns = (await self._session.exec(query)).one()
        return None if first_ns is None else first_ns // _NS
