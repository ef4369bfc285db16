"""What weighing and sharing a step takes of the step thread: a real Engine's attribution, over an instant runner."""

import statistics
import time
from collections import defaultdict

from engine.metering import cost
from engine.metering.attribution import Attribution
from engine.metering.stats import StepBill
from engine.scheduler import StepPlan
from ops.bench.scheduler import fill


class TimedAttribution(Attribution):
    """``us``: by what was done, of each step: thread time, µs."""

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots)
        self.us: dict[str, list[float]] = defaultdict(list)

    def weigh(self, plan: StepPlan) -> cost.Floats:
        began_ns = time.thread_time_ns()
        parts = super().weigh(plan)
        self.us["weigh the same" if plan.is_next else "weigh others"].append((time.thread_time_ns() - began_ns) / 1e3)
        return parts

    def share(self, plan: StepPlan, parts: cost.Floats, expert_parts: cost.Floats | None, step_ns: int) -> StepBill:
        began_ns = time.thread_time_ns()
        bill = super().share(plan, parts, expert_parts, step_ns)
        self.us["share"].append((time.thread_time_ns() - began_ns) / 1e3)
        return bill


def weighing(num_running: int = 256, num_steps: int = 600) -> dict[str, float]:
    """Medians, µs. *The same*: the batch of the step before, a token later; *others*: somebody came or left."""
    engine, _ = fill(num_running, 2 * num_running, 100)
    timed = engine._attribution = TimedAttribution(engine.config.adapter_slots)  # pyright: ignore[reportPrivateUsage]
    engine.abort("0")  # so that it begins with a batch of its own
    for _ in range(num_steps):
        engine.step()
    return {name: statistics.median(us) for name, us in sorted(timed.us.items())}
