"""A log of an engine's steps, one JSON line each: what it computed, chunk by chunk, and the ns that it took (on a CPU
also those of the processor, for machines with others on them).

    ./run bench record_steps [--shape smollm|llama8b|qwen06b|tiny] [--device cpu|cuda] [--steps 600] [--warm-up 100]
        [--model SOURCE] [--out FILE]

Prompts and answers of very different lengths, a third without an adapter and the others with one of eight of rank 4, 8
or 16, as many at a time as a random walk says: so that what a step costs can be told apart. A step's time is the
device's own, from event to event in its stream, so that what the host does meanwhile is no part of it; requests are
made before the first step, and the first steps, in which kernels are compiled, are left out. ``./run bench cost``
reads it.
"""

import argparse
import json
import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import msgspec
import numpy as np
import torch

from engine.flight import StepHandle
from engine.scheduler import StepPlan
from engine.weights import load_model
from engine.wire import Flow, SamplingParams, Submit, pack_ids
from ops.bench.loaded_engine import Bench
from ops.bench.random_model import random_adapter
from ops.default_model import DEFAULT_GGUF

NUM_ADAPTERS = 8
NUM_PREPARED = 512  # requests, given again and again under new names and in new namespaces
WALK_STEPS = 24  # so long the number of requests at a time stays

Line: TypeAlias = dict[str, Any]


class Event(Protocol):
    """A place in a device's stream, as torch.cuda.Event has it; ``elapsed_time`` to a later one in ms."""

    def record(self) -> None: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, end_event: Any, /) -> float: ...


class HostEvent:
    """Of a device that computes in the host's own time."""

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self._clock = clock

    def record(self) -> None:
        self.ns = self._clock()

    def synchronize(self) -> None:
        """It has come so far."""

    def elapsed_time(self, end_event: "HostEvent", /) -> float:
        return (end_event.ns - self.ns) / 1e6


@dataclass(frozen=True, slots=True)
class Launched:
    line: Line
    began: Event
    ended: Event
    handle: StepHandle
    uses: torch.Tensor | None  # [chunks, experts] bool


class Recorder:
    """Stands before a runner and writes down what is launched; ``landed`` gives the line of the oldest step that has
    not been asked for, whose results are there."""

    def __init__(self, runner: Any, event: Callable[[], Event] = HostEvent) -> None:
        self._runner, self._event = runner, event
        self._mib: dict[int, float] = {-1: 0.0}
        self._launched: deque[Launched] = deque()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def load_slot(self, slot: int, weights: Any) -> None:
        self._runner.load_slot(slot, weights)
        self._mib[slot] = weights.num_bytes / (1 << 20)

    def launch(self, plan: StepPlan) -> StepHandle:
        slots = [chunk.sequence.adapter_slot for chunk in plan.chunks]
        line: Line = {
            "starts": [chunk.start for chunk in plan.chunks],
            "tokens": [chunk.num_tokens for chunk in plan.chunks],
            "slots": slots,
            "mib": [round(self._mib[slot], 4) for slot in slots],
        }
        began, ended = self._event(), self._event()
        began.record()
        began_ns = time.process_time_ns()
        handle = self._runner.launch(plan)
        ended.record()
        if not self._runner.overlaps:  # it has computed
            line["cpu_ns"] = time.process_time_ns() - began_ns
        uses = None if self._runner.expert_load is None else self._expert_uses(line["tokens"])
        self._launched.append(Launched(line, began, ended, handle, uses))
        return handle

    def landed(self) -> Line:
        step = self._launched.popleft()
        step.ended.synchronize()
        found = {"ns": round(step.began.elapsed_time(step.ended) * 1e6), **step.line}
        experts = step.handle.expert_parts()
        if experts is not None and step.uses is not None:
            alone = step.uses & (step.uses.sum(0) == 1)
            found |= {"experts": experts.round(6).tolist(), "experts_alone": alone.sum(1).tolist()}
        return found

    def _expert_uses(self, tokens: list[int]) -> torch.Tensor:
        decoder = self._runner._model
        owners = torch.from_numpy(np.repeat(np.arange(len(tokens)), tokens)).to(decoder.embedding.device)
        return decoder.expert_uses(owners, len(tokens))


