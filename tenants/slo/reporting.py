"""From a tenant's sums to its report."""

import asyncio
import hashlib
import time
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import TypeAlias
from zoneinfo import ZoneInfo

import msgspec
from sqlmodel.ext.asyncio.session import AsyncSession

from tenants.slo import openslo
from tenants.slo.budgets import attainment, counted_of, incident_rows, objective_row, rounded, versions_of
from tenants.slo.burn import Counts, Series, Tally
from tenants.slo.calendar import Calendar, SloQuery
from tenants.slo.histogram import Histogram, merged
from tenants.slo.objectives import Objective, Objectives
from tenants.slo.readings import ByVersion, HourSums, Place, Readings, Refused, Usage
from tenants.slo.report import Attainment, Day, Hour, Latency, Phase, Report, Row, Tokens
from tenants.slo.repository import ObjectiveRepository
from tenants.slo.service import ALL, ServiceSums
from tenants.slo.verdict import MEASURES, PHASES
from tenants.tables import Tenant

_Scope: TypeAlias = tuple[str | None, str | None]  # model and class, None where they are not told apart


@dataclass(frozen=True, slots=True)
class _Evidence:
    """All that was read of the interval."""

    versions: list[Objective]
    served: dict[Place, ServiceSums]
    by_hour: dict[int, HourSums]
    refused: list[Refused]
    used: dict[Place, Usage]
    counted: ByVersion
    complete_until: int | None


async def slo_report(
    session: AsyncSession, tenant: Tenant, query: SloQuery, now: Callable[[], float] = time.time
) -> Report:
    """What the tenant was promised and got. Nothing of another tenant is read."""
    generated_at, calendar = int(now()), Calendar(query, ZoneInfo(tenant.time_zone))
    evidence = await _evidence(session, tenant.tenant_id, query, calendar, generated_at)
    return await asyncio.to_thread(_report, tenant, query, calendar, evidence, generated_at)


async def _evidence(
    session: AsyncSession, tenant_id: str, query: SloQuery, calendar: Calendar, generated_at: int
) -> _Evidence:
    readings, interval = Readings(session, tenant_id), (query.start_s, query.end_s)
    versions = await ObjectiveRepository(session).history(tenant_id)
    promised = versions_of(versions, *interval)
    return _Evidence(
        versions=promised,
        served=await readings.served(*interval),
        by_hour=await readings.by_hour(calendar.hours, query.end_s),
        refused=await readings.refused(calendar.days),
        used=await readings.used(*interval),
        counted=await counted_of(readings, Objectives(versions), promised, *interval),
        complete_until=await readings.complete_until(generated_at),
    )


def _report(tenant: Tenant, query: SloQuery, calendar: Calendar, evidence: _Evidence, generated_at: int) -> Report:
    promised, interval = evidence.versions, (query.start_s, query.end_s)
    series = {each.version_id: Series(evidence.counted.get(each.version_id, Tally())) for each in promised}
    found = [incident for each in promised for incident in incident_rows(each, series[each.version_id], *interval)]
    report = Report(
        tenant_id=tenant.tenant_id,
        tenant_name=tenant.name,
        time_zone=tenant.time_zone,
        start=query.start_s,
        end=query.end_s,
        local_start=_local(query.start_s, calendar.zone),
        local_end=_local(query.end_s, calendar.zone),
        generated_at=generated_at,
        elapsed_ratio=_elapsed(query, generated_at),
        complete_until=evidence.complete_until,
        total=_row((None, None), evidence, query),
        rows=[_row(scope, evidence, query) for scope in _scopes(evidence, query.group)],
        objectives=[objective_row(each, series[each.version_id], *interval) for each in promised],
        incidents=sorted(found, key=lambda each: (each.begin, each.objective, each.alert)),
        days=_day_rows(calendar, evidence),
        hours=[Hour(start, _latency(_ttft_of(evidence, start))) for start in calendar.hours],
        objectives_hash=_hash(openslo.write(promised).encode()),
    )
    return msgspec.structs.replace(report, document_hash=document_hash(report))


