"""Every metric that is served moves under load: a name that never moves is a lie on a dashboard."""

import concurrent.futures
from collections import Counter
from dataclasses import dataclass

import pytest

from tests import plain
from tests.load import OPTIONS, load, models
from tests.observed import documented, drawn, families, gaps, items, unknown_names
from tests.served import Served, eventually, parse_metrics, serving

# What load on a healthy machine can't move, with the test that moves it.
MOVED_ELSEWHERE = {
    "tenora_spans_dropped_total": "tests/unit/gateway: a full span queue",
    "tenora_fallbacks_total": "tests/unit/gateway: a store that is down",
    "tenora_grouped_decodes_total": "tests/gpu: decodes behind one text, in groups on a GPU only",
    "tenora_engine_gateways": "below: a killed gateway",
    "tenora_usage_journal_failing": "tests/unit/engine: a full disk",
    "tenora_grammar_cut_total": "tests/unit/engine: a mask that costs too much",
    "tenora_usage_stalled_seconds": "tests/unit/engine: records that nobody acknowledges",
    "tenora_lost_request_gpu_seconds_total": "tests/unit/engine: a gateway that is lost",
    "tenora_collective_seconds_bucket": "nothing: an engine has one device",
    "tenora_collective_seconds_count": "nothing: an engine has one device",
    "tenora_collective_seconds_sum": "nothing: an engine has one device",
    "tenora_webhook_pending": "tests/e2e: an installation with a webhook",
    "tenora_store_away": "tests/unit/gateway: a store that is down",
    "tenora_reports_failed_total": "tests/unit/gateway: a measure that is not sound",
}


@pytest.fixture(scope="module")
def served(tmp_path_factory, model_dir):
    """Four gateways on one socket, two engines."""
    with serving(tmp_path_factory.mktemp("metrics"), *models(model_dir), "--gateways", "4", *OPTIONS) as running:
        yield running


@dataclass(frozen=True)
class Watched:
    """Samples by metric: before the load, all that were seen while it ran, and after it."""

    before: dict[str, dict]
    seen: dict[str, set]
    after: dict[str, dict]
    labels: dict[str, set[str]]  # metric, a histogram under its own name → labels


@pytest.fixture(scope="module")
def watched(served: Served, tmp_path_factory) -> Watched:
    before, seen = by_family(served.metrics()), {}
    key = served.new_tenant("metrics-tenant")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        running = pool.submit(load, served, key, tmp_path_factory.mktemp("load"))
        while not running.done():
            for name, samples in by_family(served.metrics()).items():
                seen.setdefault(name, set()).update(samples.items())
        running.result()
    after = served.metrics()
    return Watched(before, seen, by_family(after), families(after, documented()))


def by_family(samples: dict) -> dict[str, dict]:
    families: dict[str, dict] = {}
    for (name, labels), value in samples.items():
        families.setdefault(name, {})[labels] = value
    return families


def test_load_moves_every_served_metric(watched: Watched):
    names = {name for name in watched.after if name.startswith(("tenora_", "vllm:"))}

    still = {
        name
        for name in names - MOVED_ELSEWHERE.keys()
        if not (watched.seen.get(name, set()) | set(watched.after[name].items()))
        - set(watched.before.get(name, {}).items())
    }
    assert not still, f"served, and never moved: {sorted(still)}"
    assert len(names) > 30


# Served only once what they count has happened, or where there is such a device
SOMETIMES = {"tenora_records_unbooked_total", "tenora_slo_requests_total", "tenora_webhook_deliveries_total"}


def test_what_is_served_is_what_is_documented(watched: Watched):
    found, loaded = documented(), watched.labels

    assert {name for name in loaded if name not in found} == set(), "served, and not in ops/METRICS.md"
    assert found.keys() - loaded.keys() - SOMETIMES == set(), "in ops/METRICS.md, and not served"
    assert {name: labels - found[name] for name, labels in loaded.items() if labels - found[name]} == {}
    assert {name: found[name] - labels for name, labels in loaded.items() if found[name] - labels} == {}


def test_every_query_of_every_dashboard_and_rule_names_what_is_served(watched: Watched):
    loaded = watched.labels
    never_here = {name: labels for name, labels in documented().items() if name in SOMETIMES}

    assert unknown_names(never_here | loaded) == []
    assert gaps(loaded, drawn(), items()) == []


def test_counters_of_four_gateways_never_fall_and_count_nothing_twice_over_a_kill_and_a_restart(served: Served):
    """Case 24: 40 requests, 10 of them refused; twenty scrapes; one gateway killed and restarted; 10 more."""

    def call(max_tokens: int) -> int:
        with served.http() as http:  # each on a connection of its own: any of the four takes it
            body = {"model": "tiny", "prompt": "x", "max_tokens": max_tokens}
            return http.post("/completions", json=body).status_code

    def outcomes() -> tuple[float, float, float]:
        metrics = served.metrics()
        told = {}
        for (name, labels), value in metrics.items():
            if name == "tenora_requests_total":
                told[dict(labels)["outcome"]] = told.get(dict(labels)["outcome"], 0) + value
        return told.get("200", 0), told.get("400", 0), metrics["tenora_store_away", ()]

    # new_tenant's and the fixtures' own calls run no model
    good, bad, _ = outcomes()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = Counter(pool.map(call, [-1 if number % 4 == 0 else 1 for number in range(40)]))
    eventually(lambda: outcomes()[:2] == (good + 30, bad + 10))
    scrapes = [outcomes() for _ in range(20)]

    victim = max(served.gateways(), key=lambda process: sum(process.cpu_times()[:2]))
    victim.kill()
    during = [outcomes() for _ in range(5)]
    eventually(lambda: len(served.gateways()) == 4 and victim.pid not in {child.pid for child in served.gateways()})
    eventually(lambda: plain.get(f"{served.ops_url}/readyz").status_code == 200)
    totals = []
    for _ in range(10):
        assert call(1) == 200
        totals.append(eventually(lambda: (seen := outcomes()[0]) > good + 30 + len(totals) - 1 and seen))
    eventually(lambda: outcomes()[:2] == (good + 40, bad + 10))

    assert answers == {200: 30, 400: 10}
    assert scrapes == [(good + 30, bad + 10, 0)] * 20
    assert during == [(good + 30, bad + 10, 0)] * 5
    assert totals == sorted(totals)
    assert max(totals) <= good + 40


def test_metrics_need_no_key_and_speak_openmetrics_when_asked(served: Served):
    usual = plain.get(f"{served.ops_url}/metrics")
    asked = plain.get(f"{served.ops_url}/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})

    assert usual.headers["content-type"].startswith("text/plain")
    assert parse_metrics(usual.text)
    assert asked.headers["content-type"].startswith("application/openmetrics-text")
    assert asked.text.endswith("# EOF\n")


def test_no_adapter_key_or_client_word_is_a_label_and_a_tenant_only_by_its_id(served: Served):
    pairs = {pair for _, labels in served.metrics() for pair in labels}

    assert not {value for _, value in pairs if value in ("acme", "A", "metrics-tenant") or value.startswith("tn_")}
    assert {name for name, value in pairs if value.startswith("ten_")} <= {"tenant"}


def test_a_gateway_process_stays_under_120_mb(served: Served, watched: Watched):
    """After the load, that is; the real model's are in test_e2e_newcomer.py."""
    resident_mb = [gateway.memory_info().rss / 1e6 for gateway in served.gateways()]

    assert len(resident_mb) == 4
    assert max(resident_mb) < 120, resident_mb
