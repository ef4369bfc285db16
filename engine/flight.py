"""A step between its launch and its results. Plain data, no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.attribution import StepWork
from engine.scheduler import ChunkResult, StepPlan


class StepHandle(Protocol):
    """What a runner gives for a launched plan."""

    def results(self) -> Sequence[ChunkResult]:
        """In the order of the plan's chunks; waits for the device."""
        ...


@dataclass(frozen=True, slots=True)
class Computed:
    """The handle of a runner that computes at once."""

    chunk_results: Sequence[ChunkResult]

    def results(self) -> Sequence[ChunkResult]:
        return self.chunk_results


@dataclass(frozen=True, slots=True)
class Flight:
    """A launched step. ``started_ns`` is the clock before its launch."""

    plan: StepPlan
    work: StepWork
    handle: StepHandle
    started_ns: int
