"""Metrics of several processes as one: each child gives its families, the supervisor sums them.

A counter never goes down and is never counted twice: a dead child's last counters and histograms stay in the
sum, its gauges vanish. What a killed child counted after the last pull (each second and at every scrape) is lost
here; the ledger, not this, says what was used. Of a bucket's exemplars the newest is kept, also a dead child's.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.samples import Exemplar as ShownExemplar

from engine.wire import Exemplar, Family
from gateway.top_tenants import OTHER

MAX_REPLY_BYTES = 16 << 20
_SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_count", "_sum")}
MAX_ENDED_TENANTS = 500
_AVERAGED = ("_ratio", "_perc", "_balancedness")  # a sum of shares means nothing
_NEWEST = ("_info",)  # the value is a timestamp

Labels = tuple[tuple[str, str], ...]
Key = tuple[str, Labels]  # a sample's suffix and labels


class ScrapeError(Exception):
    """A child gave no metrics: not there, too slow, or not speaking our protocol."""


class Snapshot(msgspec.Struct, frozen=True):
    """What one process counted so far. ``pid`` tells a child from the one that took its place."""

    pid: int
    families: list[Family]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Snapshot)


# ── a child's side ───────────────────────────────────────────────────────────────────────────────


def families(registry: CollectorRegistry) -> list[Family]:
    """The counters, gauges and histograms of a registry; creation times are left out."""
    return [_family(metric) for metric in registry.collect() if metric.type in _SUFFIXES]


def _family(metric: Metric) -> Family:
    samples = [
        (sample.name.removeprefix(metric.name), dict(sample.labels), float(sample.value))
        for sample in metric.samples
        if not sample.name.endswith("_created")
    ]
    exemplars = [
        Exemplar(dict(sample.labels), dict(found.labels), found.value, float(found.timestamp or 0))
        for sample in metric.samples
        if (found := sample.exemplar) is not None and sample.name.endswith("_bucket")
    ]
    kind = cast(Literal["counter", "gauge", "histogram"], metric.type)  # families() takes no other
    return Family(metric.name, kind, metric.documentation, samples, exemplars)


@contextlib.asynccontextmanager
async def serve(path: Path, registry: CollectorRegistry) -> AsyncIterator[None]:
    """Answers every connection to the unix socket ``path`` with this process's Snapshot, while entered."""

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            writer.write(_encoder.encode(Snapshot(os.getpid(), families(registry))))
            await writer.drain()
        writer.close()

    path.unlink(missing_ok=True)
    server = await asyncio.start_unix_server(answer, str(path))
    path.chmod(0o600)
    try:
        yield
    finally:
        server.close()


# ── the supervisor's side ────────────────────────────────────────────────────────────────────────


async def pull(path: Path, timeout_s: float = 1.0) -> Snapshot:
    """A child's Snapshot. Raises ScrapeError."""
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_unix_connection(str(path))
            try:
                return _decoder.decode(await _read_all(reader))
            finally:
                writer.close()
    except (OSError, TimeoutError, msgspec.MsgspecError) as error:
        raise ScrapeError(f"{path.name}: {error or 'timed out'}") from error


async def _read_all(reader: asyncio.StreamReader) -> bytes:
    data = bytearray()
    while chunk := await reader.read(1 << 16):
        data += chunk
        if len(data) > MAX_REPLY_BYTES:
            raise OSError("reply too large")
    return bytes(data)


@dataclass(slots=True)
class _Sum:
    """One family's running sums; a sample's order is the order in which it was first seen."""

    kind: str
    help: str
    values: dict[Key, float]
    exemplars: dict[Key, Exemplar] = field(default_factory=dict)


