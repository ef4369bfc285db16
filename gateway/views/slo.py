"""SLO reports as both ports give them: what is asked in a query string, and the answer as JSON, CSV or a page."""

import asyncio
import re
import time
from collections.abc import Mapping
from datetime import date, datetime, timedelta
from zoneinfo import ZoneInfo

import msgspec
from litestar import Response
from sqlmodel.ext.asyncio.session import AsyncSession

from gateway.views.documents import csv_answer, page_answer
from tenants.errors import InvalidValue
from tenants.periods import midnight_ns
from tenants.slo.calendar import GROUPS, SloQuery
from tenants.slo.objectives import MINUTE_S
from tenants.slo.page import TABLES, csv, html
from tenants.slo.report import Report
from tenants.slo.reporting import slo_report
from tenants.tables import Tenant

FORMATS = ("json", "csv", "html")
DEFAULT_DAYS = 30
_NUMBER, _DATE = re.compile(r"[0-9]{1,10}"), re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")


async def answer(session: AsyncSession, tenant: Tenant, asked: Mapping[str, str]) -> Response:
    """Raises InvalidValue, which names the parameter."""
    form, which = _one_of("format", asked, FORMATS), _one_of("table", asked, TABLES)
    report = await slo_report(session, tenant, query_of(asked, tenant.time_zone))
    return await asyncio.to_thread(_as, form, report, which)


def query_of(asked: Mapping[str, str], time_zone: str, now: float | None = None) -> SloQuery:
    """``start`` and ``end`` are Unix seconds, or local dates: midnight. Until now, DEFAULT_DAYS long, unless told."""
    zone = ZoneInfo(time_zone)
    this_minute = int(time.time() if now is None else now) // MINUTE_S * MINUTE_S
    end_s = _instant("end", asked["end"], zone) if "end" in asked else this_minute
    start_s = _instant("start", asked["start"], zone) if "start" in asked else _days_before(end_s, zone)
    groups = tuple(name for name in asked.get("group", ",".join(GROUPS)).split(",") if name and name != "none")
    return SloQuery(start_s, end_s, groups)


def _one_of(name: str, asked: Mapping[str, str], known: tuple[str, ...]) -> str:
    """The first of them unless told; also where nothing depends on it."""
    value = asked.get(name, known[0])
    if value not in known:
        raise InvalidValue(name, f"is one of {', '.join(known)}")
    return value


def _as(form: str, report: Report, which: str) -> Response:
    if form == "html":
        return page_answer(html(report))
    if form == "csv":
        return csv_answer(csv(report, which), f"slo-{which}")
    return Response(msgspec.json.encode(report), media_type="application/json")


def _instant(name: str, text: str, zone: ZoneInfo) -> int:
    if _NUMBER.fullmatch(text):
        return int(text)
    try:
        if _DATE.fullmatch(text):
            return midnight_ns(date.fromisoformat(text), zone) // 10**9
    except ValueError:
        pass
    raise InvalidValue(name, "is in Unix seconds, or a date like 2026-01-31")


def _days_before(end_s: int, zone: ZoneInfo) -> int:
    day = datetime.fromtimestamp(end_s, zone).date() - timedelta(days=DEFAULT_DAYS)
    return max(0, midnight_ns(day, zone) // 10**9)
