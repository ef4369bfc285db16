"""Our tallies are shown as the library shows its own metrics."""

import random

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.openmetrics.exposition import generate_latest

from gateway.tallies import Counts, Distributions

BOUNDS = (0.1, 1, 2.5)


def shown(registry: CollectorRegistry) -> list[str]:
    """Without times of creation and of exemplars."""
    lines = generate_latest(registry).decode().splitlines()
    return [line.rsplit(" ", 1)[0] if " # {" in line else line for line in lines if "_created" not in line]


def test_counters_are_shown_as_the_librarys():
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    counts, counter = Counts("asked", "Told.", ("a", "b"), ours), Counter("asked", "Told.", ("a", "b"), registry=theirs)
    for labels, amount in (("x", "y"), 1), (("x", "z"), 0.5), (("x", "y"), 2):
        counts[labels].inc(amount)
        counter.labels(*labels).inc(amount)
    assert shown(ours) == shown(theirs)


def test_histograms_are_shown_as_the_librarys_with_the_last_exemplar_of_each_bucket():
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    seen = Distributions("took", "Told.", ("a",), BOUNDS, ours)
    histogram = Histogram("took", "Told.", ("a",), buckets=BOUNDS, registry=theirs)
    draw = random.Random(7)
    for number, value in enumerate([*BOUNDS, 0.0, *(draw.expovariate(1) for _ in range(50))]):
        exemplar = {"trace_id": f"{number:032x}"} if number % 3 else None
        seen[("x",)].observe(value, exemplar)
        histogram.labels("x").observe(value, exemplar)
    assert shown(ours) == shown(theirs)


def test_a_counter_does_not_go_down():
    count = Counts("asked", "Told.", (), CollectorRegistry())[()]
    count.inc(1)
    with pytest.raises(ValueError, match="up only"):
        count.inc(-1)
    assert count.value == 1
