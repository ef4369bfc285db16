"""Usage and costs by time, as OpenAI's reports part them."""

from collections.abc import Sequence

from sqlalchemy import ColumnElement, Table, func
from sqlmodel import col, select
from sqlmodel.ext.asyncio.session import AsyncSession

from tenants.tables import LedgerEntry, Tenant
from tenants.usage.query import CostRow, GroupBy, TimeBucket, UsageQuery, UsageRow
from tenants.usage.rollups import SUMMED_METERS
from tenants.usage.sums import Found, charged

_NS = 10**9
_COLUMNS: dict[GroupBy, str] = {
    "model": "model",
    "api_key_id": "key_id",
    "project_id": "tenant_id",
    "flow_class": "flow_class",
}


class UsageRepository:
    """What was charged for, by the time at which it was used: every bucket of an interval, the empty ones too.

    ``tenant_id`` None: of all tenants, for operators.
    """

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def usage_buckets(self, tenant_id: str | None, query: UsageQuery) -> list[TimeBucket[UsageRow]]:
        """Raises InvalidValue for a group that usage does not have."""
        query.check_groups(*_COLUMNS)
        buckets: list[TimeBucket[UsageRow]] = [TimeBucket(*interval, []) for interval in query.intervals()]
        for (number, labels), sums in sorted((await self._found(tenant_id, query, query.group_by)).items()):
            uncached, cached, output, requests = (sums.quantities[meter] for meter in SUMMED_METERS)
            if requests:
                named = dict(zip(query.group_by, labels, strict=True))
                row = UsageRow(uncached + cached, cached, output, requests, **named)  # pyright: ignore[reportArgumentType]
                buckets[number].rows.append(row)
        return buckets

    async def cost_buckets(self, tenant_id: str | None, query: UsageQuery) -> list[TimeBucket[CostRow]]:
        """Ledger amounts; ``line_item`` is the meter. Raises InvalidValue for a group that costs do not have."""
        query.check_groups("line_item", "api_key_id", "project_id")
        buckets: list[TimeBucket[CostRow]] = [TimeBucket(*interval, []) for interval in query.intervals()]
        groups: list[GroupBy] = [name for name in query.group_by if name != "line_item"]
        for (number, labels), sums in sorted((await self._found(tenant_id, query, groups)).items()):
            named = dict(zip(groups, labels, strict=True))
            if "line_item" in query.group_by:
                rows = [CostRow(sums.amounts[meter], meter, **named) for meter in sorted(sums.amounts)]
            else:
                rows = [CostRow(sums.amounts.total(), **named)] if sums.amounts else []
            buckets[number].rows.extend(rows)
        return buckets

    async def first_s(self, tenant_id: str | None) -> int | None:
        """When the first charge occurred, Unix seconds; None: there was none."""
        occurred, owner = col(LedgerEntry.occurred_unix_ns), col(LedgerEntry.tenant_id)
        if tenant_id is not None:
            query = select(func.min(occurred)).where(owner == tenant_id)
        else:  # a look-up of the index a tenant, not all of it
            first = select(func.min(occurred)).where(owner == col(Tenant.tenant_id)).scalar_subquery()
            query = select(func.min(first)).select_from(Tenant)
        first_ns = (await self._session.exec(query)).one()
        return None if first_ns is None else first_ns // _NS

    async def _found(self, tenant_id: str | None, query: UsageQuery, groups: Sequence[GroupBy]) -> Found:
        def where(table: Table) -> list[ColumnElement[bool]]:
            conditions = [] if tenant_id is None else [table.c.tenant_id == tenant_id]
            filters = {"tenant_id": query.project_ids, "model": query.models, "key_id": query.key_ids}
            return conditions + [table.c[name].in_(wanted) for name, wanted in filters.items() if wanted]

        return await charged(self._session, query.intervals(), [_COLUMNS[name] for name in groups], where)
