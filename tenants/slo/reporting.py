"""From a tenant's sums to its report."""

import hashlib
import time
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise
from typing import TypeAlias
from zoneinfo import ZoneInfo

import msgspec
from sqlmodel.ext.asyncio.session import AsyncSession

from tenants.errors import InvalidValue
from tenants.periods import midnight_ns
from tenants.slo import openslo
from tenants.slo.budgets import DAY_S, HOUR_S, attainment, incident_rows, objective_row, rounded, series_of, versions_of
from tenants.slo.burn import Counts
from tenants.slo.histogram import Histogram, merged
from tenants.slo.objectives import MINUTE_S, Objectives
from tenants.slo.readings import (
    QUARTER_S,
    BySli,
    Place,
    Readings,
    Refused,
    Timings,
    Usage,
    add_refused,
)
from tenants.slo.report import (
    Day,
    Hour,
    Latency,
    Phase,
    Report,
    Row,
    Tokens,
)
from tenants.slo.repository import ObjectiveRepository
from tenants.slo.sums import ALL
from tenants.slo.verdict import MEASURES, PHASES
from tenants.tables import Tenant

MAX_DAYS = 92
GROUPS = ("model", "class")
_NS = 10**9

_Scope: TypeAlias = tuple[str | None, str | None]  # model and class, None where they are not told apart


@dataclass(frozen=True, slots=True)
class SloQuery:
    """[start_s, end_s) in Unix seconds, whole minutes, at most MAX_DAYS. ``group`` ⊆ GROUPS. Raises InvalidValue."""

    start_s: int
    end_s: int
    group: tuple[str, ...] = GROUPS

    def __post_init__(self) -> None:
        if not 0 <= self.start_s < self.end_s < 1 << 33:
            raise InvalidValue("end", "lies after start, both in Unix seconds")
        for name, value in (("start", self.start_s), ("end", self.end_s)):
            if value % MINUTE_S:
                raise InvalidValue(name, "is a whole minute")
        if self.end_s - self.start_s > MAX_DAYS * DAY_S + 2 * HOUR_S:  # a change of clocks is no reason
            raise InvalidValue("end", f"lies at most {MAX_DAYS} days after start")
        if not set(self.group) <= set(GROUPS):
            raise InvalidValue("group", f"holds of {', '.join(GROUPS)}")


@dataclass(frozen=True, slots=True)
class _Evidence:
    """All that was read of the interval."""

    by_place: dict[Place, BySli]
    by_quarter: dict[int, BySli]
    refused: list[Refused]
    timings: Timings
    used: dict[Place, Usage]


async def slo_report(
    session: AsyncSession, tenant: Tenant, query: SloQuery, now: Callable[[], float] = time.time
) -> Report:
    """What the tenant was promised and got. Nothing of another tenant is read."""
    readings, interval = Readings(session, tenant.tenant_id), (query.start_s, query.end_s)
    versions = await ObjectiveRepository(session).history(tenant.tenant_id)
    zone, generated_at = ZoneInfo(tenant.time_zone), int(now())
    days = list(_days(query, zone))
    hours = [hour for start, end in days for hour in range(start, end, HOUR_S)]
    evidence = await _evidence(readings, Objectives(versions), query, hours)
    promised = versions_of(versions, *interval)
    series = await series_of(readings, Objectives(versions), promised, *interval)
    found = [incident for each in promised for incident in incident_rows(each, series[each.version_id], *interval)]
    report = Report(
        tenant_id=tenant.tenant_id,
        tenant_name=tenant.name,
        time_zone=tenant.time_zone,
        start=query.start_s,
        end=query.end_s,
        local_start=_local(query.start_s, zone),
        local_end=_local(query.end_s, zone),
        generated_at=generated_at,
        elapsed_ratio=_elapsed(query, generated_at),
        complete_until=await readings.complete_until(generated_at),
        total=_row((None, None), evidence, query),
        rows=[_row(scope, evidence, query) for scope in _scopes(evidence, query.group)],
        objectives=[objective_row(each, series[each.version_id], *interval) for each in promised],
        incidents=sorted(found, key=lambda each: (each.begin, each.objective, each.alert)),
        days=_day_rows(days, zone, evidence.by_quarter),
        hours=[Hour(start, _latency(evidence.timings.hours.get(start, Histogram()))) for start in hours],
        objectives_hash=_hash(openslo.write(promised).encode()),
    )
    return msgspec.structs.replace(report, document_hash=document_hash(report))


