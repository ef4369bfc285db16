"""From traces to a collector: sampled as the caller or the operator says, queued, exported by a thread of its own."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gateway.call import Call
from gateway.tracing.request_trace import Trace

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace.export import SpanExporter

SERVICE = "tenora-gateway"
_TRACE_BITS = 64  # of a trace's id, by which a ratio decides: as the SDKs do, so that a trace is whole or not at all
_log = logging.getLogger("gateway.tracing")


@dataclass(frozen=True, slots=True)
class SpanOptions:
    """What the standard OTEL_* variables say of traces, with defaults for a server."""

    sampler: str = "parentbased_always_on"
    sampler_arg: float = 1.0
    max_queued_spans: int = 65_536
    max_batch_spans: int = 2048
    export_every_s: float = 1.0

    @classmethod
    def of(cls, env: Mapping[str, str]) -> "SpanOptions":
        """Raises ValueError, naming the variable, for one that is no number or no sampler."""
        ours = cls()
        sampler = env.get("OTEL_TRACES_SAMPLER", "") or ours.sampler
        if sampler.removeprefix("parentbased_") not in _ROOTS:
            raise ValueError(f"OTEL_TRACES_SAMPLER: {sampler!r} is none of {', '.join(sorted(_ROOTS))}")
        return cls(
            sampler=sampler,
            sampler_arg=_number(env, "OTEL_TRACES_SAMPLER_ARG", ours.sampler_arg),
            max_queued_spans=int(_number(env, "OTEL_BSP_MAX_QUEUE_SIZE", ours.max_queued_spans)),
            max_batch_spans=int(_number(env, "OTEL_BSP_MAX_EXPORT_BATCH_SIZE", ours.max_batch_spans)),
            export_every_s=_number(env, "OTEL_BSP_SCHEDULE_DELAY", ours.export_every_s * 1e3) / 1e3,
        )

    def wants(self, call: Call) -> bool:
        """Whether the call's trace is exported. ``parentbased_…``: a caller that has begun it has decided that."""
        root = self.sampler.removeprefix("parentbased_")
        if call.parent_span and root != self.sampler:
            return call.sampled
        return _ROOTS[root](int(call.trace_id, 16), self.sampler_arg)


def _by_ratio(trace_id: int, ratio: float) -> bool:
    return trace_id % (1 << _TRACE_BITS) < round(ratio * (1 << _TRACE_BITS))


_ROOTS: dict[str, Callable[[int, float], bool]] = {
    "always_on": lambda trace_id, ratio: True,
    "always_off": lambda trace_id, ratio: False,
    "traceidratio": _by_ratio,
}


def _number(env: Mapping[str, str], name: str, default: float) -> float:
    try:
        return float(env.get(name, "") or default)
    except ValueError:
        raise ValueError(f"{name}: {env[name]!r} is no number") from None


class SpanSink:
    """A bounded queue in front of an exporter that may be slow or away: ``dropped`` hears of every span that no
    collector has taken."""

    def __init__(
        self, exporter: "SpanExporter", dropped: Callable[[int], None], options: SpanOptions | None = None
    ) -> None:
        self._exporter = exporter
        self._dropped = dropped
        self._options = options or SpanOptions()
        self.wants = self._options.wants
        self._queue: deque[Trace] = deque()
        self._num_queued = 0
        self._wake = threading.Event()
        self._closing = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="span export", daemon=True)
        self._thread.start()

    def put(self, trace: Trace) -> None:
        """A request's spans, all or none of them. Never waits."""
        with self._lock:
            fits = not self._closing and self._num_queued + len(trace) <= self._options.max_queued_spans
            if fits:
                self._queue.append(trace)
                self._num_queued += len(trace)
        if not fits:
            self._dropped(len(trace))
        elif self._num_queued >= self._options.max_batch_spans:
            self._wake.set()

    def flush(self) -> None:
        """Exports soon what is queued."""
        self._wake.set()

    def close(self, timeout_s: float = 5.0) -> None:
        """Exports what is queued, as far as the time goes; the rest is dropped and counted."""
        self._closing = True
        self._wake.set()
        self._thread.join(timeout_s)
        with self._lock:
            left, self._num_queued = self._num_queued, 0
            self._queue.clear()
        if left:
            self._dropped(left)
            _log.warning("%d spans were not exported before the end", left)
        self._exporter.shutdown()

    def _run(self) -> None:
        resource = _resource()
        while not (self._closing and not self._queue):
            self._wake.wait(self._options.export_every_s)
            self._wake.clear()
            while batch := self._next_batch():
                self._export(batch, resource)

    def _next_batch(self) -> list[Trace]:
        batch: list[Trace] = []
        with self._lock:
            while self._queue and sum(map(len, batch)) < self._options.max_batch_spans:
                batch.append(self._queue.popleft())
            self._num_queued -= sum(map(len, batch))
        return batch

    def _export(self, batch: list[Trace], resource: "Resource") -> None:
        from opentelemetry.sdk.trace.export import SpanExportResult

        reason = "refused or timed out"
        try:
            spans = [span for trace in batch for span in trace.spans(resource)]
            if self._exporter.export(spans) is SpanExportResult.SUCCESS:
                return
        except Exception as error:
            reason = type(error).__name__
        self._dropped(sum(map(len, batch)))
        _log.warning("spans were not exported: %s", reason)


def _resource() -> "Resource":
    """Ours, and what OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say beside or instead."""
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource

    return Resource({"service.name": SERVICE}).merge(OTELResourceDetector().detect())


def otlp_sink(env: Mapping[str, str], dropped: Callable[[int], None]) -> SpanSink | None:
    """Exports over OTLP/HTTP to where the standard OTEL_* variables say; None where they name no collector or want
    none. Needs the `otlp` extra. Raises ValueError for what we don't have."""
    endpoint = env.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "") or env.get("OTEL_EXPORTER_OTLP_ENDPOINT", "")
    exporter = env.get("OTEL_TRACES_EXPORTER", "") or "otlp"
    if not endpoint or exporter == "none" or env.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    protocol = env.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "") or env.get("OTEL_EXPORTER_OTLP_PROTOCOL", "")
    if exporter != "otlp" or protocol not in ("", "http/protobuf"):
        raise ValueError("traces are exported by OTEL_TRACES_EXPORTER=otlp over http/protobuf, or not at all")
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return SpanSink(OTLPSpanExporter(), dropped, SpanOptions.of(env))
