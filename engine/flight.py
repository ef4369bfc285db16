"""A step between its launch and its results. Plain data, no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.metering.cost import Floats
from engine.scheduler import ChunkResult, StepPlan


class StepHandle(Protocol):
    """What a runner gives for a launched plan."""

    def results(self) -> Sequence[ChunkResult]:
        """In the order of the plan's chunks; waits for the device."""
        ...

    def expert_parts(self) -> Floats | None:
        """After ``results``. [chunks]: of each expert that a chunk's tokens were sent to, 1 / the chunks whose tokens
        were, summed over experts; together they are the number of experts that the step woke. None: there are none."""
        ...


@dataclass(frozen=True, slots=True)
class Computed:
    """The handle of a runner that computes at once."""

    chunk_results: Sequence[ChunkResult]
    parts_of_experts: Floats | None = None

    def results(self) -> Sequence[ChunkResult]:
        return self.chunk_results

    def expert_parts(self) -> Floats | None:
        return self.parts_of_experts


@dataclass(frozen=True, slots=True)
class Flight:
    """A launched step. ``parts`` as of ``engine.metering.cost``; ``started_ns`` is the clock before its launch."""

    plan: StepPlan
    parts: Floats
    handle: StepHandle
    started_ns: int
