"""What the database has of a tenant's service in an interval of whole minutes: the sums that a report is made of.

Rows come in pages, and what is done with a page is done in a thread: whoever shares the loop has its turn in between.
"""

import asyncio
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

from sqlalchemy import BigInteger, ColumnElement, Table, and_, column, func, tuple_, values
from sqlmodel import col, select
from sqlmodel.ext.asyncio.session import AsyncSession

from tenants.slo.burn import Tally
from tenants.slo.histogram import Histogram
from tenants.slo.minutes import HOUR_S, tally_hour
from tenants.slo.objectives import MINUTE_S, Objectives
from tenants.slo.service import (
    WIDTHS_S,
    ServiceSums,
    decode_histogram,
    decode_outline,
    decode_sums,
    merge_counts,
)
from tenants.slo.sums import model_name
from tenants.slo.verdict import Verdict, judge_refusal
from tenants.tables import ObjectiveHour, RefusalMinute, ReplicaTime, ServiceSum, UsageRollup, UsageSeries
from tenants.usage.cover import Piece, cover
from tenants.usage.rollups import SUMMED_METERS
from tenants.usage.sums import charged

HEARD_S = 3600  # an engine that is gone for longer holds nothing back
_PAGE = 500
Place: TypeAlias = tuple[str, str]  # model and class
ByVersion: TypeAlias = dict[str, Tally]


class Refused(NamedTuple):
    """Requests of a time that no engine took."""

    start_s: int
    model: str
    flow_class: str
    reason: str
    verdict: Verdict
    num_requests: int


@dataclass(slots=True)
class HourSums:
    """All that was served in an hour: ``valid`` and ``good`` by SLI, the TTFT samples."""

    valid: dict[str, int] = field(default_factory=dict)
    good: dict[str, int] = field(default_factory=dict)
    ttft: Histogram = field(default_factory=Histogram)

    def add(self, sums: bytes) -> None:
        outline = decode_outline(sums)
        merge_counts(self.valid, outline.valid)
        merge_counts(self.good, outline.good)
        if "ttft" in outline.histograms:
            self.ttft.merge(decode_histogram(outline.histograms["ttft"]))


