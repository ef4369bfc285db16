"""How well the step cost model knows an engine, and how far simpler rules are from it.

    ./run bench cost [--log FILE …] [--steps 600] [--model SOURCE] [--clock ns|cpu_ns] [--note TEXT]

Reads logs of ``./run bench record_steps``; without one it records steps of SmolLM2 on this CPU first, and tells at last
what weighing and sharing a step of 256 decodes takes of the step thread (weighing.py). The log goes through
``metering.cost_fit`` as an engine's own steps do, so that each error is of a prediction made before the step was seen.
Misallocated is the part of a step's time that a rule charges to others than the model's Shapley value does,
½ Σ |a − φ| / T, the mean over the log's second half.
"""

import argparse
import json
import platform
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from engine.metering import cost
from engine.metering.cost import FEATURES, Floats, StepShape, features, weights
from engine.metering.cost_fit import CostFit
from ops.bench.weighing import weighing
from ops.default_model import DEFAULT_GGUF

RESULTS = Path(__file__).with_name("results.jsonl")
RULES = ("by token", "equal", "leave one out")


@dataclass(frozen=True, slots=True)
class Step:
    """Of a log. ``experts`` [N]: the chunks' parts of the experts woken, ``alone`` [N] those that nobody else woke."""

    shape: StepShape
    slot_mib: Floats
    experts: Floats
    alone: Floats

    def parts(self) -> Floats:
        found = cost.parts(self.shape, self.slot_mib)
        found[cost.EXPERT] = self.experts
        return found

    def features_without(self, left: int) -> Floats:
        chosen = np.arange(len(self.alone)) != left
        others = StepShape(self.shape.starts[chosen], self.shape.tokens[chosen], self.shape.slots[chosen])
        found = cost.features(cost.parts(others, self.slot_mib))
        found[cost.EXPERT] = self.experts.sum() - self.alone[left]
        return found


def step_of(line: dict[str, Any]) -> Step:
    starts, tokens, slots = (np.array(line[name], np.int64) for name in ("starts", "tokens", "slots"))
    slot_mib = np.zeros(slots.max() + 2)
    slot_mib[slots] = line["mib"]
    slot_mib[-1] = 0.0
    none = [0.0] * len(slots)
    experts, alone = (np.array(line.get(name, none), float) for name in ("experts", "experts_alone"))
    return Step(StepShape(starts, tokens, slots), slot_mib, experts, alone)


def kind(shape: StepShape) -> str:
    """By what most of its tokens are for."""
    if shape.tokens.max() == 1:
        return "decode only"
    part = (shape.tokens == 1).mean()
    return "prefill only" if part == 0 else f"{'few' if part >= 0.8 else 'many'} prefills"


def leave_one_out(step: Step, coefficients: Floats) -> Floats:
    """Of the step's modelled time, what it lacks without each."""
    count = len(step.shape.tokens)
    if count == 1:
        return np.ones(1)
    whole = features(step.parts()) @ coefficients
    return np.array([whole - step.features_without(left) @ coefficients for left in range(count)]) / whole


def misallocated(step: Step, coefficients: Floats) -> dict[str, float]:
    """By rule; and what the leave-one-out costs add up to, of the step's time."""
    ours = weights(coefficients @ step.parts())
    value, tokens = ours / ours.sum(), step.shape.tokens
    alone = leave_one_out(step, coefficients)
    rules = {
        "by token": tokens / tokens.sum(),
        "equal": np.full(len(value), 1 / len(value)),
        "leave one out": alone / alone.sum() if alone.sum() > 0 else np.full(len(value), 1 / len(value)),
    }
    found = {name: float(np.abs(rule - value).sum() / 2) for name, rule in rules.items()}
    return {**found, "leave one out adds up to": float(alone.sum())}


def evaluate(lines: list[dict[str, Any]], clock: str = "ns") -> dict[str, Any]:
    fit, by_kind, errors = CostFit(), {}, []
    for number, line in enumerate(lines):
        step = step_of(line)
        seen = features(step.parts())
        if number >= len(lines) // 2:
            by_kind.setdefault(kind(step.shape), []).append(misallocated(step, fit.coefficients))
            errors.append(float(seen @ fit.coefficients) / line[clock] - 1)
        fit.observe(seen, line[clock])
    everything = [row for rows in by_kind.values() for row in rows]
    return {
        "steps": len(lines),
        "error_ratio": fit.error_ratio,
        "r_squared": fit.r_squared,
        "median_error_ratio": float(np.median(np.abs(errors))),
        "mean_bias_ratio": float(np.mean(errors)),
        "coefficients_ns": dict(zip(FEATURES, fit.coefficients.round(3).tolist(), strict=True)),
        "misallocated": {name: _means(rows) for name, rows in sorted({**by_kind, "all": everything}.items())},
    }


def _means(rows: list[dict[str, float]]) -> dict[str, float]:
    return {"steps": len(rows), **{name: float(np.mean([row[name] for row in rows])) for name in rows[0]}}


def show(name: str, found: dict[str, Any]) -> None:
    print(f"\n{name}: {found['steps']} steps, predicted before seen: mean error {found['error_ratio']:.1%}, ", end="")
    print(
        f"median {found['median_error_ratio']:.1%}, bias {found['mean_bias_ratio']:+.1%}, R² {found['r_squared']:.3f}"
    )
    print("coefficients, ns: " + ", ".join(f"{term} {value:,.0f}" for term, value in found["coefficients_ns"].items()))
    print(f"{'misallocated part of a step':28} {'steps':>6} " + " ".join(f"{rule:>14}" for rule in RULES), end="")
    print(f" {'(leave one out adds up to)':>28}")
    for row_name, row in found["misallocated"].items():
        print(f"{row_name:28} {row['steps']:6} " + " ".join(f"{row[rule]:14.1%}" for rule in RULES), end="")
        print(f" {row['leave one out adds up to']:28.0%}")


def recorded(num_steps: int, source: str) -> list[dict[str, Any]]:
    import torch

    from ops.bench.record_steps import make_bench, record

    torch.set_num_threads(1)
    return list(record(make_bench("smollm", torch.device("cpu"), source), num_steps, num_warm_up=20))


def append(line: dict[str, Any], note: str) -> None:
    when = datetime.now(UTC).isoformat(timespec="seconds")
    machine, command = f"{platform.machine()}, {platform.system()} {platform.release()}", " ".join(sys.argv[1:])
    head = {"bench": "cost", "date": when, "machine": machine, "command": f"./run bench cost {command}", "note": note}
    with RESULTS.open("a") as file:
        file.write(json.dumps(head | line) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--log", type=Path, nargs="*", default=[])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--model", default=str(DEFAULT_GGUF), help="a SOURCE of ./run serve")
    parser.add_argument("--clock", choices=("ns", "cpu_ns"), default="ns", help="cpu_ns: of the processor, one thread")
    parser.add_argument("--note", default="")
    options = parser.parse_args()
    logs = {path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in options.log}
    for name, lines in (
        logs or {f"{Path(options.model).name} on this CPU": recorded(options.steps, options.model)}
    ).items():
        found = evaluate(lines, options.clock)
        show(name, found)
        append({"log": name, "clock": options.clock, **found}, options.note)
    if not logs:
        taken = weighing()
        print("\nof the step thread, 256 decodes, µs: " + ", ".join(f"{name} {us:.0f}" for name, us in taken.items()))
        append({"weighing_us": taken}, options.note)


if __name__ == "__main__":
    main()
