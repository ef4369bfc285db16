"""What scheduling costs a step: schedule + commit, without a model (performance.md §5: ≤ 300 µs).

    ./run bench scheduler [--running 256] [--waiting 10000] [--flows 1000] [--steps 300] [--note TEXT]

The real Engine over a runner that answers at once: 256 sequences decode, 10,000 of 1,000 flows wait. Steps in which
nobody ends and steps in which one ends and the next is admitted are told apart; CPU time of the thread, medians.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from engine.config import EngineConfig
from engine.engine import Engine
from engine.flight import Computed
from engine.scheduler import ChunkResult, StepPlan
from engine.wire import Flow, SamplingParams, Submit, pack_ids

RESULTS = Path(__file__).with_name("results.jsonl")
TARGET_US = 300


@dataclass
class ModelInfo:
    vocab_size: int = 1000
    eos_token_ids: tuple[int, ...] = (0,)


class InstantRunner:
    """Token 1 for all that is asked; ``spent_ns`` is its own time, which is not the scheduler's."""

    def __init__(self) -> None:
        self.model_info = ModelInfo()
        self.expert_load = None
        self.device_counters = None
        self.spent_ns = 0

    overlaps = False

    def launch(self, plan: StepPlan) -> Computed:
        begin_ns = time.thread_time_ns()
        results = [ChunkResult(1 if chunk.samples else -1) for chunk in plan.chunks]
        self.spent_ns = time.thread_time_ns() - begin_ns
        return Computed(results)

    def load_slot(self, slot: int, weights: object) -> None:
        raise AssertionError("no adapters here")

    def clear_slot(self, slot: int) -> None:
        raise AssertionError("no adapters here")


def fill(num_running: int, num_waiting: int, num_flows: int) -> tuple[Engine, InstantRunner]:
    """An engine in which ``num_running`` decode and the others wait; outputs are long enough that few end."""
    runner = InstantRunner()
    config = EngineConfig(
        num_blocks=num_running * 80, max_step_tokens=2048, max_running=num_running, max_waiting_requests=num_waiting * 2
    )
    engine = Engine(config, runner)
    for number in range(num_running + num_waiting):
        sampling = SamplingParams(max_tokens=200 + number % 800, temperature=0.0, ignore_eos=True)
        flow = Flow(f"flow{number % num_flows}", flow_class=("interactive", "standard", "batch")[number % 3])
        prompt = pack_ids([2 + number % 900] * 32)
        engine.add(Submit(str(number), [prompt], sampling, flow, str(number).encode(), sampling.max_tokens))
    while len(engine.scheduler.running) < num_running:
        engine.step()
    for _ in range(50):
        engine.step()
    return engine, runner


def measure(engine: Engine, runner: InstantRunner, num_steps: int) -> dict[str, list[float]]:
    """µs by step: the scheduler's own part, and the whole step but for the runner, quiet and with an end."""
    spent: dict[str, list[float]] = {"schedule + commit": [], "step, nobody ends": [], "step, one ends or more": []}
    scheduler, parts = engine.scheduler, []

    def timed(function: Callable) -> Callable:
        def call(*arguments: object) -> object:
            begin_ns = time.thread_time_ns()
            result = function(*arguments)
            parts.append((time.thread_time_ns() - begin_ns) / 1e3)
            return result

        return call

    scheduler.schedule, scheduler.commit = timed(scheduler.schedule), timed(scheduler.commit)
    for _ in range(num_steps):
        parts.clear()
        begin_ns = time.thread_time_ns()
        result = engine.step()
        step_us = (time.thread_time_ns() - begin_ns - runner.spent_ns) / 1e3
        spent["schedule + commit"].append(sum(parts))
        spent["step, one ends or more" if result.finished else "step, nobody ends"].append(step_us)
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("running", 256), ("waiting", 10_000), ("flows", 1000), ("steps", 300)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--note", default="")
    options = parser.parse_args()
    engine, runner = fill(options.running, options.waiting, options.flows)
    spent = measure(engine, runner, options.steps)
    medians = {name: round(statistics.median(values), 1) for name, values in spent.items() if values}
    print(f"{options.running} running, {options.waiting} waiting of {options.flows} flows; µs, target {TARGET_US}")
    for name, values in spent.items():
        if values:
            print(f"  {name:24} median {medians[name]:7.1f}   min {min(values):7.1f}   steps {len(values)}")
    line = {
        "bench": "scheduler",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {platform.system()} {platform.release()}",
        "versions": {"python": platform.python_version()},
        "command": "./run bench scheduler",
        "sizes": {name: getattr(options, name) for name in ("running", "waiting", "flows", "steps")},
        "note": options.note,
        "median_us": medians,
        "min_us": {name: round(min(values), 1) for name, values in spent.items() if values},
    }
    with RESULTS.open("a") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
