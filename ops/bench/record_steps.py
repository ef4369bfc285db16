"""A log of an engine's steps, one JSON line each: what it computed, chunk by chunk, and the ns that it took (on a CPU
also those of the processor, for machines with others on them).

    ./run bench record_steps [--shape smollm|llama8b|qwen06b|tiny] [--device cpu|cuda] [--steps 600] [--out FILE]

Prompts and answers of very different lengths, a third without an adapter and the others with one of eight of rank 4, 8
or 16, as many at a time as a random walk says: so that what a step costs can be told apart. ``./run bench cost`` reads
it.
"""

import argparse
import json
import math
import random
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from engine.scheduler import StepPlan
from engine.weights import load_model
from ops.bench.gpu_engine import Bench
from ops.bench.random_model import random_adapter
from ops.default_model import DEFAULT_GGUF

NUM_ADAPTERS = 8
WALK_STEPS = 24  # so long the number of requests at a time stays

Line = dict[str, Any]


class Recorder:
    """Stands before a runner and writes down what is launched."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._mib: dict[int, float] = {-1: 0.0}
        self.launched: deque[Line] = deque()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def load_slot(self, slot: int, weights: Any) -> None:
        self._runner.load_slot(slot, weights)
        self._mib[slot] = weights.num_bytes / (1 << 20)

    def launch(self, plan: StepPlan) -> Any:
        slots = [chunk.sequence.adapter_slot for chunk in plan.chunks]
        self.launched.append(
            {
                "starts": [chunk.start for chunk in plan.chunks],
                "tokens": [chunk.num_tokens for chunk in plan.chunks],
                "slots": slots,
                "mib": [round(self._mib[slot], 4) for slot in slots],
            }
        )
        began_ns = time.process_time_ns()
        handle = self._runner.launch(plan)
        if not self._runner.overlaps:  # it has computed
            self.launched[-1]["cpu_ns"] = time.process_time_ns() - began_ns
        return handle


def make_bench(shape: str, device: torch.device, model: Path) -> Bench:
    if shape == "smollm":
        from engine.models.decoder import Decoder

        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        loaded = load_model(model, dtype)
        decoder = Decoder(loaded.config, {name: tensor.to(device) for name, tensor in loaded.weights.items()})
        return Bench(shape, device, NUM_ADAPTERS, device.type == "cpu", decoder)
    return Bench(shape, device, NUM_ADAPTERS, device.type == "cpu")


def record(bench: Bench, num_steps: int, seed: int = 1) -> Iterator[Line]:
    """Runs that many steps; each line when its step has landed."""
    draw, recorder = random.Random(seed), Recorder(bench.runner)
    for number, lora_rank in enumerate((4, 8, 16) * 2):
        weights = random_adapter(bench.decoder.config, lora_rank, 100 + number, bench.device)
        bench.engine.adapter_ready(f"a{number}", bench.runner.prepare(weights))
    bench.engine._runner = recorder  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    on_gpu = bench.device.type == "cuda"
    longest, most = (3_000, 128) if on_gpu else (400, 16)
    num_landed, wanted, running = 0, 1, 0
    while num_landed < num_steps:
        if num_landed % WALK_STEPS == 0:
            wanted = round(math.exp(draw.uniform(0, math.log(most))))
        while running < wanted:
            adapter = f"a{min(NUM_ADAPTERS - 1, int(draw.expovariate(0.4)))}" if draw.random() < 0.67 else ""
            prompt = round(math.exp(draw.uniform(math.log(8), math.log(longest))))
            bench.add(prompt, draw.randint(4, 64), adapter)
            running += 1
        result = bench.engine.step()
        running -= len(result.finished)
        if result.stats.num_sequences:
            num_landed += 1
            yield {"ns": result.stats.run_ns, **recorder.launched.popleft()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="smollm")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--model", type=Path, default=DEFAULT_GGUF, help="of shape smollm: a .gguf file")
    parser.add_argument("--out", type=Path, default=Path("steps.jsonl"))
    options = parser.parse_args()
    if options.device == "cpu":
        torch.set_num_threads(1)
    bench = make_bench(options.shape, torch.device(options.device), options.model)
    with options.out.open("w") as file:
        for line in record(bench, options.steps):
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
    print(f"{options.steps} steps of {options.shape} on {options.device} in {options.out}")


if __name__ == "__main__":
    main()
