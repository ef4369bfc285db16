"""What is seen of a request from outside: metrics, one trace, one log line. Never a prompt, an answer or a key."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from engine.wire import OUTCOME_LOST
from gateway.call import Call
from gateway.errors import ApiError
from gateway.flight import CALLER_LEFT, Flight
from gateway.phases import Phases
from gateway.tallies import Counts, Distributions
from gateway.top_tenants import TopTenants
from gateway.tracing.request_trace import refused_trace, request_trace
from gateway.tracing.sink import SpanSink
from gateway.work import Work

_log = logging.getLogger("gateway.request")
TELL_EVERY_S = 0.03  # at 16 callers ten are told of at once; with more of them the heap grows
_NS = 1e-9
_PHASES = (0.0001, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
_EACH_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
_ROUTE = ("model", "class", "route")
FALLBACKS = (("limiter", "store_unavailable"), ("replica", "engine_lost"), ("replica", "refused"))
_USD = 1e-12  # of a picousd
_TOTAL = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)


class _First(Collector):
    """Of a registry's collectors the one that is asked first: all is counted before any is shown."""

    def __init__(self, metrics: "Metrics") -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        self._metrics.before_shown()
        return iter(())

    def describe(self) -> Iterator[Metric]:
        return iter(())


class Metrics:
    """One registry a process, with the gateway's names of ops/METRICS.md; labels are bounded: models are the served
    ones, ``route`` says whether an adapter ran, tenants go through TopTenants. ``before_shown`` is called before they
    are shown."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_First(self))
        self.before_shown: Callable[[], None] = lambda: None
        self.requests = self._counters("tenora_requests", "Requests by how they ended.", "model", "class", "outcome")
        self.refusals = self._counters("tenora_admission_refusals", "Requests refused before an engine.", "reason")
        self.tokens = self._counters("tenora_tokens", "Tokens of requests that ended.", "kind")
        self.phases = self._histograms("tenora_request_phase_seconds", "Where time went.", _PHASES, "phase")
        self.first_token = self._histograms(
            "tenora_time_to_first_token_seconds", "Streams only.", _FIRST_TOKEN, *_ROUTE
        )
        self.each_token = self._histograms(
            "tenora_time_per_output_token_seconds", "From two tokens on.", _EACH_TOKEN, *_ROUTE
        )
        self.seconds = self._histograms("tenora_request_seconds", "Body read to last byte.", _TOTAL, *_ROUTE)
        self.gpu_seconds = self._counters("tenora_request_gpu_seconds", "Attributed to requests that ended.", *_ROUTE)
        self.price = self._counters("tenora_request_price_usd", "Prices of requests that ended.", *_ROUTE)
        self.tenant_requests = self._counters("tenora_tenant_requests", "By the busiest tenants.", "tenant", "outcome")
        self.tenant_tokens = self._counters("tenora_tenant_tokens", "By the busiest tenants.", "tenant", "kind")
        self.tenant_gpu_seconds = self._counters("tenora_tenant_gpu_seconds", "By the busiest tenants.", "tenant")
        self.tenant_price = self._counters("tenora_tenant_price_usd", "By the busiest tenants.", "tenant")
        self.slo = self._counters("tenora_slo_requests", "Valid ones by SLI.", "model", "class", "objective", "result")
        self.dropped_spans = self._counter("tenora_spans_dropped", "Spans that no collector has taken.")
        self.fallbacks = self._counter("tenora_fallbacks", "A lesser way was taken.", "kind", "reason")
        for kind, reason in FALLBACKS:
            self.fallbacks.labels(kind, reason)
        self.unbooked = self._counter("tenora_records_unbooked", "Usage records not ours or not sound.", "reason")
        self.store_away = Gauge("tenora_store_away", "Gateways that do not reach the store.", registry=self.registry)
        self.webhooks = self._counter("tenora_webhook_deliveries", "Tries to bring an event somewhere.", "result")
        self.pending_webhooks = Gauge("tenora_webhook_pending", "Deliveries under way.", registry=self.registry)
        self.unmeasured = self._counter("tenora_reports_failed", "Requests whose measures were not sound.")

    def fallback(self, kind: str, reason: str) -> None:
        """A lesser way was taken."""
        self.fallbacks.labels(kind, reason).inc()

    def count_slo(self, model: str, flow_class: str, sli: str, good: bool) -> None:
        """A request was judged against an objective, or failed."""
        self.slo[model, flow_class, sli, "good" if good else "bad"].inc()

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _counters(self, name: str, text: str, *labels: str) -> Counts:
        """What requests count, on the loop's thread."""
        return Counts(name, text, labels, self.registry)

    def _histograms(self, name: str, text: str, bounds: tuple[float, ...], *labels: str) -> Distributions:
        return Distributions(name, text, labels, bounds, self.registry)


class _Ended(NamedTuple):
    """A request that has ended; ``flight`` None: no engine had it."""

    call: Call
    work: Work | None
    flight: Flight | None
    error: ApiError | None
    ended_ns: int

    @property
    def status(self) -> int:
        if self.flight is not None:
            return self.flight.outcome
        return self.error.status if self.error else CALLER_LEFT


