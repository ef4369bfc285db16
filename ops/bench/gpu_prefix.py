"""Decodes that share a system prompt: the engine's step time with their beginning read together, and by each."""

import random
import statistics
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import cast

from engine.gpu.runner import CudaRunner
from engine.wire import Flow, SamplingParams, Submit, pack_ids
from ops.bench.gpu_prefix_checks import group_whatever_it_spares, without_groups
from ops.bench.loaded_engine import Bench

# sequences, shared tokens, new tokens: the first is the case to reach, the others tell from where on groups pay
CASES = ((64, 4096, 128), (16, 4096, 48), (64, 512, 48), (16, 1024, 48), (8, 2048, 48), (8, 4096, 48), (192, 1024, 48))


def prefix_sections(section: Callable[[str, Callable[[], object]], None], shape: str, bench: Bench) -> None:
    for num, shared, new in ((8, 512, 8),) if bench.small else CASES:
        section(f"{shape} shared prefix {num} x {shared}", partial(shared_prefix, bench, num, shared, new))


def shared_prefix(bench: Bench, num: int, shared_tokens: int, new_tokens: int) -> dict:
    """ms a decode step of sequences with one system prompt and 64 tokens of their own, their beginning read together
    and by each, in turn; together even where the engine would not, since it does not pay."""
    runner = cast(CudaRunner, bench.runner)
    group_whatever_it_spares(runner)
    draw = random.Random(shared_tokens)
    beginning = [draw.randrange(10, 1000) for _ in range(shared_tokens)]
    _add(bench, [*beginning, 1], 1)
    bench.drain()
    times: dict[str, list[float]] = {"grouped_ms": [], "plain_ms": []}
    before = runner.device_counters.num_grouped
    for way in ["grouped_ms", "plain_ms"] * 4:
        for _ in range(num):
            _add(bench, [*beginning, *(draw.randrange(10, 1000) for _ in range(64))], new_tokens)
        with without_groups(runner) if way == "plain_ms" else nullcontext():
            bench.drain()
        times[way].append(statistics.median(bench.step_ms))
    grouped, plain = (statistics.median(times[way][1:]) for way in times)  # the first of each makes kernels
    return {"grouped_ms": grouped, "plain_ms": plain, "ratio": plain / grouped, "all": times,
            "decodes_in_groups": runner.device_counters.num_grouped - before}  # fmt: skip


def _add(bench: Bench, prompt: list[int], new_tokens: int) -> None:
    """All of them in one namespace."""
    params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    bench.engine.add(Submit(f"p{bench.number}", [pack_ids(prompt)], params, Flow("f"), b"shared", new_tokens))
    bench.number += 1
