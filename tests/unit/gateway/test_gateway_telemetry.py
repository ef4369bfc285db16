"""One trace a request over the real wire, and what happens to spans that nobody takes."""

import threading

import pytest
from gateway_harness import House, eventually
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from gateway.telemetry import Metrics
from gateway.tracing import MAX_QUEUED_SPANS, SpanSink
from tests.otlp import collecting

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
def collector():
    with collecting() as server:
        yield server


@pytest.fixture
def traced(house: House, collector):
    telemetry = house.parts.pipeline.telemetry
    exporter = OTLPSpanExporter(endpoint=f"http://127.0.0.1:{collector.server_port}/v1/traces")
    telemetry.spans = SpanSink(exporter, telemetry.metrics.dropped_spans.inc)
    yield collector
    telemetry.spans.close()
    telemetry.spans = None


def attributes(span) -> dict:
    return {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in span.attributes}


def test_a_request_is_one_trace_with_five_children_and_no_words_of_the_caller(house: House, key: str, traced):
    with house.http(key) as http:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "a secret"}], "max_tokens": 5, "stream": True}
        answer = http.post("/chat/completions", json=body, headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
    house.parts.pipeline.telemetry.spans._wake.set()
    spans = eventually(lambda: len(traced.spans) == 6 and traced.spans)

    (server,) = [span for span in spans if span.kind == 2]
    children = [span for span in spans if span is not server]
    assert {span.trace_id.hex() for span in spans} == {TRACE}
    assert server.parent_span_id.hex() == PARENT
    assert server.name == "chat tiny"
    assert [span.name for span in children] == ["admit", "queue", "prefill", "decode", "settle"]
    assert {span.parent_span_id for span in children} == {server.span_id}
    for child in children:
        assert server.start_time_unix_nano <= child.start_time_unix_nano <= child.end_time_unix_nano
        assert child.end_time_unix_nano <= server.end_time_unix_nano
    found = attributes(server)
    assert found["gen_ai.usage.output_tokens"] == 5
    assert found["tenant.id"] == house.tenants[key]
    assert found["tenora.price.picousd"] > 0
    assert found["gen_ai.latency.time_to_first_token"] > 0
    assert "secret" not in str(spans)
    assert key not in str(spans)
    receipt = house.receipt(key, answer.headers["x-request-id"])
    assert receipt["trace_id"] == TRACE
    assert receipt["price"]["picousd"] == found["tenora.price.picousd"]


def test_a_trace_that_is_not_sampled_is_left_out(house: House, key: str, traced):
    with house.http(key) as http:
        for flags in ("00", "01"):
            body = {"model": "tiny", "prompt": [5], "max_tokens": 1}
            http.post("/completions", json=body, headers={"traceparent": f"00-a{flags[1]}{TRACE[2:]}-{PARENT}-{flags}"})
    house.parts.pipeline.telemetry.spans._wake.set()
    spans = eventually(lambda: traced.spans)

    assert {span.trace_id.hex() for span in spans} == {"a1" + TRACE[2:]}


def test_spans_that_find_the_queue_full_are_counted_and_dropped():
    blocked, entered = threading.Event(), threading.Event()

    class Slow(SpanExporter):
        def export(self, spans) -> SpanExportResult:
            entered.set()
            blocked.wait()
            return SpanExportResult.SUCCESS

    metrics = Metrics()
    sink = SpanSink(Slow(), metrics.dropped_spans.inc)
    sink.put(lambda: [])
    sink._wake.set()
    assert entered.wait(10)
    for _ in range(MAX_QUEUED_SPANS + 3):
        sink.put(lambda: [])
    dropped = metrics.registry.get_sample_value("tenora_spans_dropped_total")
    blocked.set()
    sink.close()

    assert dropped == 3 * 6


def test_an_exporter_that_fails_disturbs_nobody(caplog):
    class Broken(SpanExporter):
        def export(self, spans) -> SpanExportResult:
            raise OSError("no route")

    sink = SpanSink(Broken(), lambda count: None)
    sink.put(lambda: [])
    sink.close()

    assert "spans were not exported: OSError" in caplog.text
