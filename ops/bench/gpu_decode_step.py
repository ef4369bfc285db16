"""A decode step of 32 sequences on one GPU as its graph is, under several rows of the tile tables, in one process.

    python3 -m ops.bench.gpu_decode_step [--shape llama8b] [--match SETTINGS] [--tokens 130] [--adapters N] [--rank 16]
        [--out FOLDER]

Each setting is a capture of its own; the graphs are replayed in turn, so that a drift of the clock meets all of them.
With N adapters each row has one, in turn, and the settings are of what they add.
A setting whose logits differ by a bit from those of the first ("tables") fails. FOLDER/gpu_decode_step.json has the
medians; FOLDER/layer_NAME.txt what each launch of a layer takes, and the gap before it.

What is predicted, and why: ops/bench/HISTORY.md, "A decode step".
"""

import argparse
import json
import re
import statistics
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.gpu.decode_graphs import Captured, DecodeGraphs, Kind
from engine.gpu.runner import CudaRunner
from engine.scheduler import StepPlan
from ops.bench.gpu.changes import other_rows
from ops.bench.gpu_engine_checks import Rows
from ops.bench.random_model import random_adapter, random_config, random_decoder

Setting = dict[str, dict[str, int] | list[dict[str, int]]]  # rows that take the place of the tables'
SEQUENCES = 32
ROUNDS, REPLAYS = 5, 40


def settings() -> dict[str, Setting]:
    found: dict[str, Setting] = {"tables": {}, **_later()}
    found |= {f"parts {parts}": _parts(parts, parts) for parts in (1, 2, 4)}
    return found | {"parts of down": _parts(1, 4), "parts of o": _parts(4, 1)}


def settings_with_adapters() -> dict[str, Setting]:
    found: dict[str, Setting] = {"tables": {}, **_later(), "rope apart": {"rope_low": {"fused": 0}}}
    for heads, warps in ((4, 2), (16, 4)):
        found[f"heads {heads} warps {warps}"] = {"qk_rope_kv": {"heads": heads, "num_warps": warps}}
    return found


def _later() -> dict[str, Setting]:
    """Launches that begin when the ones before them have ended: the bits are the same."""
    all_early = {"silu_mul": 1, "shrink": 1, "rope_low": 1, "attend": 1}
    return {"attention late": {"pdl": all_early | {"attend": 0}}, "all late": {"pdl": dict.fromkeys(all_early, 0)}}


def _parts(of_o: int, of_down: int) -> Setting:
    """Of Llama-3-8B's sizes; q, k, v and the rest stay whole."""
    rows = [{"up_to_size_out": 4096, "up_to_size_in": 4096, "parts": of_o}]
    return {"linear_parts": [*rows, {"up_to_size_out": 4096, "parts": of_down}, {"parts": 1}]}


class Step:
    """One decode step of a random model, to be captured under several settings and replayed."""

    def __init__(self, shape: str, num_tokens: int, num_adapters: int = 0, rank: int = 16) -> None:
        device, config = torch.device("cuda"), random_config(shape)
        sizes = EngineConfig(
            num_blocks=SEQUENCES * 64,
            context_tokens=1024,
            max_step_tokens=1024,
            max_running=SEQUENCES,
            adapter_slots=num_adapters,
            max_lora_rank=rank,
        )
        runner = CudaRunner(random_decoder(shape, device), sizes)
        graphs = runner._decodes
        assert graphs is not None, shape
        self.graphs: DecodeGraphs = graphs
        for slot in range(num_adapters):
            runner.load_slot(slot, runner.prepare(random_adapter(config, rank, slot, device)))
        self.kind = Kind(SEQUENCES, rank if num_adapters else 0, has_groups=False)
        rows = Rows(config, [num_tokens] * SEQUENCES)
        rows.use([row % num_adapters if num_adapters else -1 for row in range(SEQUENCES)])
        self.plan = self._decodes(rows)
        for keys, values in zip(runner.kv.keys, runner.kv.values, strict=True):  # zeros would be an easy softmax
            keys.normal_()
            values.normal_()

    def _decodes(self, rows: Rows) -> StepPlan:
        for choice in rows.choices:
            choice.num_computed_tokens = len(choice.token_ids) - 1
        return rows.plan()

    def capture(self, setting: Setting) -> Captured:
        with other_rows(setting):
            self.graphs._graphs[self.kind] = self.graphs._capture(self.kind)
        self.logits()  # its numbers are in place
        return self.graphs._graphs[self.kind]

    def logits(self) -> torch.Tensor:
        return self.graphs.replay(self.plan, {}).clone()


