"""The engine on one GPU against vLLM's figures (performance.md §1): random bf16 weights, no checkpoint.

    ./run bench gpu_engine [--shape llama8b,qwen06b] [--device cuda] [--sections NAME,…] [--seconds 480] [--out FOLDER]

256 requests of 512 + 128 tokens at once (output tokens a second), and the time per output token of 32 sequences
(64 prompt tokens, 128 new ones), with no adapter, 8 and 64 of rank 16 on all seven linears, each different in
content. The step loop of the Engine itself; every section is guarded, the results are one JSON file.
"""

import argparse
import json
import statistics
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import cast

import torch

from engine.gpu.runner import CudaRunner
from ops.bench.gpu_engine_checks import check_logits_are_those_of_the_reference, run_checks
from ops.bench.gpu_moe_checks import check_logits_with_experts_are_those_of_the_reference
from ops.bench.gpu_prefix import prefix_sections
from ops.bench.gpu_profile import host_times, prefill_profile, profile
from ops.bench.loaded_engine import RANK, Bench, adapters, check_slots
from ops.bench.peers import VLLM as PEER
from ops.bench.random_model import random_adapter, random_config


def throughput(bench: Bench, names: list[str], num: int, prompt_tokens: int, new_tokens: int) -> dict:
    """Once without the clock, so that every kernel of such steps is there; then with it."""
    bench.fill(num, prompt_tokens, 8, names)
    bench.drain()
    bench.fill(num, prompt_tokens, new_tokens, names)
    seconds = bench.drain()
    check_slots(bench, names, num)
    decode = statistics.median(bench.step_ms)
    by_kind = dict(bench.kind_s)
    return {"seconds": seconds, "out_tok_s": num * new_tokens / seconds, "steps": len(bench.step_ms),
            "ttft_p95_s": bench.first_s[len(bench.first_s) * 95 // 100], "seconds_by_kind": by_kind,
            "median_step_ms": decode}  # fmt: skip


def tpot(bench: Bench, names: list[str], rounds: int, prompt_tokens: int = 64, new_tokens: int = 129) -> dict:
    """vLLM's way: (time of 129 tokens − time of 1) / 128 with 32 sequences, median after a warm-up."""
    bench.fill(32, prompt_tokens, new_tokens, names)
    bench.drain()
    found, decode = [], [0.0]
    for _ in range(rounds):
        bench.fill(32, prompt_tokens, new_tokens, names)
        whole = bench.drain()
        check_slots(bench, names, 32)
        decode = sorted(bench.step_ms)
        bench.fill(32, prompt_tokens, 1, names)
        found.append((whole - bench.drain()) / (new_tokens - 1) * 1e3)
    return {
        "tpot_ms": statistics.median(found), "all": found, "step_ms": statistics.median(decode),
        "step_p90_ms": decode[len(decode) * 9 // 10],
    }  # fmt: skip


def by_hand(bench: Bench, names: list[str]) -> dict:
    """Decode steps of 32 without graphs: what a step costs that no graph holds."""
    runner = cast(CudaRunner, bench.runner)
    graphs, runner._decodes = runner._decodes, None
    try:
        result = tpot(bench, names, 1, new_tokens=33)
        host_times(bench, names)
    finally:
        runner._decodes = graphs
    return result


def flatness(bench: Bench) -> dict:
    """ms per token of 32 sequences by how they spread over adapters: over 8 evenly and unevenly (equal bytes), and one,
    Zipf's over 32, all distinct (as many bytes as are in use)."""
    spreads = {
        "8 evenly": [index % 8 for index in range(32)],
        "8 unevenly": [0] * 14 + [1] * 6 + [2] * 4 + [3] * 3 + [4] * 2 + [5, 6, 7],
        "identical": [0] * 32,
        "zipf": sorted(min(31, int(32 ** (index / 31)) - 1) for index in range(32)),
        "distinct": list(range(32)),
    }
    found = {}
    for name, indices in spreads.items():
        result = tpot(bench, [f"a{index}" for index in indices], 3, new_tokens=65)
        found[name] = {"distinct": len(set(indices)), "step_ms": result["step_ms"]}
    return found


def unused_lora(bench: Bench) -> dict:
    """ms a step of 32 base sequences, in turn: an engine without slots, and this one with slots that nobody uses."""
    bare = Bench(bench.shape, bench.device, 0, bench.small, bench.decoder)
    pairs = [(tpot(one, [""], 1, new_tokens=65)["step_ms"], tpot(two, [""], 1, new_tokens=65)["step_ms"])
             for one, two in [(bare, bench)] * 7]  # fmt: skip
    without, unused = (statistics.median(column) for column in zip(*pairs, strict=True))
    return {"without_ms": without, "unused_ms": unused, "cost": unused / without - 1}


def deterministic(bench: Bench, rounds: int, workload: tuple[int, int, int]) -> dict:
    """What one shape for every step costs: this engine, and one over the same weights that is deterministic."""
    num_adapters = bench.sizes.adapter_slots
    one = Bench(bench.shape, bench.device, num_adapters, bench.small, bench.decoder, deterministic=True)
    found: dict[str, object] = {"tokens a step": one.sizes.max_step_tokens}
    for num in (0, num_adapters):
        names = adapters(num)
        times = [tpot(each, names, rounds)["tpot_ms"] for each in (bench, one)]
        rates = [throughput(each, names, *workload)["out_tok_s"] for each in (bench, one)]
        found[f"{num} adapters"] = {"tpot_ms": times, "tpot": times[1] / times[0], "out_tok_s": rates,
                                    "out": rates[1] / rates[0]}  # fmt: skip
    return found


def hot_load(bench: Bench) -> dict:
    """Milliseconds of an adapter into a slot; and the steps of 32 base decodes while 8 adapters arrive and load."""
    weights = random_adapter(bench.decoder.config, RANK, 900, bench.device)
    begin = time.perf_counter()
    packed = bench.runner.prepare(weights)
    pack_ms = (time.perf_counter() - begin) * 1e3
    times, host = [], []
    for _ in range(6):
        bench.sync()
        begin = time.perf_counter()
        bench.runner.load_slot(0, packed)
        host.append((time.perf_counter() - begin) * 1e3)
        bench.sync()
        times.append((time.perf_counter() - begin) * 1e3)
    bench.runner.clear_slot(0)
    bench.fill(32, 64, 300, [""])
    loads: list[float] = []
    steps: list[float] = []
    last = time.perf_counter()
    while bench.engine.has_work:
        number = len(steps)
        if number in range(60, 220, 20):
            before = time.perf_counter()
            bench.runner.load_slot((number // 20) % bench.sizes.adapter_slots, packed)
            loads.append((time.perf_counter() - before) * 1e3)
        bench.engine.step()
        now = time.perf_counter()
        steps.append((now - last) * 1e3)
        last = now
    during = [steps[number + shift] for number in range(60, 220, 20) for shift in range(3)]
    return {"bytes": packed.num_bytes, "pack_ms": pack_ms, "slot_ms": times, "host_ms": host, "loads_ms": loads,
            "median_step_ms": statistics.median(steps[30:290]), "worst_step_beside_load_ms": max(during),
            "worst_step_ms": max(steps[30:290])}  # fmt: skip


class Report:
    """Runs sections until the time is over; a section that fails is told and costs nothing else."""

    def __init__(self, out: Path, seconds: float, rounds: int) -> None:
        self.out, self.deadline, self.rounds = out, time.monotonic() + seconds, rounds
        self.results: dict[str, object] = {}

    def section(self, name: str, run: Callable[[], object]) -> None:
        if time.monotonic() > self.deadline:
            self.results[name] = "no time left"
            return
        begin = time.monotonic()
        try:
            self.results[name] = run()
        except Exception:
            self.results[name] = traceback.format_exc()[-1500:]
        print(f"[{time.monotonic() - begin:6.1f} s] {name}: {json.dumps(self.results[name])[:1500]}", flush=True)
        (self.out / "gpu_engine.json").write_text(json.dumps(self.results, indent=1))


def measure_shape(report: Report, shape: str, device: torch.device, sections: set[str], small: bool) -> None:
    num_adapters = 4 if small else 64
    holder: list[Bench] = []

    def build() -> dict:
        holder.append(Bench(shape, device, num_adapters, small))
        holder[0].fill(1, 64, 1, [""])
        holder[0].drain()
        since_start = time.time() - Path("/proc/self").stat().st_ctime
        return {"loaded_s": holder[0].loaded_s, "built_s": holder[0].built_s, "first_token_s": since_start,
                "gpu_bytes": memory(device)}  # fmt: skip

    report.section(f"{shape} build", build)
    if not holder:
        return
    bench = holder[0]
    counts, rounds = ((0, 2, 4), 1) if small else ((0, 8, 64), report.rounds)
    workload = (16, 32, 8) if small else (256, 512, 128)
    for num in counts:
        names = adapters(num)
        if "tpot" in sections:
            report.section(f"{shape} tpot {num}", lambda names=names: tpot(bench, names, rounds))
        if "profile" in sections:
            report.section(f"{shape} profile {num}", partial(profile, bench, names, report.out, str(num)))
        if "host" in sections:
            report.section(f"{shape} host {num}", lambda names=names: host_times(bench, names))
        if "throughput" in sections:
            report.section(f"{shape} throughput {num}", lambda names=names: throughput(bench, names, *workload))
        if "prefill" in sections:
            run = partial(prefill_profile, bench, names, report.out, str(num), *workload[:2])
            report.section(f"{shape} prefill {num}", run)
        if "by_hand" in sections and num != counts[1]:
            report.section(f"{shape} by hand {num}", lambda names=names: by_hand(bench, names))
    if "long" in sections:
        report.section(f"{shape} 4k 0", lambda: tpot(bench, [""], 1, prompt_tokens=3968))
        report.section(f"{shape} 4k 64", lambda: tpot(bench, adapters(counts[2]), 1, prompt_tokens=3968))
    if "flat" in sections:
        report.section(f"{shape} flatness", lambda: flatness(bench))
    if "unused" in sections:
        report.section(f"{shape} unused adapters", lambda: unused_lora(bench))
    if "prefix" in sections:
        prefix_sections(report.section, shape, bench)
    if "deterministic" in sections:
        report.section(f"{shape} deterministic", lambda: deterministic(bench, rounds, workload))
    if "load" in sections:
        report.section(f"{shape} hot load", lambda: hot_load(bench))
    summary(report.results, shape, counts)


def summary(results: dict[str, object], shape: str, counts: tuple[int, ...]) -> None:
    print(f"{shape:10} {'adapters':>8} {'tok/s':>8} {'peer':>8} {'ratio':>6} {'tpot':>7} {'peer':>7}")
    for num in counts:
        peer = PEER.get(shape, {}).get(num, (0, 0.0))
        out, each = results.get(f"{shape} throughput {num}"), results.get(f"{shape} tpot {num}")
        speed = out["out_tok_s"] if isinstance(out, dict) else 0.0
        ms = each["tpot_ms"] if isinstance(each, dict) else 0.0
        ratio = speed / peer[0] if peer[0] else 0.0
        print(f"{shape:10} {num:8} {speed:8.0f} {peer[0]:8} {ratio:6.2f} {ms:7.2f} {peer[1]:7.2f}")


def memory(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama8b,qwen06b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sections", default="teacher,tpot,throughput,profile,by_hand,load,flat,unused,long,prefix")
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="few and short requests: a dry run")
    parser.add_argument("--out", type=Path, default=Path("build/gpu_engine"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    report = Report(options.out, options.seconds, options.rounds)
    if "checks" in options.sections:
        report.section("checks", run_checks)
    if "teacher" in options.sections:
        for shape in options.shape.split(","):
            against = check_logits_are_those_of_the_reference
            if random_config(shape).moe is not None:
                against = check_logits_with_experts_are_those_of_the_reference
            check = partial(against, shape, 12)
            report.section(f"{shape} eight rows against fp32", check)
            torch.cuda.empty_cache()
    for shape in options.shape.split(","):
        measure_shape(report, shape, torch.device(options.device), set(options.sections.split(",")), options.small)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
