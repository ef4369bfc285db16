"""Traces over the wire: two hundred mixed requests through a served installation into a collector, held against the
receipts and the ledger."""

import concurrent.futures
import itertools
import json
import socket
import sqlite3
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.otlp import Collector
from tests.served import Served, eventually
from tests.tiny import tiny_adapter, write_peft_dir

CHILDREN = ["admit", "queue", "prefill", "decode", "settle"]
SECRET = "unspeakable"  # in every prompt
PARENT = "00f067aa0ba902b7"
NUM_REQUESTS = 200
WEATHER = {"type": "function", "function": {"name": "get_weather"}}


@dataclass
class Asked:
    """One request as its caller knows it. ``trace_id`` '': the traceparent sent was none."""

    kind: str
    status: int = 0
    request_id: str = ""
    trace_id: str = ""
    body: bytes = b""


@dataclass
class Scene:
    served: Served
    collector: Collector
    began_ns: int
    asked: list[Asked]
    unsampled: list[str]

    @property
    def spans(self) -> list:
        """Those of the scene's own requests: others were there before."""
        return [span for span in list(self.collector.spans) if span.start_time_unix_nano >= self.began_ns]


KINDS = {
    "chat": ("/chat/completions", {"messages": [{"role": "user", "content": SECRET}]}),
    "chat stream": ("/chat/completions", {"messages": [{"role": "user", "content": SECRET}], "stream": True}),
    "two choices": ("/completions", {"prompt": SECRET, "n": 2, "temperature": 1.0}),
    "adapter": ("/completions", {"model": "A", "prompt": SECRET, "stream": True}),
    "tools": (
        "/chat/completions",
        {"messages": [{"role": "user", "content": SECRET}], "tools": [WEATHER], "tool_choice": "required"},
    ),
    "long": ("/completions", {"prompt": SECRET, "max_tokens": 60, "service_tier": "flex", "stream": True}),
    "bad value": ("/completions", {"prompt": SECRET, "max_tokens": -1}),
    "no model": ("/completions", {"prompt": SECRET, "model": SECRET}),
    "leaves": ("/completions", {"prompt": SECRET, "max_tokens": 200, "stream": True}),
    "limited": ("/completions", {"prompt": SECRET}),
}
SERVED_KINDS = {"chat", "chat stream", "two choices", "adapter", "tools", "long", "leaves"}


def ask(served: Served, key: str, kind: str, number: int) -> Asked:
    """The caller's side of a request; some send a traceparent that is none."""
    path, more = KINDS[kind]
    body = {"model": "tiny", "max_tokens": 6, "temperature": 0, "ignore_eos": kind != "tools"} | more
    is_traced = number % 7 != 3
    trace_id = f"{number + 1:032x}" if is_traced else ""
    headers = {"traceparent": f"00-{trace_id}-{PARENT}-01" if is_traced else f"ff-{number + 1:032x}-{PARENT}-01"}
    if kind == "leaves":
        return leave(served, key, path, body, headers, trace_id)
    with served.http(key) as http:
        answer = http.post(path, json=body, headers=headers)
    return Asked(kind, answer.status_code, answer.headers["x-request-id"], trace_id, answer.content)