class SummedRegistry:
    """Sums the families of all children over all their incarnations; a prometheus collector.

    A source is a child's name; its incarnations are rising integers. Not thread-safe: one event loop owns it.
    """

    def __init__(self) -> None:
        self._live: dict[str, tuple[int, dict[str, _Sum]]] = {}
        self._dead: dict[str, _Sum] = {}  # counters and histograms of everything that ended
        self._retired: dict[str, int] = {}  # source → highest incarnation that ended

    def update(self, source: str, incarnation: int, families: Sequence[Family], **labels: str) -> None:
        """Takes what a child counts now; ``labels`` are added where a sample lacks them.

        A reply of an incarnation that is known to have ended changes nothing.
        """
        known, before = self._live.get(source, (incarnation, {}))
        if incarnation <= self._retired.get(source, -1) or incarnation < known:
            return
        if incarnation > known:
            self.retire(source, known)
            before = {}
        now = {family.name: family for family in map(_normal, families)}
        if any(_went_down(before.get(name), family) for name, family in now.items()):
            self._fold(before)  # the process began anew without our knowing
        self._live[source] = (incarnation, {name: _summable(family, labels) for name, family in now.items()})

    def retire(self, source: str, incarnation: int) -> None:
        """That incarnation has ended: its counters stay, its gauges vanish."""
        known, last = self._live.get(source, (incarnation, {}))
        self._retired[source] = max(incarnation, self._retired.get(source, -1))
        if known <= incarnation:
            self._fold(last)
            self._live.pop(source, None)

    def _fold(self, ended: dict[str, _Sum]) -> None:
        for name, family in ended.items():
            if family.kind != "gauge":
                _add(self._dead, name, self._bounded(name, family))

    def _bounded(self, name: str, ended: _Sum) -> _Sum:
        """Each process names few tenants, but many processes may end: beyond MAX_ENDED_TENANTS they are one."""
        named = {dict(labels).get("tenant") for _, labels in self._dead[name].values} if name in self._dead else set()
        values: dict[Key, float] = {}
        for (suffix, pairs), value in ended.values.items():
            labels = dict(pairs)
            if "tenant" in labels and labels["tenant"] not in named:
                labels["tenant"] = labels["tenant"] if len(named) < MAX_ENDED_TENANTS else OTHER
                named.add(labels["tenant"])
            key = _key(suffix, labels)
            values[key] = values.get(key, 0.0) + value
        return _Sum(ended.kind, ended.help, values, ended.exemplars)

    def gauges_of(self, source: str) -> dict[str, float]:
        """One child's gauges by name, each the sum of its samples."""
        _, families = self._live.get(source, (0, {}))
        return {name: sum(family.values.values()) for name, family in families.items() if family.kind == "gauge"}

    def total(self, name: str, **labels: str) -> float:
        """The sum of a counter's or gauge's samples that carry at least ``labels``."""
        wanted = labels.items()
        family = self._sums().get(name.removesuffix("_total"))
        return sum(v for (_, key), v in family.values.items() if wanted <= dict(key).items()) if family else 0.0

    def _sums(self) -> dict[str, _Sum]:
        sums: dict[str, _Sum] = {}
        counts: dict[tuple[str, Key], int] = {}
        for group in (self._dead, *(families for _, families in self._live.values())):
            for name, family in group.items():
                _add(sums, name, family)
                for key in family.values:
                    counts[name, key] = counts.get((name, key), 0) + 1
        for name, family in sums.items():
            if family.kind == "gauge" and name.endswith(_AVERAGED):
                family.values = {key: value / counts[name, key] for key, value in family.values.items()}
        return sums

    def collect(self) -> Iterator[Metric]:
        """The sums as prometheus_client's own metric families."""
        for name, family in sorted(self._sums().items()):
            metric = Metric(name, family.help, family.kind)
            for key in _ordered(family.values):
                suffix, labels = key
                shown = _shown(family.exemplars.get(key))
                metric.add_sample(name + suffix, dict(labels), family.values[key], exemplar=shown)
            yield metric

    def render(self, accept: str) -> tuple[bytes, str]:
        """The exposition for an Accept header, and its content type."""
        encode, content_type = choose_encoder(accept)
        if content_type.startswith("application/openmetrics-text"):
            # the encoder's escaping would write vllm:x as vllm_x; our names need none
            return openmetrics.generate_latest(self, escaping=openmetrics.ALLOWUTF8), content_type
        return encode(self), content_type


def _add(sums: dict[str, _Sum], name: str, family: _Sum) -> None:
    into = sums.setdefault(name, _Sum(family.kind, family.help, {}))
    newest = family.kind == "gauge" and name.endswith(_NEWEST)
    for key, value in family.values.items():
        before = into.values.get(key, 0.0)
        into.values[key] = max(before, value) if newest else before + value
    for key, exemplar in family.exemplars.items():
        known = into.exemplars.get(key)
        if known is None or known.unix_s <= exemplar.unix_s:
            into.exemplars[key] = exemplar


def _shown(exemplar: Exemplar | None) -> ShownExemplar | None:
    return None if exemplar is None else ShownExemplar(exemplar.of, exemplar.value, exemplar.unix_s)


def _normal(family: Family) -> Family:
    """A counter's name without _total and its samples with it, whichever way the child wrote them."""
    if family.kind != "counter":
        return family
    samples = [("_total", labels, value) for suffix, labels, value in family.samples if suffix in ("", "_total")]
    return Family(family.name.removesuffix("_total"), family.kind, family.help, samples)


def _summable(family: Family, labels: dict[str, str]) -> _Sum:
    allowed = _SUFFIXES[family.kind]
    values: dict[Key, float] = {}
    for suffix, own, value in family.samples:
        if suffix in allowed:
            key = _key(suffix, labels | own)
            values[key] = values.get(key, 0.0) + value
    exemplars = {_key("_bucket", labels | exemplar.labels): exemplar for exemplar in family.exemplars}
    return _Sum(family.kind, family.help, values, exemplars)


def _key(suffix: str, labels: dict[str, str]) -> Key:
    return suffix, tuple(sorted(labels.items()))


def _went_down(before: _Sum | None, now: Family) -> bool:
    if before is None or now.kind == "gauge":
        return False
    suffix = "_total" if now.kind == "counter" else "_count"
    was = sum(value for (s, _), value in before.values.items() if s == suffix)
    return sum(value for s, _, value in now.samples if s == suffix) < was


def _ordered(keys: Iterable[Key]) -> list[Key]:
    """Label sets together, a histogram's buckets in rising order before its count and sum."""

    def place(key: Key) -> tuple[Labels, str, float]:
        suffix, labels = key
        rest = tuple(pair for pair in labels if pair[0] != "le")
        return rest, suffix, float(dict(labels).get("le", "inf"))

    return sorted(keys, key=place)
