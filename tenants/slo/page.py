"""The SLO report as a page that is read on a screen and printed, and as CSV. The numbers are the report's own."""

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from decimal import ROUND_FLOOR, Decimal
from typing import Any
from zoneinfo import ZoneInfo

import msgspec

from tenants.csv_text import csv_text
from tenants.errors import InvalidValue
from tenants.page import Column, escape, facts, page, section, table
from tenants.slo.charts import BarChart, Line, LineChart
from tenants.slo.objectives import SLIS
from tenants.slo.report import Attainment, IncidentRow, Latency, ObjectiveRow, Report, Row

TABLES = ("rows", "objectives", "incidents", "days", "hours")
NOT_ENOUGH = "n/a"
_MOST_BARS = 16
_BURN_WINDOWS = ("1h", "6h", "1d", "3d")
_PICO_DIGITS = 12
_FIXED = "\N{NO-BREAK SPACE}"
_HOW = (
    "TTFT: from the request fully read to the first token sent, streams only. TPOT: mean time between tokens, of one "
    "choice with two tokens or more. E2E: from the request fully read to the last byte of an answer. Attainment is "
    "counted, request by request; latencies are percentiles within 1.1 %, and P99 is n/a below 100 samples. Requests "
    "that their caller got wrong, that exceeded the account's own limits, or that the caller left early are not valid "
    "ones. The budget is what may fail in the objective's window that ends with this report; a burn rate of 1 spends "
    "it just by the window's end."
)


def html(report: Report) -> str:
    """A whole document."""
    zone, total = ZoneInfo(report.time_zone), report.total
    return page(
        f"Service report: {report.tenant_name}",
        facts(_facts(report)),
        section("Summary", facts(_summary(total))),
        section("Objectives", table(_OBJECTIVE_COLUMNS, map(_objective_cells, report.objectives))),
        section("Attainment by day", _attainment_chart(report)),
        section("TTFT P95 by hour", _ttft_chart(report, zone)),
        section("Burn rate at the end", _burn_chart(report)),
        section("Incidents", table(_INCIDENT_COLUMNS, (_incident_cells(each, zone) for each in report.incidents))),
        section("Requests", table(_REQUEST_COLUMNS, map(_request_cells, report.rows), _request_cells(total))),
        section("Attainment", table(_KEPT_COLUMNS, map(_kept_cells, report.rows), _kept_cells(total))),
        section("Latency", table(_LATENCY_COLUMNS, _each(report, _latency_cells))),
        section("Phases", table(_PHASE_COLUMNS, _each(report, _phase_cells))),
        section("Usage", table(_USAGE_COLUMNS, map(_usage_cells, report.rows), _usage_cells(total))),
        f"<footer><p>{escape(_HOW)}</p><p>Document {report.document_hash}</p></footer>",
    )


def csv(report: Report, which: str = "rows") -> str:
    """One of the report's TABLES, a column a field; nested fields have their parts joined by ``_``. Raises
    InvalidValue."""
    if which not in TABLES:
        raise InvalidValue("table", f"is one of {', '.join(TABLES)}")
    items = [report.total, *report.rows] if which == "rows" else getattr(report, which)
    rows = [dict(_flat(msgspec.to_builtins(each))) for each in items]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return csv_text(columns, [[_csv_cell(name, row) for name in columns] for row in rows])


def _csv_cell(name: str, row: dict[str, Any]) -> Any:
    """What is not known is n/a, what a row does not have is empty, and so is what it does not tell apart."""
    value = row.get(name, "")
    return NOT_ENOUGH if value is None and name not in ("model", "class") else value