@dataclass(slots=True)
class Telemetry:
    """``spans`` None: nobody collects traces. ``on_refused`` is called with what no engine took: status and code.

    Requests are told of together, TELL_EVERY_S after the first of them, or when metrics are asked for: what is done for
    one after the other costs a quarter of what it costs between other work, when nothing of it is in the cache.
    """

    metrics: Metrics = field(default_factory=Metrics)
    spans: SpanSink | None = None
    top_tenants: TopTenants = field(default_factory=TopTenants)
    on_refused: Callable[[Call, Work | None, int, str], None] = lambda call, work, status, code: None
    _ended: list[_Ended] = field(default_factory=list)
    _telling: asyncio.TimerHandle | None = None

    def __post_init__(self) -> None:
        self.metrics.before_shown = self.tell

    def report(self, call: Call, work: Work | None, flight: Flight | None, error: ApiError | None) -> None:
        """A request has ended, whatever way. Called once for each, on the event loop."""
        self._ended.append(_Ended(call, work, flight, error, time.monotonic_ns()))
        if self._telling is None:
            self._telling = asyncio.get_running_loop().call_later(TELL_EVERY_S, self.tell)

    def tell(self) -> None:
        """Of all that have ended. Never raises: the answers are out already."""
        if self._telling is not None:
            self._telling.cancel()
        self._telling, ended, self._ended = None, self._ended, []
        for each in ended:
            try:
                self._tell(each)
            except Exception:
                self.metrics.unmeasured.inc()
                _log.exception("request=%s is not measured", each.call.request_id)

    def _tell(self, ended: _Ended) -> None:
        call, work, flight, error, ended_ns = ended
        outcome = "replayed" if call.is_replay else _outcome(ended.status)
        self.metrics.requests[*_labels(None if call.is_replay else work), outcome].inc()
        is_sampled = self.spans.wants(call) if self.spans else call.sampled
        phases, price_picousd = None, 0
        if work is None or flight is None or not flight.submitted_ns:
            if not call.is_replay:
                reason = _reason(error) if error else "caller_left"
                self.metrics.refusals[(reason,)].inc()
                self.on_refused(call, work, ended.status, reason)
            trace = partial(refused_trace, call, work, ended.status, error, ended_ns)
        else:
            phases, price_picousd = flight.phases(), flight.price_picousd
            self._measure(work, flight, phases, price_picousd, {"trace_id": call.trace_id} if is_sampled else None)
            trace = partial(request_trace, call, work, flight, error, price_picousd)
        if call.principal is not None:
            self._measure_tenant(call.principal.tenant_id, flight, price_picousd, outcome)
        if self.spans is not None and is_sampled:
            self.spans.put(trace())
        _log.info("%s", _line(call, work, flight, phases, outcome, error))

    def _measure(
        self, work: Work, flight: Flight, phases: Phases, price_picousd: int, trace: dict[str, str] | None
    ) -> None:
        metrics, usage = self.metrics, flight.usage
        route = (*_labels(work), "adapter" if work.target.adapter_key else "base")
        for name in ("queue", "prefill", "decode", "network", "post"):
            metrics.phases[(name,)].observe(getattr(phases, name) * _NS, trace)
        metrics.seconds[route].observe(phases.total * _NS, trace)
        if flight.first_token_ns:
            metrics.first_token[route].observe(flight.first_token_ns * _NS, trace)
        if usage.output_tokens > 1:
            metrics.each_token[route].observe(usage.decode_ns * _NS / (usage.output_tokens - 1), trace)
        for kind, number in _tokens(flight):
            metrics.tokens[(kind,)].inc(number)
        metrics.gpu_seconds[route].inc(usage.gpu_ns * _NS)
        metrics.price[route].inc(price_picousd * _USD)

    def _measure_tenant(self, tenant_id: str, flight: Flight | None, price_picousd: int, outcome: str) -> None:
        metrics, tenant = self.metrics, self.top_tenants.label(tenant_id)
        metrics.tenant_requests[tenant, outcome].inc()
        if flight is None or not flight.submitted_ns:
            return
        for kind, number in _tokens(flight):
            metrics.tenant_tokens[tenant, kind].inc(number)
        metrics.tenant_gpu_seconds[(tenant,)].inc(flight.usage.gpu_ns * _NS)
        metrics.tenant_price[(tenant,)].inc(price_picousd * _USD)


def _tokens(flight: Flight) -> tuple[tuple[str, int], ...]:
    usage = flight.usage
    return ("input", usage.prompt_tokens), ("cached", usage.cached_tokens), ("output", usage.output_tokens)


def _labels(work: Work | None) -> tuple[str, str]:
    """Base model and class: a client-chosen name never becomes a label."""
    return (work.target.model.name, work.flow_class) if work else ("", "")


def _reason(error: ApiError) -> str:
    return error.code or "invalid_request"


def _outcome(status: int) -> str:
    return "lost" if status == OUTCOME_LOST else "cancelled" if status == CALLER_LEFT else str(status)


def _line(
    call: Call,
    work: Work | None,
    flight: Flight | None,
    phases: Phases | None,
    outcome: str,
    error: ApiError | None,
) -> str:
    parts = [f"request={call.request_id}", f"status={outcome}"]
    if call.is_replay:
        return " ".join(parts)
    if error is not None:
        parts.append(f"code={_reason(error)}")
    if call.principal is not None:
        parts += [f"tenant={call.principal.tenant_id}", f"key={call.principal.key_id}"]
    if work is not None:
        parts += [f"op={work.operation}", f"model={work.target.model.name}", f"class={work.flow_class}"]
    if flight is not None and phases is not None:
        usage = flight.usage
        parts += [f"input={usage.prompt_tokens}", f"cached={usage.cached_tokens}", f"output={usage.output_tokens}"]
        parts.append(f"total_ms={phases.total // 1_000_000}")
    return " ".join(parts)