def make_bench(shape: str, device: torch.device, source: Path | str) -> Bench:
    if shape == "smollm":
        from engine.models.decoder import Decoder

        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        loaded = load_model(source, dtype)
        decoder = Decoder(loaded.config, {name: tensor.to(device) for name, tensor in loaded.weights.items()})
        return Bench(shape, device, NUM_ADAPTERS, device.type == "cpu", decoder)
    return Bench(shape, device, NUM_ADAPTERS, device.type == "cpu")


def prepared(draw: random.Random, vocab_size: int, longest: int) -> list[Submit]:
    """Requests whose prompts are there already."""
    submits = []
    for _ in range(NUM_PREPARED):
        adapter = f"a{min(NUM_ADAPTERS - 1, int(draw.expovariate(0.4)))}" if draw.random() < 0.67 else ""
        length, max_tokens = round(math.exp(draw.uniform(math.log(8), math.log(longest)))), draw.randint(4, 64)
        prompt = pack_ids(draw.choices(range(10, vocab_size - 10), k=length))
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        submits.append(Submit("", [prompt], sampling, Flow("f"), b"", max_tokens, adapter_key=adapter))
    return submits


def record(bench: Bench, num_steps: int, num_warm_up: int = 0, seed: int = 1) -> Iterator[Line]:
    """Runs that many steps; each line when its step has landed, but for those of the warm-up."""
    on_gpu, draw = bench.device.type == "cuda", random.Random(seed)
    recorder = Recorder(bench.runner, partial(torch.cuda.Event, enable_timing=True) if on_gpu else HostEvent)
    for number, lora_rank in enumerate((4, 8, 16) * 2):
        weights = random_adapter(bench.decoder.config, lora_rank, 100 + number, bench.device)
        bench.engine.adapter_ready(f"a{number}", bench.runner.prepare(weights))
    bench.engine._runner = recorder  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    longest, most = (3_000, 128) if on_gpu else (400, 16)
    submits = prepared(draw, bench.decoder.config.vocab_size, longest)
    lines = walk(bench, recorder, submits, draw, most)
    for number in range(num_warm_up + num_steps):
        line = next(lines)
        if number >= num_warm_up:
            yield line


def walk(bench: Bench, recorder: Recorder, submits: Sequence[Submit], draw: random.Random, most: int) -> Iterator[Line]:
    """Steps for ever, up to ``most`` requests at a time; each line when its step has landed."""
    num_landed, num_added, wanted, running, given = 0, 0, 1, 0, cycle(submits)
    while True:
        if num_landed % WALK_STEPS == 0:
            wanted = round(math.exp(draw.uniform(0, math.log(most))))
        while running < wanted:
            name = f"w{num_added}"
            bench.engine.add(msgspec.structs.replace(next(given), request_id=name, cache_namespace=name.encode()))
            num_added, running = num_added + 1, running + 1
        result = bench.engine.step()
        running -= len(result.finished)
        if result.stats.num_sequences:
            num_landed += 1
            yield recorder.landed()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="smollm")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--warm-up", type=int, default=100)
    parser.add_argument("--model", default=str(DEFAULT_GGUF), help="of shape smollm: as ./run serve takes a SOURCE")
    parser.add_argument("--out", type=Path, default=Path("steps.jsonl"))
    options = parser.parse_args()
    if options.device == "cpu":
        torch.set_num_threads(1)
    bench = make_bench(options.shape, torch.device(options.device), options.model)
    with options.out.open("w") as file:
        for line in record(bench, options.steps, options.warm_up):
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
    print(f"{options.steps} steps of {options.shape} on {options.device} in {options.out}")


if __name__ == "__main__":
    main()
