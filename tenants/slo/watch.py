"""Burn alerts: each minute is looked at once, by whichever process comes first, and what changed is told.

An alert that fires opens an incident, and a calm of CALM_MINUTES closes it, both with an event in the same transaction.
Only a tenant with something bad in the longest of the short windows, at any look of such a calm, can have an incident.
"""

import asyncio
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field

from sqlalchemy import literal, update
from sqlmodel import col, select
from sqlmodel.ext.asyncio.session import AsyncSession

from tenants.bulk import insert_new
from tenants.database import Database
from tenants.events import emit
from tenants.slo.burn import (
    ALERTS,
    CALM_MINUTES,
    LONGEST_SHORT_S,
    LOOK_BACK_S,
    Alert,
    Series,
    Tally,
    firing,
    is_calm,
    rate,
)
from tenants.slo.minutes import HOUR_S
from tenants.slo.objectives import MINUTE_S, PPM, Objective, Objectives
from tenants.slo.readings import Readings, merged_by_version
from tenants.slo.repository import ObjectiveRepository
from tenants.tables import ObjectiveHour, RefusalMinute, SloIncident, SloObjective, SloWatch

GRACE_S = 60  # after a minute's end: its requests are booked by then
_NAMESPACE = uuid.UUID("0d5c6a0e-4c53-5b0f-8f0e-7d2f6a1b9c35")  # ours, fixed for ever
_WATCH_ID = 1
_Key = tuple[str, str, str, str, str]  # tenant, model, class, SLI, alert


@dataclass(frozen=True, slots=True)
class Firing:
    objective: Objective
    alert: Alert
    long_rate: float | None
    short_rate: float | None


@dataclass(slots=True)
class _Seen:
    """Alerts that fire, and those whose short window was not calm: an incident of theirs stays open."""

    firing: dict[_Key, Firing] = field(default_factory=dict)
    restless: set[_Key] = field(default_factory=set)


async def look(database: Database, now_s: int) -> int | None:
    """Looks at the last minute that is over since GRACE_S; how many incidents opened or closed. None: somebody has
    looked at it."""
    at_s = (now_s - GRACE_S) // MINUTE_S * MINUTE_S
    async with database.session() as session:
        before = await session.get(SloWatch, _WATCH_ID)
        if before is not None and before.minute_s >= at_s:
            return None
        seen = _Seen()
        for tenant_id in await _suspects(session, at_s):
            await _see(session, tenant_id, at_s, seen)
    async with database.transaction() as session:
        if not await _moved_on(session, at_s):
            return None
        return await _tell(session, seen, at_s)


async def incidents_of(session: AsyncSession, tenant_id: str, limit: int) -> list[SloIncident]:
    """The newest first."""
    query = select(SloIncident).where(SloIncident.tenant_id == tenant_id)
    newest = query.order_by(col(SloIncident.opened_s).desc(), col(SloIncident.incident_id)).limit(limit)
    return list((await session.exec(newest)).all())


async def _suspects(session: AsyncSession, at_s: int) -> list[str]:
    """Tenants with an objective, and something bad in the last hours."""
    since_s = at_s - LONGEST_SHORT_S - CALM_MINUTES * MINUTE_S
    every = await session.exec(select(SloObjective.tenant_id).distinct().order_by(SloObjective.tenant_id))
    return [tenant_id for tenant_id in every.all() if await _had_bad(session, tenant_id, since_s, at_s)]


async def _had_bad(session: AsyncSession, tenant_id: str, since_s: int, at_s: int) -> bool:
    counted = select(literal(1)).where(
        ObjectiveHour.tenant_id == tenant_id,
        ObjectiveHour.hour_s >= since_s // HOUR_S * HOUR_S,
        ObjectiveHour.hour_s < at_s,
        ObjectiveHour.valid > ObjectiveHour.good,
    )
    refused = select(literal(1)).where(
        RefusalMinute.tenant_id == tenant_id, RefusalMinute.minute_s >= since_s, RefusalMinute.minute_s < at_s
    )
    for query in (counted, refused):
        if (await session.exec(query.limit(1))).first() is not None:
            return True
    return False


