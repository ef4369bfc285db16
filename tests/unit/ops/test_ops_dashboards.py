"""Dashboards, rules and the list of metrics belong together. That these are served: tests/e2e/test_e2e_metrics.py."""

import json
import re
import shutil
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from ops.grafana.build import DASHBOARDS, FOLDER, text_of
from tests import observed
from tests.promql import names_of

PROMETHEUS = observed.ROOT / "ops" / "prometheus"
# Section "least observation set" of what every inference system has to watch, as it is worded in the product's aims
LEAST = """TTFT|TPOT|GPU time of prefill and decode|batch size|shapes|memory bandwidth|utilization|time by kernel|
KV in use|block hits|fragmentation|prefix cache hit ratio|queue depth|admission refusals|fallbacks|
latency by model and adapter|cost by model and adapter|adapters|experts"""


@pytest.mark.parametrize("name", DASHBOARDS)
def test_the_json_of_a_dashboard_is_what_its_python_means(name: str):
    assert (FOLDER / name).read_text() == text_of(DASHBOARDS[name]), "run python -m ops.grafana.build"


@pytest.mark.parametrize("path", observed.DASHBOARDS, ids=lambda path: path.name)
def test_panels_have_ids_and_titles_of_their_own_and_do_not_overlap(path: Path):
    panels = json.loads(path.read_text())["panels"]
    cells = Counter(
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    )

    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({panel["title"] for panel in panels}) == len(panels)
    assert max(cells.values()) == 1
    assert max(x for x, _ in cells) < 24


def test_each_item_of_the_least_observation_set_is_served_and_drawn():
    wanted = observed.items()

    assert {name.strip() for name in LEAST.split("|")} <= {item.name.split(",")[0] for item in wanted}
    assert observed.gaps(observed.documented(), observed.drawn(), wanted) == []


def test_a_planted_gap_is_found():
    metrics, drawn, wanted = observed.documented(), observed.drawn(), observed.items()
    first = wanted[0]

    unserved = {name: labels for name, labels in metrics.items() if name != first.metrics[0]}
    undrawn = {title: exprs for title, exprs in drawn.items() if title != first.panels[0]}
    misdrawn = drawn | {first.panels[0]: ["sum(tenora_kv_blocks)"]}
    unmeasured = [replace(first, metrics=("tenora_nothing",)), *wanted[1:]]

    assert len(observed.gaps(unserved, drawn, wanted)) >= 1
    assert len(observed.gaps(metrics, undrawn, wanted)) == 2
    assert observed.gaps(metrics, misdrawn, wanted) == [f"{first.name}: no panel of its draws {first.metrics[0]}"]
    assert len(observed.gaps(metrics, drawn, unmeasured)) == 2


def test_every_query_names_metrics_and_labels_that_are_documented():
    assert observed.unknown_names(observed.documented()) == []


@pytest.mark.parametrize(
    ("expr", "problem"),
    [
        ("rate(tenora_missing_total[5m])", "no metric tenora_missing_total"),
        ('tenora_queue_depth{tenant="x"}', "tenora_queue_depth has no label tenant"),
        ("sum by (adapter) (tenora_queue_depth)", "nothing has a label adapter"),
        ("histogram_quantile(0.9, sum by (le) (rate(tenora_queue_depth[5m])))", "nothing has a label le"),
        ("1 + 1", "names no metric"),
    ],
)
def test_a_query_of_what_is_not_served_is_found(expr: str, problem: str):
    assert observed.problems(expr, {"tenora_queue_depth": {"model", "class"}}) == [problem]


def test_names_and_labels_are_read_from_promql():
    names = names_of(
        'sum by (a, le) (rate(x_bucket{b="c d{e}", f!~"$g"}[5m] offset 1h)) / on (h) group_left () y:z unless max(v)'
    )

    assert names.selected == {"x_bucket": {"b", "f"}, "y:z": set(), "v": set()}
    assert names.grouped == {"a", "le", "h"}


def test_latency_panels_lead_from_exemplars_to_traces():
    titles = {panel["title"]: panel for panel in observed.panels(FOLDER / "operator.json")}

    for title in ("TTFT P50, P95, P99", "TPOT P50, P95, P99", "Whole requests P50, P95, P99"):
        assert any(target["exemplar"] for target in titles[title]["targets"])


def test_every_alert_says_how_bad_and_what_is_wrong():
    alerts = [rule for rule in observed.rules() if "alert" in rule]

    assert len({rule["alert"] for rule in alerts}) == len(alerts) >= 15
    assert all(rule["labels"]["severity"] in ("page", "ticket") for rule in alerts)
    assert all(rule["annotations"]["summary"] for rule in alerts)


def test_burn_alerts_are_the_four_pairs_of_windows():
    pairs = {
        rule["alert"]: re.findall(r"rate(\w+) > ([\d.]+)", rule["expr"])
        for rule in observed.rules()
        if "slo_burn" in rule.get("expr", "") and "alert" in rule
    }

    assert pairs == {
        "TenoraSloBurnsFast": [("1h", "14.4"), ("5m", "14.4")],
        "TenoraSloBurns": [("6h", "6"), ("30m", "6")],
        "TenoraSloBurnsSlowly": [("1d", "3"), ("2h", "3")],
        "TenoraSloBudgetShrinks": [("3d", "1"), ("6h", "1")],
    }


@pytest.mark.skipif(not shutil.which("promtool"), reason="no promtool on PATH; ./run prove dashboards needs it")
@pytest.mark.parametrize("command", observed.PROMTOOL_COMMANDS)
def test_promtool_finds_rules_and_their_tests_right(command: str):
    done = subprocess.run(["promtool", *command.split()], cwd=PROMETHEUS, capture_output=True, text=True, timeout=300)

    assert done.returncode == 0, done.stdout + done.stderr
