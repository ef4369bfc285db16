"""One trace a request, made at its end from the integers that were kept anyway: a SERVER span and what it went through.

Names follow the OpenTelemetry GenAI conventions as of v0.1.0 (all "Development"): constants of our own.
"""

import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gateway.call import Call
from gateway.errors import ApiError
from gateway.flight import CALLER_LEFT, Flight
from gateway.work import Work

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan

OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
RESPONSE_MODEL = "gen_ai.response.model"
RESPONSE_ID = "gen_ai.response.id"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
ERROR_TYPE = "error.type"
STATUS = "http.response.status_code"
TENANT, CLASS, ADAPTER = "tenant.id", "tenora.class", "tenora.adapter.sha256"
GPU_NS, PRICE = "tenora.cost.gpu_ns", "tenora.price.picousd"
_OPERATIONS = {"chat": "chat", "completions": "text_completion"}

Span = tuple[str, int, int]  # name, start and end in unix ns


@dataclass(frozen=True, slots=True)
class Trace:
    """A request's spans as plain values: taken on the event loop, made into the SDK's objects by the exporter's
    thread. ``parent_span`` '': it begins here."""

    trace_id: str
    parent_span: str
    server: Span
    children: tuple[Span, ...]
    failed: bool
    attributes: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return 1 + len(self.children)

    def spans(self, resource: "Resource") -> "list[ReadableSpan]":
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

        def context(span_id: int, remote: bool = False) -> SpanContext:
            return SpanContext(int(self.trace_id, 16), span_id, remote, TraceFlags(TraceFlags.SAMPLED))

        def span(of: Span, parent: SpanContext | None, **more: Any) -> ReadableSpan:
            name, start, end = of
            own = context(secrets.randbits(63) | 1)
            return ReadableSpan(name, own, parent, resource, start_time=start, end_time=end, **more)

        parent = context(int(self.parent_span, 16), remote=True) if self.parent_span else None
        status = Status(StatusCode.ERROR if self.failed else StatusCode.UNSET)
        server = span(self.server, parent, attributes=self.attributes, kind=SpanKind.SERVER, status=status)
        return [server, *(span(child, server.context) for child in self.children)]


def request_trace(call: Call, work: Work, flight: Flight, error: ApiError | None, price_picousd: int) -> Trace:
    """Of a request that an engine had. Its phases are those of the receipt: ``queue`` begins where the body was read,
    so that the end of ``admit`` is in it."""
    usage, phases = flight.usage, flight.phases()
    finished_ns = flight.finished_ns or flight.ended_ns
    scheduled_ns = (
        flight.submitted_ns + phases.network // 2 + usage.queue_ns
    )  # how the network's time splits is unknown
    first_ns = scheduled_ns + usage.prefill_ns
    edges_ns = {
        "admit": (call.started_ns, flight.submitted_ns),
        "queue": (scheduled_ns - phases.queue, scheduled_ns),
        "prefill": (scheduled_ns, first_ns),
        "decode": (first_ns, first_ns + usage.decode_ns),
        "settle": (finished_ns, flight.ended_ns),
    }
    attributes = _asked(call, work, flight.outcome, error)
    if flight.is_measured:
        attributes |= _used(work, flight, price_picousd)
    return Trace(
        call.trace_id,
        call.parent_span,
        (f"{attributes[OPERATION]} {work.target.model.name}", call.started_unix_ns, call.unix_ns(flight.ended_ns)),
        tuple((name, call.unix_ns(start), call.unix_ns(end)) for name, (start, end) in edges_ns.items()),
        _is_ours(flight.outcome),
        attributes,
    )


def refused_trace(call: Call, work: Work | None, status: int, error: ApiError | None, ended_ns: int) -> Trace:
    """Of a request that no engine had: refused, replayed, or left by its caller."""
    whole = call.started_unix_ns, call.unix_ns(ended_ns)
    attributes = _asked(call, work, status, error)
    name = f"{attributes[OPERATION]} {work.target.model.name}" if work else attributes[OPERATION]
    children = (("admit", *whole),)
    return Trace(call.trace_id, call.parent_span, (name, *whole), children, _is_ours(status), attributes)


def _is_ours(status: int) -> bool:
    """A server's span is failed by what the server did, not by what its caller asked for."""
    return status == 0 or status >= 500


def _asked(call: Call, work: Work | None, status: int, error: ApiError | None) -> dict[str, Any]:
    attributes: dict[str, Any] = {PROVIDER: "tenora", RESPONSE_ID: call.request_id, STATUS: status}
    if error is not None or status not in (200, CALLER_LEFT):
        attributes[ERROR_TYPE] = (error and error.code) or str(status or "engine_lost")
    if call.is_replay:
        attributes["tenora.replayed"] = True
    if work is None:
        chat = call.scope["path"].endswith("/chat/completions")
        return attributes | {OPERATION: _OPERATIONS["chat" if chat else "completions"]}
    sampling = work.sampling
    return attributes | {
        OPERATION: _OPERATIONS[work.operation],
        REQUEST_MODEL: work.target.name,
        RESPONSE_MODEL: work.target.model.name,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.choice.count": work.total_choices,
        "gen_ai.request.stream": work.style.stream,
        TENANT: work.principal.tenant_id,
        CLASS: work.flow_class,
        ADAPTER: work.target.adapter_sha256,
    }


def _used(work: Work, flight: Flight, price_picousd: int) -> dict[str, Any]:
    usage, phases = flight.usage, flight.phases()
    attributes: dict[str, Any] = {
        INPUT_TOKENS: usage.prompt_tokens,
        OUTPUT_TOKENS: usage.output_tokens,
        CACHED_TOKENS: usage.cached_tokens,
        "gen_ai.latency.time_in_queue": phases.queue / 1e9,
        "gen_ai.latency.time_in_model_prefill": phases.prefill / 1e9,
        "gen_ai.latency.time_in_model_decode": phases.decode / 1e9,
        "gen_ai.latency.time_in_model_inference": (phases.prefill + phases.decode) / 1e9,
        "gen_ai.latency.e2e": phases.total / 1e9,
        GPU_NS: usage.gpu_ns,
        PRICE: price_picousd,
    }
    if flight.first_token_ns:
        attributes["gen_ai.latency.time_to_first_token"] = flight.first_token_ns / 1e9
        attributes[FIRST_CHUNK] = flight.first_token_ns / 1e9
    return attributes