def _flat(value: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, inner in value.items():
        if isinstance(inner, dict):
            yield from _flat(inner, f"{prefix}{name}_")
        else:
            yield f"{prefix}{name}", inner


# ── sections ─────────────────────────────────────────────────────────────────────────────────────


def _facts(report: Report) -> list[tuple[str, str]]:
    zone = ZoneInfo(report.time_zone)
    return [
        ("Account", f"{report.tenant_name} ({report.tenant_id})"),
        ("From", _when(report.start, zone)),
        ("To (not included)", _when(report.end, zone)),
        ("Time zone", report.time_zone),
        ("Made", _when(report.generated_at, zone)),
        ("Complete until", _when(report.complete_until, zone)),
        ("Elapsed", _percent(report.elapsed_ratio, 1)),
    ]


def _summary(total: Row) -> list[tuple[str, str]]:
    excluded = ", ".join(f"{reason.replace('_', ' ')} {count:,}" for reason, count in total.excluded.items())
    return [
        ("Valid requests", f"{total.valid:,}"),
        ("Kept every objective", f"{total.good:,}"),
        ("Goodput", f"{total.goodput:,.6f} requests/s"),
        ("Not counted", excluded or "none"),
        *((_sli(sli), _share(each)) for sli, each in total.attainment.items()),
    ]


_MODEL = Column("Model", heads=True)
_OBJECTIVE_COLUMNS = (
    *(Column("Objective", heads=True), "Applies to", "Goal"),
    *(Column(name, True) for name in ("Attained", "Good / valid", "Budget left")),
    "Met",
)


def _objective_cells(row: ObjectiveRow) -> list[str]:
    limit = f" ≤ {_plain(row.threshold_ns / 1e6, 3)} ms" if row.threshold_ns else ""
    budget = row.budget
    left = NOT_ENOUGH if budget.left_ratio is None else f"{_percent(budget.left_ratio, 1)} of {_short(budget.allowed)}"
    goal = f"{_sli(row.sli)}{limit}, {_plain(100 * row.target, 6)} % in {budget.window_days} d"
    return [
        f"{row.name} v{row.version}",
        f"{_any(row.model, 'model')}, {_any(row.flow_class, 'class')}",
        goal.replace(" ≤ ", _FIXED + "≤" + _FIXED).replace(" %", _FIXED + "%").replace(" ms", _FIXED + "ms"),
        _percent(row.attainment.ratio),
        f"{row.attainment.good:,} / {row.attainment.valid:,}",
        left,
        {True: "yes", False: "no", None: NOT_ENOUGH}[row.is_met],
    ]


_INCIDENT_COLUMNS = (
    Column("Objective", heads=True),
    "Alert",
    "From",
    "To",
    Column("Bad", True),
    Column("Of the budget", True),
)


def _incident_cells(row: IncidentRow, zone: ZoneInfo) -> list[str]:
    end = _when(row.end, zone) if row.end is not None else "goes on"
    name, alert = f"{row.objective} ({_sli(row.sli)})", row.alert.replace("_", " ")
    return [name, alert, _when(row.begin, zone), end, f"{row.bad:,}", _percent(row.budget_ratio, 1)]


_REQUEST_COLUMNS = (
    *(_MODEL, "Class"),
    *(Column(name, True) for name in ("Valid", "Good", "Own limits", "Caller's errors", "Left early")),
)


def _request_cells(row: Row) -> list[str]:
    counts = (row.valid, row.good, *(row.excluded.get(name, 0) for name in ("own_limit", "caller_error", "left_early")))
    return [*_names(row), *(f"{count:,}" for count in counts)]


_KEPT_COLUMNS = (_MODEL, "Class", *(Column(name, True) for name in ("Availability", "TTFT", "TPOT", "E2E")))


def _kept_cells(row: Row) -> list[str]:
    ratios = (row.attainment[sli].ratio if sli in row.attainment else None for sli in SLIS)
    return [*_names(row), *map(_percent, ratios)]


_LATENCY_COLUMNS = (
    *(_MODEL, "Class", "Measure"),
    *(Column(name, True) for name in ("Samples", "Mean", "P50", "P95", "P99")),
)


def _latency_cells(row: Row) -> list[list[str]]:
    return [[*_names(row), _sli(name), f"{each.count:,}", *_times(each)] for name, each in row.latency.items()]


_PHASE_COLUMNS = (_MODEL, "Class", "Phase", Column("Mean", True), Column("P95", True))


def _phase_cells(row: Row) -> list[list[str]]:
    return [[*_names(row), name, _ms(each.mean_ns), _ms(each.p95_ns)] for name, each in row.phases.items()]


_USAGE_COLUMNS = (
    *(_MODEL, "Class"),
    *(Column(name, True) for name in ("Input", "Cached", "Output", "Cache hits", "GPU seconds", "Price, USD")),
)


def _usage_cells(row: Row) -> list[str]:
    tokens = row.tokens
    counts = (tokens.input, tokens.cached, tokens.output)
    money = _usd(row.price_picousd)
    return [
        *_names(row),
        *(f"{each:,}" for each in counts),
        _percent(tokens.cache_hit_ratio, 1),
        _seconds(row.gpu_ns),
        money,
    ]


def _each(report: Report, cells: Callable[[Row], list[list[str]]]) -> list[list[str]]:
    """The total first: it is what most look for."""
    return [line for row in (report.total, *report.rows) for line in cells(row)]


# ── charts ───────────────────────────────────────────────────────────────────────────────────────


def _attainment_chart(report: Report) -> str:
    days = report.days
    shown = [sli for sli in SLIS if any(sli in day.attainment for day in days)]
    lines = [
        Line(_sli(sli), [day.attainment[sli].ratio if sli in day.attainment else None for day in days]) for sli in shown
    ]
    least = min((value for line in lines for value in line.values if value is not None), default=0.9)
    labels = _spread([day.date[5:] for day in days], 6)
    return LineChart("Attainment by day", lines, min(0.99, least), 1.0, labels, _axis_percent, len(days)).svg()


def _axis_percent(ratio: float) -> str:
    return f"{100 * ratio:g} %"


def _axis_ms(value_ms: float) -> str:
    return f"{_plain(value_ms, 3)} ms"


def _ttft_chart(report: Report, zone: ZoneInfo) -> str:
    values = [None if hour.ttft.p95_ns is None else hour.ttft.p95_ns / 1e6 for hour in report.hours]
    most = max((value for value in values if value is not None), default=100.0)
    starts = [datetime.fromtimestamp(hour.start, zone).strftime("%m-%d %Hh") for hour in report.hours]
    line = Line("P95", values)
    return LineChart("TTFT P95 by hour", [line], 0.0, most, _spread(starts, 4), _axis_ms, len(values)).svg()


def _burn_chart(report: Report) -> str:
    bars = [
        (f"{row.name} {window}", row.burn[window], _burn(row.burn[window]))
        for row in report.objectives
        for window in _BURN_WINDOWS
    ]
    bars.sort(key=lambda bar: -(bar[1] or 0.0))
    return BarChart("Burn rates by objective and window", bars[:_MOST_BARS], 1.0).svg()


def _spread(texts: Sequence[str], most: int) -> list[tuple[int, str]]:
    """At most so many of the texts, evenly, with their places."""
    step = max(1, -(-len(texts) // most))
    return [(place, texts[place]) for place in range(0, len(texts), step)]


# ── words ────────────────────────────────────────────────────────────────────────────────────────


def _names(row: Row) -> list[str]:
    model = "All" if row.model is None else row.model or "(not understood)"
    return [model, "All" if row.flow_class is None else row.flow_class]


def _any(name: str, kind: str) -> str:
    return f"any {kind}" if name == "*" else name


def _sli(name: str) -> str:
    return name.capitalize() if name == "availability" else name.upper()


def _share(each: Attainment) -> str:
    interval = f"{_percent(each.low)} to {_percent(each.high)}"
    return f"{_percent(each.ratio)} ({each.good:,} of {each.valid:,}; 95 % interval {interval})"


def _times(each: Latency) -> list[str]:
    return [_ms(value) for value in (each.mean_ns, each.p50_ns, each.p95_ns, each.p99_ns)]


def _percent(ratio: float | None, digits: int = 3) -> str:
    """Rounded down: what missed a single time is never shown as all."""
    if ratio is None:
        return NOT_ENOUGH
    exact = Decimal(repr(ratio)).scaleb(2)
    return f"{exact.quantize(Decimal(1).scaleb(-digits), ROUND_FLOOR):f} %"


def _burn(rate: float | None) -> str:
    return NOT_ENOUGH if rate is None else _short(rate)


def _short(number: float) -> str:
    return _plain(number, 0 if abs(number) >= 100 else 2)


def _plain(number: float, digits: int) -> str:
    """At most so many digits behind the point, never an exponent."""
    text = f"{number:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if digits else text


def _ms(value_ns: int | None) -> str:
    return NOT_ENOUGH if value_ns is None else f"{value_ns / 1e6:,.1f} ms"


def _seconds(value_ns: int) -> str:
    return f"{value_ns / 1e9:,.3f}"


def _usd(picousd: int) -> str:
    """Exact: a report rounds nothing."""
    whole, rest = divmod(picousd, 10**_PICO_DIGITS)
    return f"{whole:,}.{rest:0{_PICO_DIGITS}d}"


def _when(unix_s: int | None, zone: ZoneInfo) -> str:
    return NOT_ENOUGH if unix_s is None else datetime.fromtimestamp(unix_s, zone).strftime("%Y-%m-%d %H:%M %Z")
