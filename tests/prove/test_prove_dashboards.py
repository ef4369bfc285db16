"""A real Prometheus over a served installation: targets are up, rules are healthy, every query of every dashboard is
answered, an exemplar leads to a request's trace. `./run prove dashboards`; needs `prometheus` and `promtool` on PATH
(Debian and Ubuntu: the package prometheus).
"""

import contextlib
import re
import shutil
import subprocess
from collections.abc import Iterator

import httpx
import pytest
import yaml

from tests import observed
from tests.load import OPTIONS, load, models
from tests.observed import PROMTOOL_COMMANDS
from tests.ports import free_port
from tests.served import Served, eventually, serving
from tests.tiny import write_hf_dir

pytestmark = pytest.mark.long
VARIABLES = {"$__rate_interval": "1m", "$__range": "5m", "$tenant": "other"}
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("dashboards")
    model_dir = write_hf_dir(folder / "tiny")
    with serving(folder / "home", *models(model_dir), *OPTIONS) as running:
        yield running


@pytest.fixture(scope="module")
def prometheus(served: Served, tmp_path_factory) -> Iterator[httpx.Client]:
    """Our configuration, but for the port and how often it looks; asked through its API."""
    folder = tmp_path_factory.mktemp("prometheus")
    config = yaml.safe_load((observed.ROOT / "ops" / "prometheus" / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["scrape_configs"][0]["static_configs"] = [{"targets": [f"127.0.0.1:{served.ops_port}"]}]
    shutil.copy(observed.RULES, folder)
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    command = [
        needed("prometheus"), f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}", "--enable-feature=exemplar-storage",
    ]  # fmt: skip
    with (
        (folder / "log").open("wb") as log,
        subprocess.Popen(command, stdout=log, stderr=log) as process,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client,
    ):
        try:
            eventually(lambda: client.get("/-/ready").status_code == 200, timeout_s=60)
            yield client
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()


@pytest.fixture(scope="module")
def scraped(served: Served, prometheus: httpx.Client, tmp_path_factory) -> httpx.Client:
    """Several scrapes before, while and after there is load."""
    eventually(lambda: answer(prometheus, 'count_over_time(up{job="tenora"}[1m]) > 2'), timeout_s=30)
    load(served, served.new_tenant("observed"), tmp_path_factory.mktemp("load"))
    with served.http() as http:
        headers = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
        body = {"model": "tiny", "prompt": "x", "max_tokens": 2, "stream": True}
        assert http.post("/completions", json=body, headers=headers).status_code == 200
    eventually(lambda: answer(prometheus, "sum(tenora_tokens_total)"), timeout_s=30)
    eventually(lambda: exemplars(prometheus), timeout_s=30)
    return prometheus


def needed(program: str) -> str:
    found = shutil.which(program)
    assert found, f"no {program} on PATH: install the package prometheus (Debian, Ubuntu)"
    return found


def answer(prometheus: httpx.Client, expr: str) -> list[dict]:
    told = prometheus.get("/api/v1/query", params={"query": expr}).json()
    assert told["status"] == "success", f"{expr}: {told}"
    return told["data"]["result"]


def exemplars(prometheus: httpx.Client) -> list[str]:
    parameters = {
        "query": "tenora_time_to_first_token_seconds_bucket",
        "start": "2000-01-01T00:00:00Z",
        "end": "2100-01-01T00:00:00Z",
    }
    found = prometheus.get("/api/v1/query_exemplars", params=parameters).json()["data"]
    return [exemplar["labels"]["trace_id"] for series in found for exemplar in series["exemplars"]]


def concrete(expr: str) -> str:
    """A dashboard's query with a value for each of its variables."""
    for name, value in VARIABLES.items():
        expr = expr.replace(name, value)
    return re.sub(r"\$(model|class|objective)", ".*", expr)


@pytest.mark.parametrize("command", PROMTOOL_COMMANDS)
def test_promtool_finds_rules_and_their_tests_right(command: str):
    folder = observed.ROOT / "ops" / "prometheus"
    done = subprocess.run([needed("promtool"), *command.split()], cwd=folder, capture_output=True, text=True)

    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_finds_nothing_but_the_names_of_others_in_the_exposition(scraped: httpx.Client, served: Served):
    text = httpx.get(f"{served.ops_url}/metrics").text
    done = subprocess.run([needed("promtool"), "check", "metrics"], input=text, capture_output=True, text=True)

    complaints = [line for line in (done.stdout + done.stderr).splitlines() if line]
    assert [line for line in complaints if not line.startswith("vllm:")] == []


def test_targets_are_up(scraped: httpx.Client):
    targets = scraped.get("/api/v1/targets").json()["data"]["activeTargets"]

    assert [(target["health"], target["lastError"]) for target in targets] == [("up", "")]


def test_rules_are_evaluated_without_an_error(scraped: httpx.Client):
    groups = scraped.get("/api/v1/rules").json()["data"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]

    assert len(rules) == len(observed.rules())
    eventually(lambda: all(rule["health"] == "ok" for rule in _rules(scraped)), timeout_s=30)
    assert [rule["name"] for rule in _rules(scraped) if rule.get("lastError")] == []


def _rules(prometheus: httpx.Client) -> list[dict]:
    groups = prometheus.get("/api/v1/rules").json()["data"]["groups"]
    return [rule for group in groups for rule in group["rules"]]


@pytest.mark.parametrize(("where", "expr"), sorted(set(observed.queries())), ids=lambda text: str(text)[:60])
def test_every_query_is_one(scraped: httpx.Client, where: str, expr: str):
    answer(scraped, concrete(expr))


def test_panels_of_what_the_load_did_are_not_empty(scraped: httpx.Client):
    may_be_empty = re.compile(
        "tenora:slo_burn|tenora_slo_requests|records_unbooked|webhook_deliveries|tenora_grammar|ALERTS"
    )
    filled = {title: exprs for title, exprs in observed.drawn().items() if not may_be_empty.search(" ".join(exprs))}

    def none_is_empty() -> bool:
        empty = [title for title, exprs in filled.items() if not any(answer(scraped, concrete(expr)) for expr in exprs)]
        assert empty == []
        return True

    eventually(none_is_empty, timeout_s=20)


def test_an_exemplar_of_a_latency_histogram_names_the_callers_trace(scraped: httpx.Client):
    eventually(lambda: TRACE in exemplars(scraped), timeout_s=20)
