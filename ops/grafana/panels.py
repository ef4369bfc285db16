"""A dashboard in few words: rows of panels, each with its queries, and the Grafana JSON that they mean."""

from dataclasses import dataclass
from typing import Any

SCHEMA_VERSION = 39  # Grafana 11
COLUMNS = 24
PROMETHEUS = {"type": "prometheus", "uid": "prometheus"}


@dataclass(frozen=True)
class Query:
    """PromQL and what its series are called. ``exemplars``: the requests behind it are shown as points."""

    expr: str
    legend: str
    exemplars: bool = False


@dataclass(frozen=True)
class Panel:
    """``unit`` is one of Grafana's (s, percentunit, reqps, …)."""

    title: str
    queries: tuple[Query, ...]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8
    stacked: bool = False
    text: str = ""


@dataclass(frozen=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Variable:
    """A choice above the dashboard: the values that ``label`` has in ``metric``."""

    name: str
    metric: str
    label: str
    multi: bool = True


@dataclass(frozen=True)
class Dashboard:
    uid: str
    title: str
    variables: tuple[Variable, ...]
    rows: tuple[Row, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "uid": self.uid,
            "title": self.title,
            "tags": ["tenora"],
            "schemaVersion": SCHEMA_VERSION,
            "version": 1,
            "editable": True,
            "refresh": "30s",
            "time": {"from": "now-6h", "to": "now"},
            "timezone": "browser",
            "templating": {"list": [_variable(variable) for variable in self.variables]},
            "annotations": {"list": [_alerts()]},
            "panels": _panels(self.rows),
        }


def _variable(variable: Variable) -> dict[str, Any]:
    query = f"label_values({variable.metric}, {variable.label})"
    return {
        "name": variable.name,
        "type": "query",
        "datasource": PROMETHEUS,
        "query": {"query": query, "refId": variable.name},
        "definition": query,
        "includeAll": variable.multi,
        "multi": variable.multi,
        "allValue": ".*" if variable.multi else None,
        "current": {"text": "All", "value": "$__all"} if variable.multi else {},
        "refresh": 2,
        "sort": 1,
    }


def _alerts() -> dict[str, Any]:
    return {
        "name": "Alerts",
        "datasource": PROMETHEUS,
        "enable": True,
        "expr": 'ALERTS{alertstate="firing"}',
        "titleFormat": "{{alertname}}",
        "iconColor": "red",
    }


def _panels(rows: tuple[Row, ...]) -> list[dict[str, Any]]:
    """Rows of panels from left to right, in lines of COLUMNS."""
    placed: list[dict[str, Any]] = []
    y = 0
    for row in rows:
        placed.append(_row(row.title, y, len(placed) + 1))
        y, x = y + 1, 0
        for panel in row.panels:
            if x + panel.width > COLUMNS:
                x, y = 0, y + 8
            placed.append(_panel(panel, {"x": x, "y": y, "w": panel.width, "h": 8}, len(placed) + 1))
            x += panel.width
        y += 8
    return placed


def _row(title: str, y: int, number: int) -> dict[str, Any]:
    place = {"x": 0, "y": y, "w": COLUMNS, "h": 1}
    return {"id": number, "type": "row", "title": title, "collapsed": False, "panels": [], "gridPos": place}


def _panel(panel: Panel, place: dict[str, int], number: int) -> dict[str, Any]:
    common = {"id": number, "type": panel.kind, "title": panel.title, "gridPos": place}
    if panel.kind == "text":
        return {**common, "options": {"mode": "markdown", "content": panel.text}}
    custom = {"fillOpacity": 30, "stacking": {"mode": "normal"}} if panel.stacked else {"fillOpacity": 5}
    return {
        **common,
        "description": panel.text,
        "datasource": PROMETHEUS,
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": custom}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [_target(query, chr(ord("A") + index)) for index, query in enumerate(panel.queries)],
    }


def _target(query: Query, name: str) -> dict[str, Any]:
    return {
        "refId": name,
        "datasource": PROMETHEUS,
        "expr": query.expr,
        "legendFormat": query.legend,
        "exemplar": query.exemplars,
        "range": True,
    }