def replay_us(captured: Captured) -> list[float]:
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(REPLAYS)]
    for before, after in pairs:
        before.record()
        captured.graph.replay()
        after.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) * 1e3 for before, after in pairs]


def layer_launches(replay: Callable[[], None]) -> list[str]:
    """The launches from one layer's attention to the next one's: means over layers of µs and of the gap before."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        replay()
        torch.cuda.synchronize()
    events = [event for event in seen.events() or [] if "CUDA" in str(event.device_type)]
    ordered = sorted(events, key=lambda event: event.time_range.start)
    starts = [number for number, event in enumerate(ordered) if "_attend" in event.name]
    length = min(after - before for before, after in pairwise(starts))
    lines, whole = [], 0.0
    for offset in range(length):
        places = [start + offset for start in starts[1:-1]]
        group, before = [ordered[place] for place in places], [ordered[place - 1] for place in places]
        gaps = [now.time_range.start - last.time_range.end for now, last in zip(group, before, strict=True)]
        took, gap = statistics.mean(event.time_range.elapsed_us() for event in group), statistics.mean(gaps)
        whole += took + gap
        lines.append(f"{took:8.2f} us {gap:6.2f} before  {group[0].name[:90]}")
    return [*lines, f"{whole:8.2f} us a layer, {len(ordered)} launches a step"]


def measure(step: Step, chosen: dict[str, Setting], out: Path) -> dict[str, dict[str, float]]:
    graphs, wanted = {}, None
    for name, setting in chosen.items():
        graphs[name] = step.capture(setting)
        logits = step.logits()
        wanted = logits if wanted is None else wanted
        assert bool(logits.isfinite().all()), name
        if "pdl" not in setting:  # sums in another order
            far = float((logits.float() - wanted.float()).norm() / wanted.float().norm())
            print(f"{name}: logits differ by {far:.4f}", flush=True)
            assert far < 0.1, f"{name}: other logits"
        else:
            assert torch.equal(logits, wanted), f"{name}: other logits"
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, captured in graphs.items():
            times[name] += replay_us(captured)[5:]  # the first ones find another graph's weights in L2
    first = statistics.median(times[next(iter(times))])
    found = {}
    for name, captured in graphs.items():
        median = statistics.median(times[name])
        found[name] = {"us": median, "least_us": min(times[name]), "saved_us": first - median}
        print(f"{name:40} {median:9.1f} us  least {min(times[name]):9.1f}  saved {first - median:8.1f}", flush=True)
        lines = layer_launches(captured.graph.replay)
        (out / f"layer_{re.sub(r'[^a-z0-9]+', '_', name)}.txt").write_text("\n".join(lines) + "\n")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama8b")
    parser.add_argument("--match", default="", help="only the settings whose names this regular expression finds")
    parser.add_argument("--tokens", type=int, default=130, help="of each sequence's context")
    parser.add_argument("--out", type=Path, default=Path("build/gpu_decode_step"))
    parser.add_argument("--adapters", type=int, default=0)
    parser.add_argument("--rank", type=int, default=16, help="of each adapter: 16, 32, 64 …, as graphs are made for")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    known = settings_with_adapters() if options.adapters else settings()
    chosen = {name: row for name, row in known.items() if name == "tables" or re.search(options.match, name)}
    with torch.inference_mode():
        step = Step(options.shape, options.tokens, options.adapters, options.rank)
        found = measure(step, chosen, options.out)
    (options.out / "gpu_decode_step.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
