"""The SLO report of one tenant: a function of its sums in [start, end), the same whatever else is served.

Its shape is the JSON that callers get; ``page.py`` shows the same. Times of requests are ns, times of day Unix
seconds, money is picousd. An empty interval has nulls and zeros.
"""

from msgspec import Struct, field

SCHEMA = 1


class Attainment(Struct, frozen=True):
    """``ratio`` = good / valid, with its 95 % interval by Wilson; null without a valid request."""

    valid: int
    good: int
    ratio: float | None
    low: float | None
    high: float | None


class Latency(Struct, frozen=True):
    """Null where there are too few samples: P99 wants 100, the others one."""

    count: int
    mean_ns: int | None
    p50_ns: int | None
    p95_ns: int | None
    p99_ns: int | None


class Phase(Struct, frozen=True):
    mean_ns: int | None
    p95_ns: int | None


class Tokens(Struct, frozen=True):
    """Those that were charged for; ``input`` includes ``cached``."""

    input: int
    cached: int
    output: int
    cache_hit_ratio: float | None


class Row(Struct, frozen=True, kw_only=True):
    """One model and class, or (null) several together. ``excluded``: by reason, not valid. ``refused``: all that no
    engine took, by the error's code, valid or not. ``goodput``: requests a second that kept every objective."""

    model: str | None
    flow_class: str | None = field(name="class")
    valid: int
    good: int
    goodput: float
    excluded: dict[str, int]
    refused: dict[str, int]
    attainment: dict[str, Attainment]
    latency: dict[str, Latency]
    phases: dict[str, Phase]
    tokens: Tokens
    gpu_ns: int
    price_picousd: int


class Budget(Struct, frozen=True):
    """Of the window that ends with the report: ``allowed`` requests may be bad, ``bad`` were. ``left`` may be
    negative."""

    window_days: int
    valid: int
    bad: int
    allowed: float
    left: float
    left_ratio: float | None


class ObjectiveRow(Struct, frozen=True, kw_only=True):
    """A version that was in force in the interval, its counts there, its budget and how fast that burns at the end of
    the interval: by window, 1 = spent just by the window's end."""

    name: str
    sli: str
    model: str
    flow_class: str = field(name="class")
    version: int
    effective_at: int
    threshold_ns: int | None
    target: float
    attainment: Attainment
    is_met: bool | None
    budget: Budget
    burn: dict[str, float | None]


class IncidentRow(Struct, frozen=True, kw_only=True):
    """An alert that fired; ``to`` null: it still did at the end. ``budget_ratio``: the part of the window's budget that
    the ``bad`` ones took."""

    objective: str
    sli: str
    model: str
    flow_class: str = field(name="class")
    alert: str
    begin: int = field(name="from")
    end: int | None = field(name="to")
    bad: int
    budget_ratio: float | None


class Day(Struct, frozen=True):
    """A local day, of 23, 24 or 25 hours, as far as it is in the interval."""

    date: str
    start: int
    end: int
    attainment: dict[str, Attainment]


class Hour(Struct, frozen=True):
    start: int
    ttft: Latency


class Report(Struct, frozen=True, kw_only=True):
    """``document_hash`` is the SHA-256 of all but itself and ``generated_at``, as JSON with sorted keys;
    ``objectives_hash`` that of the OpenSLO documents in force. ``complete_until``: of what ended before, nothing
    is missing (null: no engine was heard); ``elapsed_ratio``: how much of the interval was over when it was made."""

    object: str = "slo_report"
    schema: int = SCHEMA
    tenant_id: str
    tenant_name: str
    time_zone: str
    start: int
    end: int
    local_start: str
    local_end: str
    generated_at: int
    elapsed_ratio: float
    complete_until: int | None
    total: Row
    rows: list[Row]
    objectives: list[ObjectiveRow]
    incidents: list[IncidentRow]
    days: list[Day]
    hours: list[Hour]
    objectives_hash: str
    document_hash: str = ""
