"""One trace a request over the real wire, and what happens to spans that nobody takes."""

import threading

import pytest
from gateway_harness import House, eventually
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from gateway.call import Call
from gateway.telemetry import Metrics
from gateway.tracing.context import parent_of
from gateway.tracing.request_trace import Trace
from gateway.tracing.sink import SpanOptions, SpanSink, otlp_sink
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
        body["ignore_eos"] = True
        answer = http.post("/chat/completions", json=body, headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
    house.parts.pipeline.telemetry.spans.flush()
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
    house.parts.pipeline.telemetry.spans.flush()
    spans = eventually(lambda: traced.spans)

    assert {span.trace_id.hex() for span in spans} == {"a1" + TRACE[2:]}


def test_a_slow_collector_loses_only_spans_that_are_counted(house: House, key: str, collector):
    telemetry = house.parts.pipeline.telemetry
    exporter = OTLPSpanExporter(endpoint=f"{collector.url}/v1/traces")
    dropped: list[int] = []
    collector.open.clear()
    labels = {"model": "tiny", "class": "standard", "outcome": "200"}
    told = house.metric("tenora_requests_total", **labels)
    telemetry.spans = sink = SpanSink(exporter, dropped.append, SpanOptions(max_queued_spans=30, export_every_s=0.01))
    try:
        with house.http(key) as http:
            for _ in range(20):
                assert http.post("/completions", json={"model": "tiny", "prompt": [5], "max_tokens": 1}).is_success
        eventually(lambda: house.metric("tenora_requests_total", **labels) == told + 20)
        assert len(dropped) >= 10
        collector.open.set()
    finally:
        sink.close()
        telemetry.spans = None

    assert len(collector.spans) + sum(dropped) == 20 * 6


def a_trace(children: int = 5) -> Trace:
    return Trace(TRACE, "", ("chat tiny", 1, 9), (("admit", 1, 2),) * children, failed=False)


class Exporter(SpanExporter):
    """Takes its time, and then fails or not."""

    def __init__(self, result: SpanExportResult = SpanExportResult.SUCCESS) -> None:
        self.result, self.taken = result, 0
        self.entered, self.go = threading.Event(), threading.Event()

    def export(self, spans) -> SpanExportResult:
        self.entered.set()
        self.go.wait(10)
        if self.result is SpanExportResult.SUCCESS:
            self.taken += len(spans)
        return self.result


def test_spans_that_find_the_queue_full_are_counted_and_dropped():
    exporter, metrics = Exporter(), Metrics()
    sink = SpanSink(exporter, metrics.dropped_spans.inc, SpanOptions(max_queued_spans=60))
    sink.put(a_trace())
    sink.flush()
    assert exporter.entered.wait(10)

    for children in (5,) * 13 + (1,) * 2:
        sink.put(a_trace(children))
    exporter.go.set()
    sink.close()

    dropped = metrics.registry.get_sample_value("tenora_spans_dropped_total")
    assert dropped == 3 * 6 + 2 * 2
    assert exporter.taken == 6 + 60


def test_spans_that_a_collector_refuses_are_counted(caplog):
    exporter, dropped = Exporter(SpanExportResult.FAILURE), []
    exporter.go.set()
    sink = SpanSink(exporter, dropped.append)
    sink.put(a_trace())
    sink.close()

    assert dropped == [6]
    assert "spans were not exported: refused or timed out" in caplog.text


def test_an_exporter_that_fails_disturbs_nobody_and_its_spans_are_counted(caplog):
    class Broken(SpanExporter):
        def export(self, spans) -> SpanExportResult:
            raise OSError("no route")

    dropped: list[int] = []
    sink = SpanSink(Broken(), dropped.append)
    sink.put(a_trace(1))
    sink.close()

    assert dropped == [2]
    assert "spans were not exported: OSError" in caplog.text


def test_what_is_queued_when_the_time_to_close_is_over_is_counted():
    exporter, dropped = Exporter(), []
    sink = SpanSink(exporter, dropped.append, SpanOptions(max_batch_spans=6))
    for _ in range(3):
        sink.put(a_trace())
    assert exporter.entered.wait(10)

    sink.close(timeout_s=0)
    exporter.go.set()

    assert dropped == [12]


def call_with(**headers: str) -> Call:
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    return Call.of({"type": "http", "path": "/v1/completions", "headers": raw}, None, None)


@pytest.mark.parametrize(
    ("sampler", "argument", "parent", "wanted"),
    [
        ("", "", "", True),
        ("", "", "00", False),
        ("always_off", "", "01", False),
        ("always_on", "", "00", True),
        ("parentbased_always_off", "", "", False),
        ("parentbased_always_off", "", "01", True),
        ("traceidratio", "1.0", "00", True),
        ("traceidratio", "0", "01", False),
        ("parentbased_traceidratio", "0", "", False),
        ("parentbased_traceidratio", "0", "01", True),
    ],
)
def test_the_standard_variables_say_which_traces_are_taken(sampler: str, argument: str, parent: str, wanted: bool):
    options = SpanOptions.of({"OTEL_TRACES_SAMPLER": sampler, "OTEL_TRACES_SAMPLER_ARG": argument})
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-{parent}"} if parent else {}

    assert options.wants(call_with(**headers)) is wanted


def test_a_ratio_takes_its_share_and_of_one_trace_all_or_nothing():
    options = SpanOptions.of({"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.25"})
    calls = [call_with() for _ in range(2000)]

    taken = [call for call in calls if options.wants(call)]

    assert 400 < len(taken) < 600
    assert all(options.wants(call) for call in taken)


@pytest.mark.parametrize("name", ["OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG", "OTEL_BSP_MAX_QUEUE_SIZE"])
def test_a_variable_that_we_cannot_follow_is_named(name: str):
    with pytest.raises(ValueError, match=name):
        SpanOptions.of({name: "jaeger"})


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_TRACES_EXPORTER": "none"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_SDK_DISABLED": "true"},
    ],
)
def test_nothing_is_exported_where_nobody_asks_for_it(environment: dict):
    assert otlp_sink(environment, lambda count: None) is None


@pytest.mark.parametrize(
    "sent",
    [
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-01-more",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{PARENT}-01",
        f"00-{TRACE[1:]}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-1",
        f"00-{TRACE}-{PARENT}",
        "",
    ],
)
def test_a_traceparent_that_is_none_begins_a_trace_of_our_own(sent: str):
    call = call_with(traceparent=sent)

    assert call.trace_id != TRACE
    assert len(call.trace_id) == 32
    assert call.parent_span == ""
    assert call.sampled


def test_two_traceparents_are_none():
    assert parent_of([f"00-{TRACE}-{PARENT}-01"] * 2) is None


@pytest.mark.parametrize("sent", [f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-ff", f"01-{TRACE}-{PARENT}-03-x"])
def test_a_traceparent_of_this_or_a_later_version_is_honoured(sent: str):
    call = call_with(traceparent=sent)

    assert (call.trace_id, call.parent_span, call.sampled) == (TRACE, PARENT, True)