@dataclass(slots=True)
class Usage:
    """What was charged for, and every request's share of the device."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    price_picousd: int = 0
    gpu_ns: int = 0


class Readings:
    """Reads of one tenant's sums; ``start_s`` and ``end_s`` are whole minutes, half-open."""

    def __init__(self, session: AsyncSession, tenant_id: str) -> None:
        self._session = session
        self._tenant_id = tenant_id

    async def served(self, start_s: int, end_s: int) -> dict[Place, ServiceSums]:
        """Of requests that an engine took."""
        found: dict[Place, ServiceSums] = defaultdict(ServiceSums)

        def add(rows: Iterable[Any]) -> None:
            for model, flow_class, _start_s, sums in rows:
                found[model, flow_class].merge(decode_sums(sums))

        for piece in cover(start_s, end_s, WIDTHS_S):
            await self._each_page(self._sums_of(piece), add)
        return found

    async def by_hour(self, hours: Sequence[int], end_s: int) -> dict[int, HourSums]:
        """The same by ``hours``, which follow each other until ``end_s`` and are given by their starts; the last of
        them that has begun has a minute."""
        found: dict[int, HourSums] = defaultdict(HourSums)

        def add(rows: Iterable[Any]) -> None:
            for _model, _flow_class, start_s, sums in rows:
                found[hours[bisect_right(hours, start_s) - 1]].add(sums)

        for piece in _pieces_of_hours(hours, end_s):
            await self._each_page(self._sums_of(piece), add)
        return found

    async def by_version(self, version_ids: Collection[str], start_s: int, end_s: int) -> ByVersion:
        """Of requests that an engine took, by the objective's version that judged them and by minute."""
        found: ByVersion = defaultdict(Tally)

        def add(rows: Iterable[Any]) -> None:
            for version_id, hour_s, minutes in rows:
                tally_hour(found[version_id], hour_s, minutes, start_s, end_s)

        columns = (ObjectiveHour.version_id, ObjectiveHour.hour_s, ObjectiveHour.minutes)
        query = select(*columns).where(
            ObjectiveHour.tenant_id == self._tenant_id,
            col(ObjectiveHour.version_id).in_(version_ids),
            ObjectiveHour.hour_s >= start_s // HOUR_S * HOUR_S,
            ObjectiveHour.hour_s < end_s,
        )
        await self._each_page(query, add)
        return found

    async def refused(self, spans: Sequence[tuple[int, int]]) -> list[Refused]:
        """By the spans of time that they are in. Which version judged them is not told."""
        parts = _spans(spans)
        minutes: Table = RefusalMinute.__table__  # pyright: ignore[reportAttributeAccessIssue]
        keys = (parts.c.start_s, *(minutes.c[name] for name in ("model", "flow_class", "status", "reason")))
        joined = parts.join(minutes, self._within(minutes, parts), isouter=True)
        columns: tuple[Any, ...] = (*keys, func.sum(minutes.c.num_requests))
        query = select(*columns).select_from(joined).group_by(*keys)
        return [
            Refused(start_s, model, flow_class, reason, judge_refusal(status, reason, {}), int(num_requests))
            for start_s, model, flow_class, status, reason, num_requests in await self._session.exec(query)
            if num_requests
        ]

    async def refused_by_version(self, start_s: int, end_s: int, objectives: Objectives) -> ByVersion:
        """The valid ones, by minute; judged by the objectives of their minute."""
        kinds = (col(RefusalMinute.status), col(RefusalMinute.reason))
        seen = await self._session.exec(self._of(RefusalMinute, start_s, end_s, *kinds).distinct())
        ours = [(status, reason) for status, reason in seen if not judge_refusal(status, reason, {}).excluded]
        found: ByVersion = defaultdict(Tally)

        def add(rows: Iterable[Any]) -> None:
            for minute_s, model, base_model, flow_class, num_requests in rows:
                in_force = objectives.in_force(self._tenant_id, (model, base_model), flow_class, minute_s * 10**9)
                if "availability" in in_force:
                    found[in_force["availability"].version_id].add([minute_s], [num_requests], [0])

        if ours:
            names = ("minute_s", "model", "base_model", "flow_class", "num_requests")
            query = self._of(RefusalMinute, start_s, end_s, *(col(getattr(RefusalMinute, name)) for name in names))
            await self._each_page(query.where(tuple_(*kinds).in_(ours)), add)
        return found

    async def used(self, start_s: int, end_s: int) -> dict[Place, Usage]:
        """By model and class, from the sums that bills are made of."""
        found: dict[Place, Usage] = defaultdict(Usage)

        def own(table: Table) -> list[ColumnElement[bool]]:
            return [table.c.tenant_id == self._tenant_id]

        sums_of = await charged(self._session, [(start_s, end_s)], ("model", "flow_class"), own)
        for (_, (model, flow_class)), sums in sums_of.items():
            usage = found[model_name(model), flow_class]
            uncached, cached, output = (sums.quantities[meter] for meter in SUMMED_METERS[:3])
            usage.input_tokens += uncached + cached
            usage.cached_tokens += cached
            usage.output_tokens += output
            usage.price_picousd += sum(sums.amounts[meter] for meter in SUMMED_METERS)
        for model, flow_class, gpu_ns in await self._gpu_ns(start_s, end_s):
            found[model_name(model), flow_class].gpu_ns += gpu_ns
        return found

    async def complete_until(self, now_s: int) -> int | None:
        """What ended before is booked: journals arrive in order, and so far has each engine's come that was heard
        within HEARD_S. None: none was."""
        newest = func.max(ReplicaTime.until_unix_ns)
        query = select(newest).where(col(ReplicaTime.until_unix_ns) >= (now_s - HEARD_S) * 10**9)
        heard = (await self._session.exec(query.group_by(col(ReplicaTime.engine_id)))).all()
        return min(heard) // 10**9 if heard else None

    async def _gpu_ns(self, start_s: int, end_s: int) -> Iterable[tuple[str, str, int]]:
        found: Counter[Place] = Counter()
        for piece in cover(start_s, end_s):
            keys = (col(UsageSeries.model), col(UsageSeries.flow_class))
            query = (
                select(*keys, func.sum(UsageRollup.gpu_ns))
                .join(UsageRollup, col(UsageRollup.series_id) == UsageSeries.series_id)
                .where(
                    UsageSeries.tenant_id == self._tenant_id,
                    UsageRollup.width_s == piece.width_s,
                    UsageRollup.start_s >= piece.start_s,
                    UsageRollup.start_s < piece.end_s,
                )
                .group_by(*keys)
            )
            for model, flow_class, gpu_ns in await self._session.exec(query):
                found[model, flow_class] += int(gpu_ns)
        return [(*key, gpu_ns) for key, gpu_ns in found.items()]

    async def _each_page(self, query: Any, work: Callable[[Sequence[Any]], None]) -> None:
        rows = await self._session.stream(query.execution_options(yield_per=_PAGE))
        async for page in rows.partitions():
            await asyncio.to_thread(work, page)

    def _sums_of(self, piece: Piece) -> Any:
        names = ("model", "flow_class", "start_s", "sums")
        return select(*(col(getattr(ServiceSum, name)) for name in names)).where(  # pyright: ignore[reportCallIssue]
            ServiceSum.tenant_id == self._tenant_id,
            ServiceSum.width_s == piece.width_s,
            ServiceSum.start_s >= piece.start_s,
            ServiceSum.start_s < piece.end_s,
        )

    def _of(self, table: Any, start_s: int, end_s: int, *columns: Any) -> Any:
        return select(*columns).where(
            table.tenant_id == self._tenant_id, table.minute_s >= start_s, table.minute_s < end_s
        )

    def _within(self, minutes: Table, spans: Any) -> ColumnElement[bool]:
        """For outer joins: SQLite then begins with the spans, and never reads all minutes once a span."""
        return and_(
            minutes.c.tenant_id == self._tenant_id,
            minutes.c.minute_s >= spans.c.start_s,
            minutes.c.minute_s < spans.c.end_s,
        )


def _spans(spans: Iterable[tuple[int, int]]) -> Any:
    columns = (column("start_s", BigInteger), column("end_s", BigInteger))
    return values(*columns, name="span").data(list(spans)).cte()


def _pieces_of_hours(hours: Sequence[int], end_s: int) -> Iterator[Piece]:
    """Quarters, and minutes where an hour's ends are no quarters'; neighbours of one width are one piece."""
    last = None
    for start, end in pairwise(-(-edge // MINUTE_S) * MINUTE_S for edge in (*hours, end_s)):
        for piece in cover(start, end, WIDTHS_S[1:]):
            if last is not None and (last.width_s, last.end_s) == (piece.width_s, piece.start_s):
                last = Piece(last.width_s, last.start_s, piece.end_s)
                continue
            if last is not None:
                yield last
            last = piece
    if last is not None:
        yield last


def merged_by_version(*parts: ByVersion) -> ByVersion:
    found: ByVersion = defaultdict(Tally)
    for part in parts:
        for version_id, tally in part.items():
            found[version_id].add(tally.starts, tally.valid, tally.good)
    return found
