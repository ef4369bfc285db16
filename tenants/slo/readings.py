"""What the database has of a tenant's service in an interval of whole minutes: the sums that a report is made of."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from sqlalchemy import ColumnElement, Table, func
from sqlmodel import col, select
from sqlmodel.ext.asyncio.session import AsyncSession

from tenants.slo.burn import Counts
from tenants.slo.histogram import Histogram
from tenants.slo.objectives import Objectives
from tenants.slo.sums import ALL, Minute, decode_minute, model_name
from tenants.slo.verdict import Verdict, judge_refusal
from tenants.tables import LatencyMinute, RefusalMinute, ReplicaTime, SloMinute, UsageRollup, UsageSeries
from tenants.usage.cover import cover
from tenants.usage.rollups import SUMMED_METERS
from tenants.usage.sums import charged

QUARTER_S = 900  # every zone's days and hours begin with one
HEARD_S = 3600  # an engine that is gone for longer holds nothing back
_PAGE = 64
Place: TypeAlias = tuple[str, str]  # model and class
BySli: TypeAlias = dict[str, Counts]
ByVersion: TypeAlias = dict[tuple[str, str], dict[int, Counts]]  # version and SLI → minute → counts


class Refused(NamedTuple):
    """Requests of a minute that no engine took."""

    minute_s: int
    model: str
    flow_class: str
    reason: str
    verdict: Verdict
    num_requests: int


@dataclass(slots=True)
class Timings:
    """Samples and exclusions by place, and the TTFT samples by hour, as ``hour_of`` tells it from a minute."""

    places: dict[Place, Minute] = field(default_factory=lambda: defaultdict(Minute))
    hours: dict[int, Histogram] = field(default_factory=lambda: defaultdict(Histogram))


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

    async def by_place(self, start_s: int, end_s: int) -> dict[Place, BySli]:
        """Of requests that an engine took."""
        keys = (col(SloMinute.model), col(SloMinute.flow_class), col(SloMinute.sli))
        query = self._of(SloMinute, start_s, end_s, *keys, *_sums()).group_by(*keys)
        found: dict[Place, BySli] = defaultdict(dict)
        for model, flow_class, sli, valid, good in await self._session.exec(query):
            found[model, flow_class][sli] = Counts(int(valid), int(good))
        return found

    async def by_quarter(self, start_s: int, end_s: int) -> dict[int, BySli]:
        """Of requests that an engine took, by the Unix seconds at which a quarter of an hour begins."""
        quarter = (col(SloMinute.minute_s) // QUARTER_S).label("quarter")
        keys = (quarter, col(SloMinute.sli))
        query = self._of(SloMinute, start_s, end_s, *keys, *_sums()).group_by(*keys)
        found: dict[int, BySli] = defaultdict(dict)
        for number, sli, valid, good in await self._session.exec(query):
            found[int(number) * QUARTER_S][sli] = Counts(int(valid), int(good))
        return found

    async def by_version(self, start_s: int, end_s: int) -> ByVersion:
        """Of requests that an engine took, by the objective's version that judged them."""
        keys = (col(SloMinute.version_id), col(SloMinute.sli), col(SloMinute.minute_s))
        query = self._of(SloMinute, start_s, end_s, *keys, *_sums()).where(col(SloMinute.version_id) != "")
        found: ByVersion = defaultdict(dict)
        for version_id, sli, minute_s, valid, good in await self._session.exec(query.group_by(*keys)):
            found[version_id, sli][minute_s] = Counts(int(valid), int(good))
        return found

    async def refused(self, start_s: int, end_s: int, objectives: Objectives) -> list[Refused]:
        """Judged by the objectives of their minute."""
        names = ("minute_s", "model", "base_model", "flow_class", "status", "reason")
        keys = [col(getattr(RefusalMinute, name)) for name in names]
        total = func.sum(RefusalMinute.num_requests)
        query = self._of(RefusalMinute, start_s, end_s, *keys, total).group_by(*keys)
        return [self._refused(objectives, *row) for row in await self._session.exec(query)]

    async def timed(self, start_s: int, end_s: int, hour_of: Callable[[int], int]) -> Timings:
        """Merged as they are read, a few at a time: others have their turn, and a month takes no memory."""
        names = ("minute_s", "model", "flow_class", "sums")
        query = self._of(LatencyMinute, start_s, end_s, *(col(getattr(LatencyMinute, name)) for name in names))
        found = Timings()
        async for row in await self._session.stream(query.execution_options(yield_per=_PAGE)):
            minute = decode_minute(row.sums)
            found.places[row.model, row.flow_class].merge(minute)
            if "ttft" in minute.histograms:
                found.hours[hour_of(row.minute_s)].merge(minute.histograms["ttft"])
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

    def _of(self, table: Any, start_s: int, end_s: int, *columns: Any) -> Any:
        return select(*columns).where(
            table.tenant_id == self._tenant_id, table.minute_s >= start_s, table.minute_s < end_s
        )

    def _refused(self, objectives: Objectives, *row: Any) -> Refused:
        minute_s, model, base_model, flow_class, status, reason, num_requests = row
        in_force = objectives.in_force(self._tenant_id, (model, base_model), flow_class, minute_s * 10**9)
        verdict = judge_refusal(status, reason, in_force)
        return Refused(minute_s, model, flow_class, reason, verdict, int(num_requests))


def add_refused(counts: dict[Any, BySli], refused: Iterable[Refused], key: Callable[[Refused], Any]) -> None:
    """The valid ones of those that no engine took are bad."""
    for each in refused:
        for sli in (*each.verdict.results, ALL) if not each.verdict.excluded else ():
            by_sli = counts.setdefault(key(each), {})
            by_sli[sli] = by_sli.get(sli, Counts()) + Counts(each.num_requests, 0)


def add_refused_by_version(by_version: ByVersion, refused: Iterable[Refused]) -> None:
    for each in refused:
        for sli, (version_id, _) in each.verdict.results.items():
            if version_id:
                minutes = by_version.setdefault((version_id, sli), {})
                minutes[each.minute_s] = minutes.get(each.minute_s, Counts()) + Counts(each.num_requests, 0)


def _sums() -> tuple[Any, Any]:
    return func.sum(SloMinute.valid), func.sum(SloMinute.good)
