"""What is said to be measured and drawn: ops/METRICS.md, the dashboards, the rules; and whether it hangs together."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.promql import names_of

ROOT = Path(__file__).resolve().parents[1]
METRICS = ROOT / "ops" / "METRICS.md"
RULES = ROOT / "ops" / "prometheus" / "rules.yml"
DASHBOARDS = sorted((ROOT / "ops" / "grafana").glob("*.json"))
PROMTOOL_COMMANDS = (
    "check rules rules.yml",
    "check config prometheus.yml",
    "test rules rules_test.yml",
    "test rules rules_days_test.yml",
)
_PARTS = ("_bucket", "_sum", "_count")
OF_PROMETHEUS = {"up": {"job", "instance"}, "ALERTS": {"alertstate", "alertname"}}


@dataclass(frozen=True)
class Item:
    """Of the least observation set: what shows it, and which panels draw that."""

    name: str
    metrics: tuple[str, ...]
    panels: tuple[str, ...]


def _rows(text: str, heading: str) -> Iterator[list[str]]:
    table = text.split(heading, 1)[1].split("\n\n", 1)[0]
    for line in table.splitlines()[1:]:
        if line.startswith("| ") and not line.startswith("|---"):
            yield [cell.strip() for cell in line.strip("|").split("|")]


def documented(text: str | None = None) -> dict[str, set[str]]:
    """Metric → its labels."""
    rows = _rows(text or METRICS.read_text(), "| metric | kind | labels | what |")
    return {name.strip("`"): set(filter(None, labels.split(", "))) for name, _, labels, _ in rows}


def items(text: str | None = None) -> list[Item]:
    rows = _rows(text or METRICS.read_text(), "| item | metrics | panels |")
    return [Item(name, tuple(re.findall(r"`([^`]+)`", metrics)), tuple(p.split("; "))) for name, metrics, p in rows]


def families(samples: Mapping[tuple[str, tuple], float], kinds: Mapping[str, str]) -> dict[str, set[str]]:
    """Served samples → metric, a histogram under its own name, and the labels that it has."""
    found: dict[str, set[str]] = {}
    for name, labels in samples:
        found.setdefault(base(name, kinds), set()).update(label for label, _ in labels if label != "le")
    return found


def base(name: str, known: Mapping[str, object]) -> str:
    """A histogram's name without its part."""
    for part in _PARTS:
        if name.endswith(part) and name.removesuffix(part) in known:
            return name.removesuffix(part)
    return name


def rules() -> list[dict]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def recorded() -> dict[str, set[str]]:
    """Names that rules record → the labels that these have."""
    found: dict[str, set[str]] = {}
    for rule in rules():
        if "record" in rule:
            names = names_of(rule["expr"])
            found.setdefault(rule["record"], set()).update(rule.get("labels", {}), names.grouped)
    return found


def panels(path: Path) -> list[dict]:
    return [panel for panel in json.loads(path.read_text())["panels"] if panel["type"] != "row"]


def queries() -> Iterator[tuple[str, str]]:
    """(where, expression) of every panel, variable, annotation and rule."""
    for path in DASHBOARDS:
        dashboard = json.loads(path.read_text())
        for panel in panels(path):
            for target in panel.get("targets", ()):
                yield f"{path.name}: {panel['title']}", target["expr"]
        for variable in dashboard["templating"]["list"]:
            metric, label = re.fullmatch(r"label_values\((\S+), (\w+)\)", variable["definition"]).groups()
            yield f"{path.name}: ${variable['name']}", f"sum by ({label}) ({metric})"
        for annotation in dashboard["annotations"]["list"]:
            yield f"{path.name}: {annotation['name']}", annotation["expr"]
    for rule in rules():
        yield f"rules.yml: {rule.get('record') or rule['alert']}", rule["expr"]


def unknown_names(served: Mapping[str, set[str]]) -> list[str]:
    """What queries name and ``served`` (metric → labels) does not have."""
    known = {**served, **recorded(), **OF_PROMETHEUS}
    return [f"{where}: {problem}" for where, expr in queries() for problem in problems(expr, known)]


def problems(expr: str, known: Mapping[str, set[str]]) -> list[str]:
    """Metrics of an expression that are not known, and labels that they don't have."""
    names, found, have = names_of(expr), [], set()
    if not names.selected and "vector(" not in expr:
        found.append("names no metric")
    for metric, labels in names.selected.items():
        of = base(metric, known)
        if of not in known:
            found.append(f"no metric {metric}")
            continue
        own = known[of] | ({"le"} if metric.endswith("_bucket") else set())
        found += [f"{metric} has no label {label}" for label in sorted(labels - own)]
        have |= own
    return found + [f"nothing has a label {label}" for label in sorted(names.grouped - have)]


def gaps(served: Mapping[str, set[str]], drawn: Mapping[str, list[str]], wanted: list[Item]) -> list[str]:
    """Items of the observation set that no served metric shows, or no panel (title → its queries) draws."""
    found = []
    for item in wanted:
        found += [f"{item.name}: {metric} is not served" for metric in item.metrics if metric not in served]
        found += [f"{item.name}: no panel {title}" for title in item.panels if title not in drawn]
        shown = {
            base(name, served)
            for title in item.panels
            for expr in drawn.get(title, ())
            for name in names_of(expr).selected
        }
        found += [f"{item.name}: no panel of its draws {metric}" for metric in item.metrics if metric not in shown]
    return found


def drawn() -> dict[str, list[str]]:
    """The operator's panels: title → queries."""
    path = next(path for path in DASHBOARDS if path.name == "operator.json")
    return {panel["title"]: [target["expr"] for target in panel.get("targets", ())] for panel in panels(path)}
