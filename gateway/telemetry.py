"""What is seen of a request from outside: metrics, one trace, one log line. Never a prompt, an answer or a key."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Histogram

from engine.wire import OUTCOME_LOST
from gateway.call import Call
from gateway.dispatch import CALLER_LEFT, Flight
from gateway.errors import ApiError
from gateway.tracing import SpanSink, request_spans
from gateway.work import Work

_log = logging.getLogger("gateway.request")
_NS = 1e-9
_PHASES = (0.0001, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
_EACH_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
_TOTAL = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)


class Metrics:
    """One registry a process, with the gateway's names of interface.md §5; labels are bounded."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "tenora_requests", "Requests by how they ended.", ["model", "class", "outcome"], registry=registry
        )
        self.refusals = Counter(
            "tenora_admission_refusals", "Requests refused before an engine.", ["reason"], registry=registry
        )
        self.tokens = Counter("tenora_tokens", "Tokens of requests that ended.", ["kind"], registry=registry)
        self.phases = Histogram(
            "tenora_request_phase_seconds", "Where time went.", ["phase"], buckets=_PHASES, registry=registry
        )
        self.first_token = Histogram(
            "tenora_time_to_first_token_seconds", "Streams only.", buckets=_FIRST_TOKEN, registry=registry
        )
        self.each_token = Histogram(
            "tenora_time_per_output_token_seconds", "From two tokens on.", buckets=_EACH_TOKEN, registry=registry
        )
        self.seconds = Histogram("tenora_request_seconds", "Body read to last byte.", buckets=_TOTAL, registry=registry)
        self.slo = Counter(
            "tenora_slo_requests",
            "Valid requests by SLI.",
            ["model", "class", "objective", "result"],
            registry=registry,
        )
        self.dropped_spans = Counter("tenora_spans_dropped", "Spans that found the queue full.", registry=registry)
        self.fallbacks = Counter("tenora_fallbacks", "A lesser way was taken.", ["kind", "reason"], registry=registry)
        self.unbooked = Counter(
            "tenora_records_unbooked", "Usage records that are not ours or not sound.", ["reason"], registry=registry
        )

    def count_slo(self, model: str, flow_class: str, sli: str, good: bool) -> None:
        """A request was judged against an objective, or failed."""
        self.slo.labels(model, flow_class, sli, "good" if good else "bad").inc()


@dataclass(slots=True)
class Telemetry:
    """``spans`` None: nobody collects traces. ``on_refused`` is called with what no engine took: status and code."""

    metrics: Metrics = field(default_factory=Metrics)
    spans: SpanSink | None = None
    price_of: Callable[[Work, Flight], int] = lambda work, flight: 0
    on_refused: Callable[[Call, Work | None, int, str], None] = lambda call, work, status, code: None

    def report(self, call: Call, work: Work | None, flight: Flight | None, error: ApiError | None) -> None:
        """A request has ended, whatever way. Called once for each."""
        if call.is_replay:
            self.metrics.requests.labels(*_labels(None), "replayed").inc()
            _log.info("request=%s status=replayed", call.request_id)
            return
        status = flight.outcome if flight else error.status if error else CALLER_LEFT
        self.metrics.requests.labels(*_labels(work), _outcome(status)).inc()
        if flight is None or not flight.submitted_ns:
            reason = (error.code or "invalid_request") if error else "caller_left"
            self.metrics.refusals.labels(reason).inc()
            self.on_refused(call, work, status, reason)
        else:
            self._measure(flight)
            if self.spans is not None and call.sampled and work is not None:
                self.spans.put(request_spans(call, work, flight, flight.phases(), self.price_of(work, flight)))
        _log.info("%s", _line(call, work, flight, status, error))

    def _measure(self, flight: Flight) -> None:
        usage, phases = flight.usage, flight.phases()
        for name in ("queue", "prefill", "decode", "network", "post"):
            self.metrics.phases.labels(name).observe(getattr(phases, name) * _NS)
        self.metrics.seconds.observe(phases.total * _NS)
        if flight.first_token_ns:
            self.metrics.first_token.observe(flight.first_token_ns * _NS)
        if usage.output_tokens > 1:
            self.metrics.each_token.observe(usage.decode_ns * _NS / (usage.output_tokens - 1))
        self.metrics.tokens.labels("input").inc(usage.prompt_tokens)
        self.metrics.tokens.labels("cached").inc(usage.cached_tokens)
        self.metrics.tokens.labels("output").inc(usage.output_tokens)


def _labels(work: Work | None) -> tuple[str, str]:
    """Base model and class: a client-chosen name never becomes a label."""
    return (work.target.model.name, work.flow_class) if work else ("", "")


def _outcome(status: int) -> str:
    return "lost" if status == OUTCOME_LOST else "cancelled" if status == CALLER_LEFT else str(status)


def _line(call: Call, work: Work | None, flight: Flight | None, status: int, error: ApiError | None) -> str:
    parts = [f"request={call.request_id}", f"status={_outcome(status)}"]
    if error is not None:
        parts.append(f"code={error.code}")
    if work is not None:
        parts += [f"tenant={work.principal.tenant_id}", f"key={work.principal.key_id}", f"op={work.operation}"]
        parts += [f"model={work.target.model.name}", f"class={work.flow_class}"]
    if flight is not None and flight.submitted_ns:
        usage, phases = flight.usage, flight.phases()
        parts += [f"input={usage.prompt_tokens}", f"cached={usage.cached_tokens}", f"output={usage.output_tokens}"]
        parts.append(f"total_ms={phases.total // 1_000_000}")
    return " ".join(parts)
