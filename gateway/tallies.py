"""Counters and histograms that cost a request next to nothing: plain numbers, which the library shows at a scrape.

Its own take locks, checks and a look at an exemplar's names for every number. These belong to one thread.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString

_Child = TypeVar("_Child")


class Count:
    """A counter of one set of labels."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        """Raises ValueError for less than nothing."""
        if amount < 0:
            raise ValueError(f"a counter goes up only, not by {amount}")
        self.value += amount


class Distribution:
    """A histogram of one set of labels; the last bucket is +Inf."""

    __slots__ = ("_bounds", "counts", "exemplars", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.exemplars: list[Exemplar | None] = [None] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, exemplar: dict[str, str] | None = None) -> None:
        """``exemplar`` says whose it was; of a bucket the last is kept."""
        bucket = bisect_left(self._bounds, value)
        self.counts[bucket] += 1
        self.sum += value
        if exemplar is not None:
            self.exemplars[bucket] = Exemplar(exemplar, value, time.time())


class _ByLabels(Collector, dict[tuple[str, ...], _Child]):
    """A metric's children by the values of their labels; one that is asked for is there."""

    def __init__(
        self, name: str, text: str, labels: tuple[str, ...], make: Callable[[], _Child], registry: CollectorRegistry
    ) -> None:
        super().__init__()
        self._name, self._text, self._labels, self._make = name, text, labels, make
        registry.register(self)

    def __missing__(self, labels: tuple[str, ...]) -> _Child:
        child = self[labels] = self._make()
        return child

    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride] (a registry keeps it by identity)
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


class Counts(_ByLabels[Count]):
    """A counter."""

    def __init__(self, name: str, text: str, labels: tuple[str, ...], registry: CollectorRegistry) -> None:
        super().__init__(name, text, labels, Count, registry)

    def collect(self) -> Iterator[CounterMetricFamily]:
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for labels, count in self.items():
            family.add_metric(labels, count.value)
        yield family


class Distributions(_ByLabels[Distribution]):
    """A histogram with these upper bounds."""

    def __init__(
        self, name: str, text: str, labels: tuple[str, ...], bounds: Sequence[float], registry: CollectorRegistry
    ) -> None:
        super().__init__(name, text, labels, lambda: Distribution(bounds), registry)
        self._le = [*map(floatToGoString, bounds), "+Inf"]

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        for labels, seen in self.items():
            family.add_metric(labels, self._buckets(seen), seen.sum)
        yield family

    def _buckets(self, seen: Distribution) -> list[tuple[str, float] | tuple[str, float, Exemplar]]:
        below = 0
        told = list[tuple[str, float] | tuple[str, float, Exemplar]]()
        for le, count, exemplar in zip(self._le, seen.counts, seen.exemplars, strict=True):
            below += count
            told.append((le, float(below)) if exemplar is None else (le, float(below), exemplar))
        return told
