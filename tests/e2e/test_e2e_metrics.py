"""Every metric that is served moves under load: a name that never moves is a lie on a dashboard."""

import concurrent.futures
from pathlib import Path

import httpx
import psutil
import pytest

from tests.served import Served, eventually, parse_metrics, serving
from tests.tiny import tiny_adapter, write_peft_dir

# What load on a healthy machine can't move, with the test that moves it.
MOVED_ELSEWHERE = {
    "tenora_spans_dropped_total": "tests/unit/gateway: a full span queue",
    "tenora_fallbacks_total": "tests/unit/gateway: a store that is down",
    "tenora_engine_gateways": "below: a killed gateway",
    "tenora_usage_journal_failing": "tests/unit/engine: a full disk",
    "tenora_grammar_cut_total": "tests/unit/engine: a mask that costs too much",
    "tenora_store_away": "tests/unit/gateway: a store that is down",
    "tenora_reports_failed_total": "tests/unit/gateway: a measure that is not sound",
}


@pytest.fixture(scope="module")
def served(tmp_path_factory, model_dir):
    """A pool so small that eight requests preempt each other."""
    options = ("--block-size", "4", "--kv-blocks", "64", "--context", "128", "--adapter-slots", "2", "--demo")
    with serving(tmp_path_factory.mktemp("metrics"), "--model", f"tiny={model_dir}", *options) as running:
        yield running


def load(served: Served, key: str, tmp_path: Path) -> None:
    """Good, cached, refused, adapter and too many requests."""
    path = write_peft_dir(tmp_path, tiny_adapter(1))
    files = {name: (path / name).read_bytes() for name in ("adapter_config.json", "adapter_model.safetensors")}

    def call(i: int) -> int:
        body = {
            "model": ("tiny", "A")[i % 2], "prompt": [5 + i % 3] * 30, "max_tokens": 80, "ignore_eos": True,
            "stream": i % 3 == 0, "service_tier": ("priority", "default", "flex")[i % 3],
        }  # fmt: skip
        with served.http(key) as http:
            return http.post("/completions", json=body).status_code

    with served.http(key) as http, concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert http.post("/adapters", data={"name": "A", "base_model": "tiny"}, files=files).status_code == 201
        assert set(pool.map(call, range(24))) == {200}
        assert http.post("/completions", json={"model": "tiny", "prompt": "x", "max_tokens": -1}).status_code == 400
        shaped = {"model": "tiny", "prompt": "x", "max_tokens": 8, "response_format": {"type": "json_object"}}
        assert http.post("/completions", json=shaped).status_code == 200
    with served.http(served.new_tenant("poor", requests_per_minute=1)) as http:
        body = {"model": "tiny", "prompt": "x", "max_tokens": 1}
        assert {http.post("/completions", json=body).status_code for _ in range(3)} == {200, 429}


def by_family(samples: dict) -> dict[str, dict]:
    families: dict[str, dict] = {}
    for (name, labels), value in samples.items():
        families.setdefault(name, {})[labels] = value
    return families


def test_load_moves_every_served_metric(served: Served, tmp_path: Path):
    before = served.metrics()
    seen: dict[str, set] = {}
    key = served.new_tenant("metrics-tenant")

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        running = pool.submit(load, served, key, tmp_path)
        while not running.done():
            for name, samples in by_family(served.metrics()).items():
                seen.setdefault(name, set()).update(samples.items())
        running.result()
    after = by_family(served.metrics())

    names = {name for name in after if name.startswith(("tenora_", "vllm:")) and not name.endswith("_created")}
    start = by_family(before)
    still = {
        name
        for name in names - MOVED_ELSEWHERE.keys()
        if not (seen.get(name, set()) | set(after[name].items())) - set(start.get(name, {}).items())
    }
    assert not still, f"served, and never moved: {sorted(still)}"
    assert len(names) > 30


EXPECTED = """
tenora_requests_total tenora_request_phase_seconds tenora_time_to_first_token_seconds
tenora_time_per_output_token_seconds tenora_request_seconds tenora_tokens_total tenora_queue_depth
tenora_admission_refusals_total tenora_batch_sequences tenora_batch_tokens tenora_step_seconds tenora_kv_blocks
tenora_kv_fragmentation_ratio tenora_kv_block_reuse_total tenora_prefix_cache_tokens_total tenora_preemptions_total
tenora_adapters_resident tenora_adapter_load_seconds tenora_adapter_slots tenora_gpu_seconds_total
tenora_phase_gpu_seconds_total tenora_gpu_utilization_ratio tenora_kv_blocks_in_use
vllm:num_requests_running vllm:num_requests_waiting vllm:kv_cache_usage_perc vllm:lora_requests_info
""".split()


@pytest.mark.parametrize("name", EXPECTED)
def test_the_names_of_the_interface_are_served(served: Served, name: str):
    samples = {found for found, _ in served.metrics()}

    assert {name, f"{name}_count", f"{name}_total"} & samples


def test_a_killed_gateway_takes_nothing_out_of_the_sum(served: Served):
    """Case 24 on the real product: counters never fall and count nothing twice, over a kill and a restart."""

    def requests_total() -> float:
        return served.metric("tenora_requests_total")

    with served.http() as http:
        for _ in range(5):
            assert http.post("/completions", json={"model": "tiny", "prompt": "x", "max_tokens": 1}).status_code == 200
    before = requests_total()
    (gateway,) = served.gateways()
    gateway.kill()
    during = [requests_total() for _ in range(5)]
    eventually(lambda: served.gateways() and served.gateways()[0].pid != gateway.pid)

    def works() -> bool:
        with served.http() as http:
            return http.post("/completions", json={"model": "tiny", "prompt": "x", "max_tokens": 1}).status_code == 200

    eventually(works)

    assert during == [before] * 5
    eventually(lambda: requests_total() == before + 1)


def test_metrics_need_no_key_and_speak_openmetrics_when_asked(served: Served):
    plain = httpx.get(f"{served.ops_url}/metrics")
    asked = httpx.get(f"{served.ops_url}/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})

    assert plain.headers["content-type"].startswith("text/plain")
    assert parse_metrics(plain.text)
    assert asked.headers["content-type"].startswith("application/openmetrics-text")
    assert asked.text.endswith("# EOF\n")


def test_no_adapter_key_or_client_word_is_a_label_and_a_tenant_only_by_its_id(served: Served):
    pairs = {pair for _, labels in served.metrics() for pair in labels}

    assert not {value for _, value in pairs if value in ("acme", "A", "metrics-tenant") or value.startswith("tn_")}
    assert {name for name, value in pairs if value.startswith("ten_")} <= {"tenant"}


def test_a_gateway_process_stays_under_120_mb(served: Served):
    (gateway,) = served.gateways()

    assert psutil.Process(gateway.pid).memory_info().rss < 120 << 20