def leave(served: Served, key: str, path: str, body: dict, headers: dict, trace_id: str) -> Asked:
    """Hangs up after a few events, by the socket."""
    with socket.create_connection(("127.0.0.1", served.port), timeout=60) as connection:
        text = json.dumps(body)
        lines = [f"POST /v1{path} HTTP/1.1", "host: x", f"authorization: Bearer {key}", f"content-length: {len(text)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        connection.sendall(("\r\n".join(lines) + "\r\n\r\n" + text).encode())
        seen = b""
        while seen.count(b"data: ") < 3:
            piece = connection.recv(65536)
            assert piece, f"cut off after {seen}"
            seen += piece
    head = dict(line.split(": ", 1) for line in seen.decode().split("\r\n\r\n")[0].split("\r\n")[1:])
    return Asked("leaves", 499, head["x-request-id"], trace_id)


@pytest.fixture(scope="module")
def scene(observed, tmp_path_factory) -> Scene:
    served, began_ns = observed.served, time.time_ns()
    asked = _traffic(served, tmp_path_factory.mktemp("traces"))
    scene = Scene(served, observed.collector, began_ns, asked, _unsampled(served))
    eventually(lambda: len(servers(scene)) >= NUM_REQUESTS)
    return scene


def _traffic(served: Served, folder: Path) -> list[Asked]:
    path = write_peft_dir(folder / "adapter", tiny_adapter(1))
    files = {name: (path / name).read_bytes() for name in ("adapter_config.json", "adapter_model.safetensors")}
    keys = {"limited": served.new_tenant("poor", requests_per_minute=1)}
    key = served.new_tenant("traced")
    with served.http(key) as http:
        assert http.post("/adapters", data={"name": "A", "base_model": "tiny"}, files=files).status_code == 201
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        kinds = itertools.islice(itertools.cycle(KINDS), NUM_REQUESTS)
        calls = [pool.submit(ask, served, keys.get(kind, key), kind, n) for n, kind in enumerate(kinds)]
        return [call.result() for call in calls]


def _unsampled(served: Served) -> list[str]:
    """Requests whose caller records nothing."""
    with served.http() as http:
        for number in (0xA0001, 0xA0002):
            headers = {"traceparent": f"00-{number:032x}-{PARENT}-00"}
            body = {"model": "tiny", "prompt": "x", "max_tokens": 1}
            assert http.post("/completions", json=body, headers=headers).status_code == 200
    return [f"{number:032x}" for number in (0xA0001, 0xA0002)]


def servers(scene: Scene) -> list:
    return [span for span in scene.spans if span.kind == 2]


def attributes(span) -> dict:
    return {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in span.attributes}


def by_request(scene: Scene) -> dict[str, tuple]:
    """Request id → its SERVER span, its attributes and its children, in the order of their starts."""
    children = defaultdict(list)
    for span in scene.spans:
        if span.kind != 2:
            children[span.trace_id, span.parent_span_id].append(span)
    found = {}
    for server in servers(scene):
        told = attributes(server)
        assert told["gen_ai.response.id"] not in found, "a request with two SERVER spans"
        found[told["gen_ai.response.id"]] = server, told, children[server.trace_id, server.span_id]
    return found


def ledger(scene: Scene) -> dict[str, sqlite3.Row]:
    with sqlite3.connect(f"file:{scene.served.home / 'tenora.db'}?mode=ro", uri=True) as db:
        db.row_factory = sqlite3.Row
        return {row["request_id"]: row for row in db.execute("SELECT * FROM request_record")}


def served_requests(scene: Scene) -> list[Asked]:
    return [asked for asked in scene.asked if asked.kind in SERVED_KINDS]


def test_the_traffic_was_what_it_should_be(scene: Scene):
    outcomes = {kind: Counter(a.status for a in scene.asked if a.kind == kind) for kind in KINDS}

    assert len(scene.asked) == len({asked.request_id for asked in scene.asked}) == NUM_REQUESTS
    assert [kind for kind in SERVED_KINDS - {"leaves"} if outcomes[kind] != {200: 20}] == []
    assert outcomes["bad value"] == {400: 20}
    assert outcomes["no model"] == {404: 20}
    assert outcomes["limited"][429] >= 10  # a minute lets one more through


def test_every_request_is_one_server_span_with_its_children(scene: Scene):
    found = by_request(scene)

    for asked in scene.asked:
        server, told, children = found[asked.request_id]
        was_served = told["http.response.status_code"] in (200, 499)
        assert [child.name for child in children] == (CHILDREN if was_served else ["admit"]), asked.kind
        assert told["http.response.status_code"] == asked.status
        assert told.get("error.type") == {400: "400", 404: "model_not_found", 429: "rate_limit_exceeded"}.get(
            asked.status
        )
        assert server.status.code == 0  # what callers do wrong fails no server
        for child in children:
            assert server.start_time_unix_nano <= child.start_time_unix_nano <= child.end_time_unix_nano
            assert child.end_time_unix_nano <= server.end_time_unix_nano


def test_phases_usage_cost_and_price_are_those_of_the_receipt_and_the_ledger(scene: Scene):
    found = by_request(scene)
    rows = eventually(lambda: (r := ledger(scene)) and all(a.request_id in r for a in served_requests(scene)) and r)

    for asked in served_requests(scene):
        (_, told, children), row = found[asked.request_id], rows[asked.request_id]
        lasted = {child.name: child.end_time_unix_nano - child.start_time_unix_nano for child in children}
        phases = {"queue": "queue_ns", "prefill": "prefill_ns", "decode": "decode_ns", "settle": "post_ns"}
        assert {name: lasted[name] for name in phases} == {name: row[column] for name, column in phases.items()}
        assert told["tenora.cost.gpu_ns"] == row["gpu_ns"] > 0
        assert told["tenora.price.picousd"] == row["price_picousd"] > 0
        assert told["gen_ai.usage.input_tokens"] == row["prompt_tokens"]
        assert told["gen_ai.usage.output_tokens"] == row["output_tokens"]
        assert told["gen_ai.usage.cache_read.input_tokens"] == row["cached_tokens"]
        total_ns = sum(row[f"{name}_ns"] for name in ("queue", "prefill", "decode", "network", "post"))
        assert told["gen_ai.latency.e2e"] == pytest.approx(total_ns / 1e9)
        assert told["gen_ai.latency.time_in_queue"] == pytest.approx(row["queue_ns"] / 1e9)
        assert told["gen_ai.latency.time_in_model_inference"] == pytest.approx(
            (row["prefill_ns"] + row["decode_ns"]) / 1e9
        )
        first_ns = row["first_token_ns"]
        assert told.get("gen_ai.latency.time_to_first_token") == (pytest.approx(first_ns / 1e9) if first_ns else None)


def test_the_receipt_and_the_span_name_the_same_trace(scene: Scene):
    found, rows = by_request(scene), ledger(scene)

    for asked in served_requests(scene):
        assert rows[asked.request_id]["trace_id"] == found[asked.request_id][0].trace_id.hex()


def test_a_valid_traceparent_is_honoured_and_any_other_begins_a_trace(scene: Scene):
    found = by_request(scene)

    for asked in scene.asked:
        server = found[asked.request_id][0]
        if asked.trace_id:
            assert (server.trace_id.hex(), server.parent_span_id.hex()) == (asked.trace_id, PARENT)
        else:
            assert server.parent_span_id == b""
            assert int.from_bytes(server.trace_id, "big") > NUM_REQUESTS


def test_a_trace_that_its_caller_does_not_record_is_left_out(scene: Scene):
    seen = {span.trace_id.hex() for span in scene.spans}

    assert not seen & set(scene.unsampled)


def test_attributes_say_whose_what_and_how(scene: Scene):
    found = by_request(scene)

    def told(kind: str) -> dict:
        return next(found[a.request_id][1] for a in scene.asked if a.kind == kind)

    assert {told(kind)["gen_ai.operation.name"] for kind in ("chat", "tools")} == {"chat"}
    assert told("long")["gen_ai.operation.name"] == "text_completion"
    assert told("long")["tenora.class"] == "batch"
    assert told("two choices")["gen_ai.request.choice.count"] == 2
    assert told("chat")["gen_ai.request.stream"] is False
    assert told("adapter")["gen_ai.request.stream"] is True
    assert told("adapter")["gen_ai.request.model"] == "A"
    assert told("adapter")["gen_ai.response.model"] == "tiny"
    assert len(told("adapter")["tenora.adapter.sha256"]) == 64
    assert told("chat")["tenora.adapter.sha256"] == ""
    assert told("limited")["tenant.id"] != told("chat")["tenant.id"]
    names = {found[a.request_id][0].name for a in scene.asked if a.kind in ("chat", "long")}
    assert names == {"chat tiny", "text_completion tiny"}


def test_more_tokens_are_no_more_spans(scene: Scene):
    found = by_request(scene)
    tokens = {len(found[a.request_id][2]): [] for a in served_requests(scene)}
    for asked in served_requests(scene):
        _, told, children = found[asked.request_id]
        tokens[len(children)].append(told["gen_ai.usage.output_tokens"])

    assert list(tokens) == [5]
    assert min(tokens[5]) <= 6 < 60 == max(n for n in tokens[5] if n <= 60)
    assert all(not span.events for span in scene.spans)


def test_no_prompt_answer_or_key_is_in_a_span(scene: Scene):
    everything = b"".join(span.SerializeToString() for span in scene.spans)
    answers = [json.loads(asked.body) for asked in scene.asked if asked.kind == "chat"]
    texts = {answer["choices"][0]["message"]["content"] for answer in answers}

    assert SECRET.encode() not in everything
    assert b"tn_live_" not in everything
    assert not {text for text in texts if text.encode() in everything}


def test_the_collector_hears_who_sends_and_nothing_is_dropped(scene: Scene):
    told = [attributes(resource) for resource in scene.collector.resources]

    assert {resource["service.name"] for resource in told} == {"tenora-gateway"}
    assert {resource["deployment.environment.name"] for resource in told} == {"test"}
    assert scene.served.metric("tenora_spans_dropped_total") == 0
