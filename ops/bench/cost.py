"""How well the step cost model knows an engine, and how far simpler rules are from it.

    ./run bench cost [--log FILE …] [--steps 600] [--clock ns|cpu_ns] [--note TEXT]

Reads logs of ``./run bench record_steps``; without one it records steps of SmolLM2 on this CPU first. The log goes
through ``engine.cost_fit`` as an engine's own steps do, so that each error is of a prediction made before the step was
seen. Misallocated is the part of a step's time that a rule charges to others than the model's Shapley value does,
½ Σ |a − φ| / T, the mean over the log's second half.
"""

import argparse
import json
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from engine.cost import FEATURES, Floats, StepShape, features, weights
from engine.cost_fit import CostFit
from ops.default_model import DEFAULT_GGUF

RESULTS = Path(__file__).with_name("results.jsonl")
RULES = ("by token", "equal", "leave one out")


def shape_of(line: dict[str, Any]) -> StepShape:
    starts, tokens, slots = (np.array(line[name], np.int64) for name in ("starts", "tokens", "slots"))
    return StepShape(starts, tokens, slots, np.array(line["mib"], float))


def kind(shape: StepShape) -> str:
    """By what most of its tokens are for."""
    if shape.tokens.max() == 1:
        return "decode only"
    part = (shape.tokens == 1).mean()
    return "prefill only" if part == 0 else f"{'few' if part >= 0.8 else 'many'} prefills"


def leave_one_out(shape: StepShape, coefficients: Floats) -> Floats:
    """What the modelled time lacks without each, put in proportion so that all is paid; and what it added up to."""
    whole = features(shape) @ coefficients
    if len(shape.tokens) == 1:
        return np.ones(1)
    others = (np.arange(len(shape.tokens)) != left for left in range(len(shape.tokens)))
    found = np.array([whole - features(part(shape, chosen)) @ coefficients for chosen in others])
    return found / whole


def part(shape: StepShape, chosen: Any) -> StepShape:
    return StepShape(shape.starts[chosen], shape.tokens[chosen], shape.slots[chosen], shape.mib[chosen])


def misallocated(shape: StepShape, coefficients: Floats) -> dict[str, float]:
    """By rule; and what the leave-one-out costs add up to, of the step's time."""
    ours = weights(shape, coefficients)
    value = ours / ours.sum()
    alone = leave_one_out(shape, coefficients)
    rules = {
        "by token": shape.tokens / shape.tokens.sum(),
        "equal": np.full(len(value), 1 / len(value)),
        "leave one out": alone / alone.sum() if alone.sum() > 0 else np.full(len(value), 1 / len(value)),
    }
    found = {name: float(np.abs(rule - value).sum() / 2) for name, rule in rules.items()}
    return {**found, "leave one out adds up to": float(alone.sum())}


def evaluate(lines: list[dict[str, Any]], clock: str = "ns") -> dict[str, Any]:
    fit, by_kind, errors = CostFit(), {}, []
    for number, line in enumerate(lines):
        shape = shape_of(line)
        if number >= len(lines) // 2:
            by_kind.setdefault(kind(shape), []).append(misallocated(shape, fit.coefficients))
            errors.append(float(features(shape) @ fit.coefficients) / line[clock] - 1)
        fit.observe(features(shape), line[clock])
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


def recorded(num_steps: int, model: Path) -> list[dict[str, Any]]:
    import torch

    from ops.bench.record_steps import make_bench, record

    torch.set_num_threads(1)
    return list(record(make_bench("smollm", torch.device("cpu"), model), num_steps))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--log", type=Path, nargs="*", default=[])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--model", type=Path, default=DEFAULT_GGUF)
    parser.add_argument("--clock", choices=("ns", "cpu_ns"), default="ns", help="cpu_ns: of the processor, one thread")
    parser.add_argument("--note", default="")
    options = parser.parse_args()
    logs = {path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in options.log}
    for name, lines in (logs or {"SmolLM2 on this CPU": recorded(options.steps, options.model)}).items():
        found = evaluate(lines, options.clock)
        show(name, found)
        line = {
            "bench": "cost",
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": f"{platform.machine()}, {platform.system()} {platform.release()}",
            "command": "./run bench cost " + " ".join(sys.argv[1:]),
            "note": options.note,
            "log": name,
            "clock": options.clock,
            **found,
        }
        with RESULTS.open("a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
