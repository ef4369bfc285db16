"""Receipts, usage and costs: what is read back from the ledger's two tables."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta, tzinfo
from typing import Any, Literal, TypeAlias

from sqlalchemy import ColumnElement, case, desc, func, literal
from sqlmodel import col, select
from sqlmodel.ext.asyncio.session import AsyncSession

from tenants.errors import InvalidValue
from tenants.meter import FlowClass
from tenants.money import exact_sum, total
from tenants.tables import LedgerEntry, RequestRecord

BucketWidth: TypeAlias = Literal["1m", "1h", "1d"]
GroupBy: TypeAlias = Literal["model", "api_key_id", "project_id", "flow_class", "line_item"]

_NS = 10**9
_WIDTH_S = {"1m": 60, "1h": 3600, "1d": 86400}
_MAX_BUCKETS = {"1m": 1440, "1h": 168, "1d": 366}
_TOKENS = ("prompt_tokens", "cached_tokens", "output_tokens")
_GROUP_COLUMNS: dict[GroupBy, str] = {
    "model": "model",
    "api_key_id": "key_id",
    "project_id": "tenant_id",
    "flow_class": "flow_class",
    "line_item": "meter",
}


@dataclass(frozen=True, slots=True)
class UsageQuery:
    """A half-open interval [start_s, end_s) in Unix seconds, cut at whole UTC minutes or hours, or at days of ``zone``.

    The first and the last bucket end at the interval's own ends. Empty filters mean all. Raises InvalidValue.
    """

    start_s: int
    end_s: int
    width: BucketWidth = "1d"
    group_by: tuple[GroupBy, ...] = ()
    models: tuple[str, ...] = ()
    key_ids: tuple[str, ...] = ()
    zone: tzinfo = UTC

    def __post_init__(self) -> None:
        if not 0 <= self.start_s < self.end_s < 1 << 33:
            raise InvalidValue("end_time", "lies after start_time, both in Unix seconds")
        if (self.end_s - self.start_s) // _WIDTH_S[self.width] > _MAX_BUCKETS[self.width]:
            raise InvalidValue("bucket_width", f"at most {_MAX_BUCKETS[self.width]} buckets of {self.width}")

    def edges(self) -> list[int]:
        """Unix seconds at which buckets begin, and the end: strictly rising."""
        if self.width == "1d":
            inner = _midnights(self.start_s, self.end_s, self.zone)
        else:
            width = _WIDTH_S[self.width]
            inner = range((self.start_s // width + 1) * width, self.end_s, width)
        return [self.start_s, *(edge for edge in inner if self.start_s < edge < self.end_s), self.end_s]

    def check_groups(self, *allowed: GroupBy) -> None:
        for name in self.group_by:
            if name not in allowed:
                raise InvalidValue("group_by", f"is one of {', '.join(allowed)}")


@dataclass(frozen=True, slots=True)
class UsageRow:
    """OpenAI's usage result. ``input_tokens`` include the cached ones; a field not grouped by is None."""

    input_tokens: int
    input_cached_tokens: int
    output_tokens: int
    num_model_requests: int
    model: str | None = None
    api_key_id: str | None = None
    project_id: str | None = None
    flow_class: FlowClass | None = None


@dataclass(frozen=True, slots=True)
class CostRow:
    """OpenAI's cost result, exact."""

    amount_picousd: int
    line_item: str | None = None
    api_key_id: str | None = None
    project_id: str | None = None


@dataclass(frozen=True, slots=True)
class UsageBucket:
    start_s: int
    end_s: int
    rows: list[UsageRow]


@dataclass(frozen=True, slots=True)
class CostBucket:
    start_s: int
    end_s: int
    rows: list[CostRow]


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

    async def usage_buckets(self, tenant_id: str, query: UsageQuery) -> list[UsageBucket]:
        """Billed usage by the time a request finished: every bucket of the interval, the empty ones too.

        Raises InvalidValue for a group that usage does not have.
        """
        query.check_groups("model", "api_key_id", "project_id", "flow_class")
        edges = query.edges()
        source = _source(RequestRecord, col(RequestRecord.finished_unix_ns), tenant_id, query, edges)
        source = source.where(col(RequestRecord.billed)).subquery()
        sums = [*(func.sum(source.c[name]).label(name) for name in _TOKENS), func.count().label("num_requests")]
        found: list[list[UsageRow]] = [[] for _ in edges[1:]]
        for row in await self._grouped(source, query, sums):
            input_tokens, cached, output = (int(getattr(row, name)) for name in _TOKENS)
            found[row.bucket].append(UsageRow(input_tokens, cached, output, row.num_requests, **_labels(row, query)))
        return [UsageBucket(start, end, rows) for start, end, rows in zip(edges, edges[1:], found, strict=False)]

    async def cost_buckets(self, tenant_id: str, query: UsageQuery) -> list[CostBucket]:
        """Ledger amounts in the same buckets; ``line_item`` is the meter. Raises InvalidValue as there."""
        query.check_groups("line_item", "api_key_id", "project_id")
        edges = query.edges()
        source = _source(LedgerEntry, col(LedgerEntry.occurred_unix_ns), tenant_id, query, edges).subquery()
        found: list[list[CostRow]] = [[] for _ in edges[1:]]
        for row in await self._grouped(source, query, exact_sum(source.c.amount_picousd, "amount")):
            found[row.bucket].append(CostRow(total(row, "amount"), **_labels(row, query)))
        return [CostBucket(start, end, rows) for start, end, rows in zip(edges, edges[1:], found, strict=False)]

    async def _grouped(self, source: Any, query: UsageQuery, sums: Sequence[ColumnElement]) -> Sequence[Any]:
        keys = [source.c.bucket, *(source.c[_GROUP_COLUMNS[name]] for name in query.group_by)]
        statement = select(*keys, *sums).group_by(*keys).order_by(*keys)
        return (await self._session.exec(statement)).all()


def _source(table: Any, time: Any, tenant_id: str, query: UsageQuery, edges: list[int]) -> Any:
    """The tenant's rows of the interval with their bucket's number. A subquery, so that grouping names a column."""
    statement = select(_bucket(time, query, edges).label("bucket"), *table.__table__.c).where(
        table.tenant_id == tenant_id, time >= query.start_s * _NS, time < query.end_s * _NS
    )
    if query.models:
        statement = statement.where(col(table.model).in_(query.models))
    if query.key_ids:
        statement = statement.where(col(table.key_id).in_(query.key_ids))
    return statement


def _bucket(time: Any, query: UsageQuery, edges: list[int]) -> ColumnElement:
    if query.width != "1d":
        width_ns = _WIDTH_S[query.width] * _NS
        return time // width_ns - query.start_s * _NS // width_ns
    if len(edges) == 2:
        return literal(0)
    return case(*((time < edge * _NS, number) for number, edge in enumerate(edges[1:-1])), else_=len(edges) - 2)


def _labels(row: Any, query: UsageQuery) -> dict[str, Any]:
    return {name: getattr(row, _GROUP_COLUMNS[name]) for name in query.group_by}


def _midnights(start_s: int, end_s: int, zone: tzinfo) -> list[int]:
    """The instants at which local days begin in (start, end): a day has 23, 24 or 25 hours."""
    day: date = datetime.fromtimestamp(start_s, zone).date()
    last = datetime.fromtimestamp(end_s, zone).date()
    instants = set()  # a day that a zone left out begins when the next one does
    while day <= last:
        instants.add(int(datetime(day.year, day.month, day.day, tzinfo=zone).timestamp()))
        day += timedelta(days=1)
    return sorted(instants)
