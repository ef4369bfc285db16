"""Objectives in a report: the versions of an interval, their attainment, budgets, burn rates and incidents."""

from collections.abc import Iterator
from itertools import pairwise
from math import sqrt

from tenants.slo.burn import LOOK_BACK_S, WINDOWS_S, Counts, Incident, Series, incidents, rate
from tenants.slo.objectives import PPM, Objective, Objectives
from tenants.slo.readings import ByVersion, Readings, merged_by_version
from tenants.slo.report import Attainment, Budget, IncidentRow, ObjectiveRow

DAY_S, HOUR_S = 86_400, 3600
_NS = 10**9
_Z = 1.959963984540054  # of 95 %
_DIGITS = 9
_NAMES = {60: "m", HOUR_S: "h", DAY_S: "d"}


def versions_of(versions: list[Objective], start_s: int, end_s: int) -> list[Objective]:
    """Versions that were in force somewhere in the interval; ``versions`` in their order."""
    until = {first.version_id: later.effective_unix_ns for first, later in pairwise(versions) if first.key == later.key}
    return [
        each
        for each in versions
        if not each.retired
        and each.effective_unix_ns < end_s * _NS
        and max(each.effective_unix_ns, start_s * _NS) < until.get(each.version_id, end_s * _NS)
    ]


async def counted_of(
    readings: Readings, objectives: Objectives, promised: list[Objective], start_s: int, end_s: int
) -> ByVersion:
    """From so far back that every window of the interval is whole."""
    if not promised:
        return {}
    longest_s = max(each.window_days for each in promised) * DAY_S
    since_s = max(0, min(start_s - LOOK_BACK_S, end_s - longest_s))
    served = await readings.by_version([each.version_id for each in promised], since_s, end_s)
    return merged_by_version(served, await readings.refused_by_version(since_s, end_s, objectives))


def objective_row(objective: Objective, series: Series, start_s: int, end_s: int) -> ObjectiveRow:
    counts = series.between(start_s, end_s)
    windows = {_window_name(window): series.between(end_s - window, end_s) for window in WINDOWS_S}
    return ObjectiveRow(
        name=objective.name,
        sli=objective.sli,
        model=objective.model,
        flow_class=objective.flow_class,
        version=objective.version,
        effective_at=objective.effective_unix_ns // _NS,
        threshold_ns=objective.threshold_ns or None,
        target=objective.target_ppm / PPM,
        attainment=attainment(counts),
        is_met=counts.good * PPM >= counts.valid * objective.target_ppm if counts.valid else None,
        budget=_budget(objective, series, end_s),
        burn={name: _rounded_or_none(rate(window, objective.target_ppm)) for name, window in windows.items()},
    )


def _budget(objective: Objective, series: Series, end_s: int) -> Budget:
    counts = series.between(end_s - objective.window_days * DAY_S, end_s)
    allowed = counts.valid * (PPM - objective.target_ppm) / PPM
    left = allowed - counts.bad
    ratio = rounded(left / allowed) if allowed else None
    return Budget(objective.window_days, counts.valid, counts.bad, rounded(allowed), rounded(left), ratio)


def incident_rows(objective: Objective, series: Series, start_s: int, end_s: int) -> Iterator[IncidentRow]:
    allowed = _budget(objective, series, end_s).allowed
    for each in incidents(series, objective.target_ppm, start_s, end_s):
        yield _incident_row(objective, each, allowed)


def _incident_row(objective: Objective, incident: Incident, allowed: float) -> IncidentRow:
    return IncidentRow(
        objective=objective.name,
        sli=objective.sli,
        model=objective.model,
        flow_class=objective.flow_class,
        alert=incident.alert,
        begin=incident.from_s,
        end=incident.to_s,
        bad=incident.bad,
        budget_ratio=rounded(incident.bad / allowed) if allowed else None,
    )


def _window_name(window_s: int) -> str:
    unit = max(unit for unit in _NAMES if window_s % unit == 0)
    return f"{window_s // unit}{_NAMES[unit]}"


def attainment(counts: Counts) -> Attainment:
    if not counts.valid:
        return Attainment(0, 0, None, None, None)
    low, high = wilson(counts.good, counts.valid)
    return Attainment(counts.valid, counts.good, rounded(counts.good / counts.valid), rounded(low), rounded(high))


def wilson(good: int, valid: int) -> tuple[float, float]:
    """The 95 % score interval of a share (E. B. Wilson, 1927)."""
    share, square = good / valid, _Z * _Z
    scale = 1 + square / valid
    middle = (share + square / (2 * valid)) / scale
    reach = _Z * sqrt(share * (1 - share) / valid + square / (4 * valid * valid)) / scale
    return max(0.0, middle - reach), min(1.0, middle + reach)


def rounded(value: float) -> float:
    return round(value, _DIGITS)


def _rounded_or_none(value: float | None) -> float | None:
    return None if value is None else rounded(value)
