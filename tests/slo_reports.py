"""SLO reports to be shown: empty but for what a test says."""

from tenants.slo.report import Day, Hour, Latency, Phase, Report, Row, Tokens
from tenants.slo.verdict import PHASES

NOON_S = 1_900_000_800
NOTHING = Latency(0, None, None, None, None)


def row(model: str | None = None, **changes) -> Row:
    values = {
        "model": model,
        "flow_class": model and "standard",
        "valid": 0,
        "good": 0,
        "goodput": 0.0,
        "excluded": {},
        "refused": {},
        "attainment": {},
        "latency": dict.fromkeys(("ttft", "tpot", "e2e"), NOTHING),
        "phases": dict.fromkeys(PHASES, Phase(None, None)),
        "tokens": Tokens(0, 0, 0, None),
        "gpu_ns": 0,
        "price_picousd": 0,
    }
    return Row(**values | changes)


def report(*rows: Row, **changes) -> Report:
    values = {
        "tenant_id": "ten_a",
        "tenant_name": "Acme",
        "time_zone": "UTC",
        "start": NOON_S,
        "end": NOON_S + 3600,
        "local_start": "2030-03-17T20:00:00+00:00",
        "local_end": "2030-03-17T21:00:00+00:00",
        "generated_at": NOON_S + 7200,
        "elapsed_ratio": 1.0,
        "complete_until": None,
        "total": row(),
        "rows": list(rows),
        "objectives": [],
        "incidents": [],
        "days": [Day("2030-03-17", NOON_S, NOON_S + 3600, {})],
        "hours": [Hour(NOON_S, NOTHING)],
        "objectives_hash": "",
        "document_hash": "f" * 64,
    }
    return Report(**values | changes)
