"""The cost report, as JSON."""

import time
from typing import Annotated, Any

import msgspec

from gateway.views.rows import Body
from tenants.margins import COLUMNS, MINUTE_S, MarginQuery, Margins, Taken, ranked

MAX_ROWS = 1000
_DAY_S = 86_400
_Seconds = Annotated[int, msgspec.Meta(ge=0, lt=1 << 33)]


class CostQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``start_time`` ≤ time < ``end_time`` in Unix seconds, widened to whole minutes; the last day unless given.
    ``group_by``: of tenant, model, adapter and class, comma between. ``gpu_hour_picousd`` instead of the setting's."""

    start_time: _Seconds | None = None
    end_time: _Seconds | None = None
    group_by: str = "tenant"
    gpu_hour_picousd: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)] | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=MAX_ROWS)] = 100

    def margins(self, gpu_hour_picousd: int | None) -> MarginQuery:
        """Raises InvalidValue."""
        end_s = int(time.time()) // MINUTE_S * MINUTE_S + MINUTE_S if self.end_time is None else self.end_time
        start_s = max(0, end_s - _DAY_S) if self.start_time is None else self.start_time
        names: Any = tuple(self.group_by.split(","))
        chosen = gpu_hour_picousd if self.gpu_hour_picousd is None else self.gpu_hour_picousd
        return MarginQuery(start_s, end_s, names, chosen)


def cost_body(found: Margins, limit: int) -> Body:
    """``data``: the dearest ``limit`` groups; ``others``: the rest of them together. The ns of ``data``, ``others`` and
    ``accounts`` sum to ``total.ns``, the wall time of all replicas."""
    query = found.query
    rows, others = ranked(found.groups.items(), limit)
    total = Taken()
    for taken in found.groups.values():
        total.add(taken)
    return {
        "object": "report.cost",
        "start_time": query.start_s,
        "end_time": query.end_s,
        "gpu_hour_picousd": query.gpu_hour_picousd,
        "cost_model": {"error_ratio": found.error_ratio, "r_squared": found.r_squared},
        "data": [_names(query, key) | _row(query, taken) for key, taken in rows],
        "others": _row(query, others),
        "num_others": len(found.groups) - len(rows),
        "accounts": [
            {"account": name, "ns": ns, "cost_picousd": query.cost_picousd(ns)} for name, ns in found.accounts.items()
        ],
        "unspread_ns": found.unspread_ns,
        "total": {
            "ns": found.wall_ns,
            "busy_ns": total.busy_ns,
            "price_picousd": total.price_picousd,
            "cost_picousd": query.cost_picousd(found.wall_ns),
            "margin_picousd": _margin(total.price_picousd, query.cost_picousd(found.wall_ns)),
        },
    }


def _names(query: MarginQuery, key: tuple[str, ...]) -> Body:
    return {COLUMNS[name]: value for name, value in zip(query.group_by, key, strict=True)}


def _row(query: MarginQuery, taken: Taken) -> Body:
    cost, full = query.cost_picousd(taken.busy_ns), query.cost_picousd(taken.full_ns)
    return {
        "gpu_ns": taken.gpu_ns,
        "load_ns": taken.load_ns,
        "ns": taken.busy_ns,
        "price_picousd": taken.price_picousd,
        "cost_picousd": cost,
        "margin_picousd": _margin(taken.price_picousd, cost),
        "spread_ns": taken.spread_ns,
        "full_cost_picousd": full,
        "full_margin_picousd": _margin(taken.price_picousd, full),
    }


def _margin(price_picousd: int, cost_picousd: int | None) -> int | None:
    return None if cost_picousd is None else price_picousd - cost_picousd