async def _evidence(readings: Readings, objectives: Objectives, query: SloQuery, hours: list[int]) -> _Evidence:
    interval = query.start_s, query.end_s
    refused = await readings.refused(*interval, objectives)
    by_place, by_quarter = await readings.by_place(*interval), await readings.by_quarter(*interval)
    add_refused(by_place, refused, lambda each: (each.model, each.flow_class))
    add_refused(by_quarter, refused, lambda each: each.minute_s // QUARTER_S * QUARTER_S)
    timings = await readings.timed(*interval, lambda minute_s: hours[bisect_right(hours, minute_s) - 1])
    return _Evidence(by_place, by_quarter, refused, timings, await readings.used(*interval))


def document_hash(report: Report) -> str:
    """As Report says."""
    plain = msgspec.to_builtins(report)
    del plain["document_hash"], plain["generated_at"]
    return _hash(msgspec.json.encode(plain, order="sorted"))


# ── rows ─────────────────────────────────────────────────────────────────────────────────────────


def _scopes(evidence: _Evidence, group: tuple[str, ...]) -> list[_Scope]:
    if not group:
        return []
    refused = {(each.model, each.flow_class) for each in evidence.refused}
    seen = evidence.by_place.keys() | evidence.timings.places.keys() | refused
    cut = {(model if "model" in group else None, flow if "class" in group else None) for model, flow in seen}
    return sorted(cut, key=lambda scope: (scope[0] or "", scope[1] or ""))


def _holds(scope: _Scope, place: Place) -> bool:
    return scope[0] in (None, place[0]) and scope[1] in (None, place[1])


def _row(scope: _Scope, evidence: _Evidence, query: SloQuery) -> Row:
    counts = _together(by_sli for place, by_sli in evidence.by_place.items() if _holds(scope, place))
    refused = [each for each in evidence.refused if _holds(scope, (each.model, each.flow_class))]
    timed = [sums for place, sums in evidence.timings.places.items() if _holds(scope, place)]
    measured = {name: merged(each.histograms[name] for each in timed if name in each.histograms) for name in MEASURES}
    usage = _summed(usage for key, usage in evidence.used.items() if _holds(scope, key))
    excluded, codes = Counter[str](), Counter[str]()
    for minute in timed:
        excluded.update(minute.excluded)
    for each in refused:
        codes[each.reason] += each.num_requests
        if each.verdict.excluded:
            excluded[each.verdict.excluded] += each.num_requests
    whole = counts.pop(ALL, Counts())
    return Row(
        model=scope[0],
        flow_class=scope[1],
        valid=whole.valid,
        good=whole.good,
        goodput=rounded(whole.good / (query.end_s - query.start_s)),
        excluded=dict(sorted(excluded.items())),
        refused=dict(sorted(codes.items())),
        attainment={sli: attainment(counts[sli]) for sli in sorted(counts)},
        latency={name: _latency(measured[name]) for name in MEASURES if name not in PHASES},
        phases={name: Phase(measured[name].mean, measured[name].quantile(95)) for name in PHASES},
        tokens=_tokens(usage),
        gpu_ns=usage.gpu_ns,
        price_picousd=usage.price_picousd,
    )


def _together(parts: Iterable[BySli]) -> BySli:
    found: BySli = {}
    for part in parts:
        for sli, counts in part.items():
            found[sli] = found.get(sli, Counts()) + counts
    return {sli: counts for sli, counts in found.items() if counts.valid}


def _latency(histogram: Histogram) -> Latency:
    return Latency(histogram.count, histogram.mean, *(histogram.quantile(percent) for percent in (50, 95, 99)))


def _summed(usages: Iterable[Usage]) -> Usage:
    whole = Usage()
    for each in usages:
        whole.input_tokens += each.input_tokens
        whole.cached_tokens += each.cached_tokens
        whole.output_tokens += each.output_tokens
        whole.price_picousd += each.price_picousd
        whole.gpu_ns += each.gpu_ns
    return whole


def _tokens(usage: Usage) -> Tokens:
    ratio = rounded(usage.cached_tokens / usage.input_tokens) if usage.input_tokens else None
    return Tokens(usage.input_tokens, usage.cached_tokens, usage.output_tokens, ratio)


# ── time ─────────────────────────────────────────────────────────────────────────────────────────


def _days(query: SloQuery, zone: ZoneInfo) -> Iterator[tuple[int, int]]:
    """The local days, cut at the interval's ends."""
    first = datetime.fromtimestamp(query.start_s, zone).date()
    last = datetime.fromtimestamp(query.end_s, zone).date()
    dates = (first + timedelta(days=number) for number in range((last - first).days + 1))
    midnights = {midnight_ns(date, zone) // _NS for date in dates}
    inner = (edge for edge in midnights if query.start_s < edge < query.end_s)
    return pairwise(sorted({query.start_s, *inner, query.end_s}))


def _day_rows(days: list[tuple[int, int]], zone: ZoneInfo, by_quarter: dict[int, BySli]) -> list[Day]:
    """A quarter of an hour is in the day in which it begins, and the one that the interval cuts in its first."""
    starts = [start for start, _ in days]
    parts: dict[int, list[BySli]] = defaultdict(list)
    for quarter_s, by_sli in by_quarter.items():
        parts[max(0, bisect_right(starts, quarter_s) - 1)].append(by_sli)
    return [
        Day(
            datetime.fromtimestamp(start, zone).date().isoformat(),
            start,
            end,
            {sli: attainment(counts) for sli, counts in sorted(_together(parts[number]).items())},
        )
        for number, (start, end) in enumerate(days)
    ]


def _elapsed(query: SloQuery, generated_at: int) -> float:
    share = (generated_at - query.start_s) / (query.end_s - query.start_s)
    return rounded(min(1.0, max(0.0, share)))


def _local(unix_s: int, zone: ZoneInfo) -> str:
    return datetime.fromtimestamp(unix_s, zone).isoformat()


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