async def _see(session: AsyncSession, tenant_id: str, at_s: int, seen: _Seen) -> None:
    """Adds what is to be seen of a tenant's objectives, at that minute's beginning."""
    versions = await ObjectiveRepository(session).history(tenant_id)
    readings, in_force = Readings(session, tenant_id), _in_force(versions, at_s)
    since_s = at_s - LOOK_BACK_S
    counted = merged_by_version(
        await readings.by_version([each.version_id for each in in_force], since_s, at_s),
        await readings.refused_by_version(since_s, at_s, Objectives(versions)),
    )
    for objective in in_force:
        await asyncio.to_thread(_judge, objective, counted.get(objective.version_id, Tally()), at_s, seen)


def _judge(objective: Objective, tally: Tally, at_s: int, seen: _Seen) -> None:
    series = Series(tally)
    for alert in ALERTS:
        key = (*objective.key, alert.name)
        if firing(series, alert, at_s, objective.target_ppm):
            seen.firing[key] = _firing(objective, alert, series, at_s)
        if not is_calm(series, alert, at_s, objective.target_ppm):
            seen.restless.add(key)


def _in_force(versions: Iterable[Objective], at_s: int) -> list[Objective]:
    """The last version of each line that had begun by then; ``versions`` in their order."""
    last = {each.key: each for each in versions if each.effective_unix_ns < at_s * 10**9}
    return [each for each in last.values() if not each.retired]


def _firing(objective: Objective, alert: Alert, series: Series, at_s: int) -> Firing:
    rates = (
        rate(series.between(at_s - window_s, at_s), objective.target_ppm) for window_s in (alert.long_s, alert.short_s)
    )
    return Firing(objective, alert, *rates)


async def _moved_on(session: AsyncSession, at_s: int) -> bool:
    """Compare and swap: of all processes one is told yes, for each minute."""
    if await insert_new(session, SloWatch, ("watch_id", "minute_s"), [(_WATCH_ID, at_s)]):
        return True
    move = update(SloWatch).where(col(SloWatch.watch_id) == _WATCH_ID, col(SloWatch.minute_s) < at_s)
    return (await session.exec(move.values(minute_s=at_s))).rowcount == 1


async def _tell(session: AsyncSession, seen: _Seen, at_s: int) -> int:
    query = select(SloIncident).where(col(SloIncident.closed_s).is_(None))
    opened = {_key_of(row): row for row in (await session.exec(query)).all()}
    begun = sorted(seen.firing.keys() - opened.keys())
    over = [opened[key] for key in sorted(opened.keys() - seen.restless)]
    for key in begun:
        await _open(session, key, seen.firing[key], at_s)
    for incident in over:
        incident.closed_s = at_s
        session.add(incident)
        await emit(session, incident.tenant_id, "slo.recovered", incident_data(incident), once=incident.incident_id)
    await session.flush()
    return len(begun) + len(over)


async def _open(session: AsyncSession, key: _Key, firing: Firing, at_s: int) -> None:
    tenant_id, model, flow_class, sli, alert = key
    incident = SloIncident(
        incident_id=str(uuid.uuid5(_NAMESPACE, "\x00".join((*key, str(at_s))))),
        tenant_id=tenant_id,
        model=model,
        flow_class=flow_class,
        sli=sli,
        alert=alert,
        opened_s=at_s,
    )
    session.add(incident)
    rates = {"burn_rate_long": firing.long_rate, "burn_rate_short": firing.short_rate}
    windows = {"long_window_s": firing.alert.long_s, "short_window_s": firing.alert.short_s}
    goal = {"objective": firing.objective.name, "target": firing.objective.target_ppm / PPM}
    data = incident_data(incident) | goal | windows | rates
    await emit(session, tenant_id, "slo.burn", data, once=incident.incident_id)


def incident_data(incident: SloIncident) -> dict[str, str | int | None]:
    return {
        "incident_id": incident.incident_id,
        "model": incident.model,
        "class": incident.flow_class,
        "sli": incident.sli,
        "alert": incident.alert,
        "opened_at": incident.opened_s,
        "closed_at": incident.closed_s,
    }


def _key_of(row: SloIncident) -> _Key:
    return row.tenant_id, row.model, row.flow_class, row.sli, row.alert