def document_hash(report: Report) -> str:
    """As Report says."""
    plain = msgspec.to_builtins(report)
    del plain["document_hash"], plain["generated_at"]
    return _hash(msgspec.json.encode(plain, order="sorted"))


# ── rows ─────────────────────────────────────────────────────────────────────────────────────────


def _scopes(evidence: _Evidence, group: tuple[str, ...]) -> list[_Scope]:
    if not group:
        return []
    served = {place for place, sums in evidence.served.items() if not sums.is_empty}
    seen = served | {(each.model, each.flow_class) for each in evidence.refused}
    cut = {(model if "model" in group else None, flow if "class" in group else None) for model, flow in seen}
    return sorted(cut, key=lambda scope: (scope[0] or "", scope[1] or ""))


def _holds(scope: _Scope, place: Place) -> bool:
    return scope[0] in (None, place[0]) and scope[1] in (None, place[1])


def _row(scope: _Scope, evidence: _Evidence, query: SloQuery) -> Row:
    served = [sums for place, sums in evidence.served.items() if _holds(scope, place)]
    refused = [each for each in evidence.refused if _holds(scope, (each.model, each.flow_class))]
    counts = _counts([(each.valid, each.good) for each in served], refused)
    measured = {name: merged(each.histograms[name] for each in served if name in each.histograms) for name in MEASURES}
    usage = _summed(usage for key, usage in evidence.used.items() if _holds(scope, key))
    excluded, codes = Counter[str](), Counter[str]()
    for sums in served:
        excluded.update(sums.excluded)
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
        attainment=_attainments(counts),
        latency={name: _latency(measured[name]) for name in MEASURES if name not in PHASES},
        phases={name: Phase(measured[name].mean, measured[name].quantile(95)) for name in PHASES},
        tokens=_tokens(usage),
        gpu_ns=usage.gpu_ns,
        price_picousd=usage.price_picousd,
    )


def _counts(served: Iterable[tuple[dict[str, int], dict[str, int]]], refused: Iterable[Refused]) -> dict[str, Counts]:
    """By SLI and ALL, of what had a valid request. The valid ones of those that no engine took are bad."""
    valid, good = Counter[str](), Counter[str]()
    for some_valid, some_good in served:
        valid.update(some_valid)
        good.update(some_good)
    for each in refused:
        if not each.verdict.excluded:
            valid.update(dict.fromkeys((*each.verdict.results, ALL), each.num_requests))
    return {sli: Counts(number, good[sli]) for sli, number in valid.items() if number}


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


def _day_rows(calendar: Calendar, evidence: _Evidence) -> list[Day]:
    refused: dict[int, list[Refused]] = defaultdict(list)
    for each in evidence.refused:
        refused[each.start_s].append(each)
    served: dict[int, list[HourSums]] = defaultdict(list)
    starts = [start for start, _ in calendar.days]
    for hour, sums in evidence.by_hour.items():
        served[starts[bisect_right(starts, hour) - 1]].append(sums)
    return [
        Day(
            datetime.fromtimestamp(start, calendar.zone).date().isoformat(),
            start,
            end,
            _attainments(_counts([(each.valid, each.good) for each in served[start]], refused[start])),
        )
        for start, end in calendar.days
    ]


def _attainments(counts: dict[str, Counts]) -> dict[str, Attainment]:
    return {sli: attainment(counts[sli]) for sli in sorted(counts)}


def _ttft_of(evidence: _Evidence, hour: int) -> Histogram:
    return evidence.by_hour[hour].ttft if hour in evidence.by_hour else Histogram()


def _elapsed(query: SloQuery, generated_at: int) -> float:
    share = (generated_at - query.start_s) / (query.end_s - query.start_s)
    return rounded(min(1.0, max(0.0, share)))


def _local(unix_s: int, zone: ZoneInfo) -> str:
    return datetime.fromtimestamp(unix_s, zone).isoformat()


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
