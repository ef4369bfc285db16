"""One trace a request, made at its end from the integers that were kept anyway: a SERVER span and five children.

Names follow the OpenTelemetry GenAI conventions as of v0.1.0 (all "Development"): constants of our own.
"""

import logging
import secrets
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from gateway.call import Call
from gateway.dispatch import Flight
from gateway.phases import Phases
from gateway.work import Work

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter


OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
RESPONSE_MODEL = "gen_ai.response.model"
RESPONSE_ID = "gen_ai.response.id"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
ERROR_TYPE = "error.type"
_OPERATIONS = {"chat": "chat", "completions": "text_completion"}

BATCH_SPANS = 512
MAX_QUEUED_SPANS = 16_384
EXPORT_EVERY_S = 1.0
_log = logging.getLogger("gateway.tracing")

Spans = Callable[[], "list[ReadableSpan]"]


class SpanSink:
    """A bounded queue in front of an exporter that may be slow; what finds it full is counted and dropped.

    Spans are built in the exporter's thread, off the event loop.
    """

    def __init__(self, exporter: "SpanExporter", dropped: Callable[[int], None]) -> None:
        self._exporter = exporter
        self._dropped = dropped
        self._queue: deque[Spans] = deque()
        self._wake = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="span export", daemon=True)
        self._thread.start()

    def put(self, spans: Spans) -> None:
        """One request's spans, as the function that makes them."""
        if len(self._queue) >= MAX_QUEUED_SPANS:
            self._dropped(len(_CHILDREN) + 1)
            return
        self._queue.append(spans)
        if len(self._queue) >= BATCH_SPANS:
            self._wake.set()

    def close(self, timeout_s: float = 5.0) -> None:
        """Exports what is queued, as far as the time goes."""
        self._closing = True
        self._wake.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while not (self._closing and not self._queue):
            self._wake.wait(EXPORT_EVERY_S)
            self._wake.clear()
            while self._queue:
                self._export([self._queue.popleft() for _ in range(min(BATCH_SPANS, len(self._queue)))])
        self._exporter.shutdown()

    def _export(self, batch: Sequence[Spans]) -> None:
        try:
            self._exporter.export([span for spans in batch for span in spans()])
        except Exception as error:
            _log.warning("spans were not exported: %s", type(error).__name__)


_CHILDREN = ("admit", "queue", "prefill", "decode", "settle")


def request_spans(call: Call, work: Work, flight: Flight, phases: Phases, price_picousd: int) -> Spans:
    """The spans of an ended request, as a function of no argument: numbers are copied now, objects made later."""
    attributes = _attributes(call, work, flight, phases, price_picousd)
    usage = flight.usage
    arrived_ns = flight.submitted_ns + phases.network // 2  # how the network's time splits is not known
    scheduled_ns = arrived_ns + usage.queue_ns
    first_ns = scheduled_ns + usage.prefill_ns
    edges_ns = {
        "admit": (call.started_ns, flight.submitted_ns),
        "queue": (arrived_ns, scheduled_ns),
        "prefill": (scheduled_ns, first_ns),
        "decode": (first_ns, first_ns + usage.decode_ns),
        "settle": (flight.finished_ns or flight.ended_ns, flight.ended_ns),
    }
    times = {name: (call.unix_ns(start), call.unix_ns(end)) for name, (start, end) in edges_ns.items()}
    name = f"{_OPERATIONS[work.operation]} {work.target.model.name}"
    whole = (call.started_unix_ns, call.unix_ns(flight.ended_ns))
    failed = flight.outcome not in (200, 499)
    return lambda: _build(call.trace_id, call.parent_span, name, whole, times, attributes, failed)


def _attributes(call: Call, work: Work, flight: Flight, phases: Phases, price_picousd: int) -> dict[str, Any]:
    usage, sampling = flight.usage, work.sampling
    attributes: dict[str, Any] = {
        OPERATION: _OPERATIONS[work.operation],
        PROVIDER: "tenora",
        REQUEST_MODEL: work.target.name,
        RESPONSE_MODEL: work.target.model.name,
        RESPONSE_ID: call.request_id,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.choice.count": work.total_choices,
        "gen_ai.request.stream": work.style.stream,
        INPUT_TOKENS: usage.prompt_tokens,
        OUTPUT_TOKENS: usage.output_tokens,
        CACHED_TOKENS: usage.cached_tokens,
        "gen_ai.latency.time_in_queue": phases.queue / 1e9,
        "gen_ai.latency.time_in_model_prefill": phases.prefill / 1e9,
        "gen_ai.latency.time_in_model_decode": phases.decode / 1e9,
        "gen_ai.latency.time_in_model_inference": (phases.prefill + phases.decode) / 1e9,
        "gen_ai.latency.e2e": phases.total / 1e9,
        "tenant.id": work.principal.tenant_id,
        "tenora.class": work.flow_class,
        "tenora.adapter.sha256": work.target.adapter_sha256,
        "tenora.cost.gpu_ns": usage.gpu_ns,
        "tenora.price.picousd": price_picousd,
        "http.response.status_code": flight.outcome,
    }
    if flight.first_token_ns:
        attributes["gen_ai.latency.time_to_first_token"] = flight.first_token_ns / 1e9
    if flight.outcome not in (200, 499):
        attributes[ERROR_TYPE] = str(flight.outcome or "engine_lost")
    return attributes


def _build(
    trace_id: str,
    parent_span: str,
    name: str,
    whole: tuple[int, int],
    times: dict[str, tuple[int, int]],
    attributes: dict[str, Any],
    failed: bool,
) -> "list[ReadableSpan]":
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

    def context(span_id: int, remote: bool = False) -> SpanContext:
        return SpanContext(int(trace_id, 16), span_id, remote, TraceFlags(TraceFlags.SAMPLED))

    resource = Resource({"service.name": "tenora-gateway"})
    server = context(secrets.randbits(63) | 1)
    parent = context(int(parent_span, 16), remote=True) if parent_span else None
    spans = [
        ReadableSpan(
            name,
            server,
            parent,
            resource,
            attributes,
            kind=SpanKind.SERVER,
            start_time=whole[0],
            end_time=whole[1],
            status=Status(StatusCode.ERROR if failed else StatusCode.UNSET),
        )
    ]
    for child, (start, end) in times.items():
        own = context(secrets.randbits(63) | 1)
        spans.append(ReadableSpan(child, own, server, resource, start_time=start, end_time=end))
    return spans


def otlp_sink(dropped: Callable[[int], None]) -> SpanSink:
    """Exports over OTLP/HTTP to where the standard OTEL_* variables say. Needs the `otlp` extra."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return SpanSink(OTLPSpanExporter(), dropped)
