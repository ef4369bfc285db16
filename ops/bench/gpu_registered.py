"""What registered adapters cost: 5 against 2,000 of them, rank 8 on q, k, v and o (performance.md §1: at most 6 %).

    ./run bench gpu_registered [--shape llama8b] [--device cuda] [--registered 5,2000] [--slots 64,256] [--loads 4,8]
        [--turns 2] [--out FOLDER]

256 requests of 512 + 128 tokens at once, spread evenly over all registered adapters, and over 32 of them only: what
2,000 cost that nobody asks for. All lie in pinned host memory, 13.6 MB each (27 GB), different in content; with more
adapters in use than slots, requests wait for a slot and most need a load, told beside the tokens a second. ``--loads``:
how many an engine begins in one step; the first of them is also that of all other rows.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from engine import adapter_pool
from engine.models.lora_transfer import PackedAdapter
from ops.bench.loaded_engine import Bench, check_slots
from ops.bench.random_model import random_adapter, random_decoder

RANK = 8
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")
IN_USE = 32


def turned(prepared: PackedAdapter, number: int) -> PackedAdapter:
    """The same numbers, moved on by so many places: cheap to make, and other content."""
    flat = torch.empty_like(prepared.flat, pin_memory=prepared.flat.is_pinned())
    return PackedAdapter(prepared.ranks, flat.copy_(prepared.flat.roll(number)))


def measure(bench: Bench, names: Sequence[str], turns: int) -> dict[str, Any]:
    """Medians; a batch of the same kind before. Each batch asks for the next adapters in turn."""
    num, prompt_tokens, new_tokens = (16, 32, 8) if bench.small else (256, 512, 128)
    found = []
    for turn in range(turns + 1):
        asked = [names[(turn * num + index) % len(names)] for index in range(num)]
        bench.fill(num, prompt_tokens, new_tokens, asked)
        seconds = bench.drain()
        if len(names) <= bench.sizes.adapter_slots:
            check_slots(bench, asked, num)
        ttft_s = bench.first_s[len(bench.first_s) * 95 // 100]
        found.append((num * new_tokens / seconds, bench.num_loads, ttft_s, statistics.median(bench.step_ms)))
    speeds, loads, ttft_s, step_ms = (list(column) for column in zip(*found[1:], strict=True))
    return {
        "out_tok_s": statistics.median(speeds), "all_out_tok_s": speeds, "slot_loads": loads,
        "slots": bench.most_slots, "ttft_p95_s": statistics.median(ttft_s), "step_ms": statistics.median(step_ms),
    }  # fmt: skip


def rows(bench: Bench, adapters: Sequence[PackedAdapter], options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """By name: so many registered, so many of them asked for."""
    found: dict[str, dict[str, Any]] = {}
    known = 0
    for num in options.registered:
        for number in range(known, num):
            bench.engine.adapter_ready(f"r{number}", adapters[number])
        known = num
        names = [f"r{number}" for number in range(num)]
        for loads in options.loads if num > bench.sizes.adapter_slots else options.loads[:1]:
            adapter_pool.MAX_LOADS_PER_STEP = loads
            found[f"{num} registered, all asked for, {loads} a step"] = measure(bench, names, options.turns)
        adapter_pool.MAX_LOADS_PER_STEP = options.loads[0]
        if num > IN_USE:
            few = names[:: num // IN_USE][:IN_USE]
            found[f"{num} registered, {IN_USE} asked for"] = measure(bench, few, options.turns)
    return found


def show(slots: int, found: dict[str, dict[str, Any]]) -> None:
    first = next(iter(found.values()))["out_tok_s"]
    print(
        f"{slots} slots: {'':34} {'tok/s':>7} {'lost':>6} {'slots':>6} {'loads':>6} {'step ms':>8} {'TTFT P95 s':>11}"
    )
    for name, row in found.items():
        lost, loads = 1 - row["out_tok_s"] / first, statistics.median(row["slot_loads"])
        print(f"{name:44} {row['out_tok_s']:7.0f} {lost:6.1%} {row['slots']:6} {loads:6.0f} ", end="")
        print(f"{row['step_ms']:8.2f} {row['ttft_p95_s']:11.2f}", flush=True)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--registered", type=numbers, default=[5, 2000])
    parser.add_argument("--slots", type=numbers, default=[64, 256])
    parser.add_argument("--loads", type=numbers, default=[4, 8])
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--small", action="store_true", help="few and short requests: a dry run")
    parser.add_argument("--out", type=Path, default=Path("build/gpu_engine"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    device = torch.device(options.device)
    decoder = random_decoder(options.shape, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    adapters: list[PackedAdapter] = []
    results: dict[int, Any] = {}
    for slots in options.slots:
        sizes = {"adapter_slots": slots, "max_lora_rank": RANK}
        bench = Bench(options.shape, device, 0, options.small, decoder, **sizes)
        if not adapters:
            packed = bench.runner.prepare(random_adapter(decoder.config, RANK, 1, device, MODULES))
            assert isinstance(packed, PackedAdapter), "a GPU's way of adapters is what is measured"
            adapters = [turned(packed, number) for number in range(max(options.registered))]
            print(f"{len(adapters)} adapters of {packed.num_bytes / 1e6:.1f} MB", flush=True)
        results[slots] = rows(bench, adapters, options)
        show(slots, results[slots])
        (options.out / "gpu_registered.json").write_text(json.dumps(results, indent=1))
        del bench


if __name__ == "__main__":
    main()
