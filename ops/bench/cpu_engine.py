"""The engine on a CPU beside transformers' generate, and what exactness costs (performance.md §3, design.md §6).

    ./run bench cpu_engine [--threads 1,2] [--rounds 7] [--note TEXT]

SmolLM2-135M in fp32, prompts of 128 tokens, greedy; batches of 1 and 8, and 8 rows with four adapters. Each row is
measured in turn with its peers, round by round in one process; each number is a median. Times are CPU time of the
process, so that others on the machine disturb little; more than one thread spins while it waits, so look at the wall
time there, on a quiet machine.

ours: the Engine as it is served. fallback: the same, as on machines where the packed linears are not exact (rows
padded for F.linear). plain: F.linear without padding, whose bits depend on the batch: what exactness costs.
"""

import argparse
import json
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from unittest.mock import patch

import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.memory import keep_freed_memory
from engine.models.config import MODULES, module_sizes
from engine.models.decoder import Decoder
from engine.runner import Runner
from engine.weights import LoadedModel, load_model
from engine.weights.adapter import AdapterWeights, LoraPair
from engine.wire import Flow, SamplingParams, Submit, pack_ids, unpack_ids
from kernels.linear import onednn, reference
from ops.default_model import DEFAULT_GGUF

RESULTS = Path(__file__).with_name("results.jsonl")
PROMPT_TOKENS, DECODE_STEPS = 128, 16
ADAPTERS = {"a": (8, MODULES), "b": (8, MODULES), "c": (4, MODULES[:4]), "d": (16, MODULES)}
ROWS_OF = {"1": [""], "8": [""] * 8, "8, 4 adapters": list("abcdabcd")}

Timing = tuple[float, float]  # CPU and wall seconds


def timed(work: Callable[[], object]) -> Timing:
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    return time.process_time() - cpu, time.perf_counter() - wall


class Ours:
    """An Engine of its own; ``measure`` → timings of prefill and of a decode step, and the tokens."""

    def __init__(self, model: LoadedModel) -> None:
        config = EngineConfig(num_blocks=1024)
        self.engine = Engine(config, Runner(Decoder(model.config, model.weights), config))
        draw, sizes = torch.Generator().manual_seed(1), module_sizes(model.config)
        for key, (lora_rank, modules) in ADAPTERS.items():
            pairs = {
                (layer, module): LoraPair(
                    torch.randn(lora_rank, sizes[module][0], generator=draw) / 50,
                    torch.randn(sizes[module][1], lora_rank, generator=draw) / 50,
                    1.0,
                )
                for layer in range(model.config.num_layers)
                for module in modules
            }
            self.engine.adapter_ready(key, AdapterWeights(pairs, sum(p.a.nbytes + p.b.nbytes for p in pairs.values())))
        self.count = 0

    def measure(self, prompts: list[list[int]], adapters: list[str]) -> tuple[Timing, Timing, list[list[int]]]:
        sampling = SamplingParams(max_tokens=DECODE_STEPS + 2, temperature=0.0, ignore_eos=True)
        tokens: dict[str, list[int]] = {}
        for prompt, adapter in zip(prompts, adapters, strict=True):
            self.count += 1
            name = str(self.count)
            tokens[name] = []
            self.engine.add(
                Submit(name, [pack_ids(prompt)], sampling, Flow("f"), name.encode(), sampling.max_tokens, 1, adapter)
            )

        def step() -> None:
            for delta in self.engine.step().deltas:
                tokens[delta.request_id] += unpack_ids(delta.token_ids)

        def prefill() -> None:
            while not all(tokens.values()):
                step()

        first = timed(prefill)
        step()  # the one after it takes what is new to it
        decode = timed(lambda: [step() for _ in range(DECODE_STEPS - 1)])
        while self.engine.has_work:
            step()
        return first, (decode[0] / (DECODE_STEPS - 1), decode[1] / (DECODE_STEPS - 1)), list(tokens.values())


class Transformers:
    """``generate`` of the same weights; a decode step is the difference of a long and a short run."""

    def __init__(self, model: LoadedModel) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        config, attention = model.config, model.config.attention
        self.model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=config.vocab_size,
                hidden_size=config.hidden_size,
                intermediate_size=config.intermediate_size,
                num_hidden_layers=config.num_layers,
                num_attention_heads=attention.num_heads,
                num_key_value_heads=attention.num_kv_heads,
                rms_norm_eps=config.rms_norm_eps,
                rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
                tie_word_embeddings=config.tie_word_embeddings,
                max_position_embeddings=config.context_tokens,
            )
        ).eval()
        missing, unexpected = self.model.load_state_dict(model.weights, strict=False)
        assert not unexpected, unexpected
        assert set(missing) <= {"lm_head.weight"}, missing
        self.model.generation_config.eos_token_id = None

    @torch.inference_mode()
    def measure(self, prompts: list[list[int]], adapters: list[str]) -> tuple[Timing, Timing, list[list[int]]]:
        assert not any(adapters)
        ids = torch.tensor(prompts)
        out = ids

        def generate(count: int) -> None:
            nonlocal out
            out = self.model.generate(  # pyright: ignore[reportAttributeAccessIssue]
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
            )

        first = timed(lambda: generate(1))
        whole = timed(lambda: generate(1 + DECODE_STEPS))
        decode = tuple((long - short) / DECODE_STEPS for long, short in zip(whole, first, strict=True))
        return first, (decode[0], decode[1]), out[:, PROMPT_TOKENS:].tolist()


def peers(model: LoadedModel) -> dict[str, Ours | Transformers]:
    found: dict[str, Ours | Transformers] = {"ours": Ours(model)}
    with patch.object(onednn, "is_available", return_value=False):
        found["fallback"], found["plain"] = Ours(model), Ours(model)
    try:
        found["transformers"] = Transformers(model)
    except ImportError:
        print("transformers is not installed: nothing to compare with")
    return found


def agreement(left: list[list[int]], right: list[list[int]]) -> float:
    """The part of equal tokens up to each row's first difference, which a tie may cause."""
    same = total = 0
    for one, other in zip(left, right, strict=True):
        pairs = list(zip(one, other, strict=False))
        equal = next((index for index, (a, b) in enumerate(pairs) if a != b), len(pairs))
        same, total = same + equal, total + len(pairs)
    return same / total


def measure_rows(model: LoadedModel, rounds: int) -> list[dict]:
    engines, draw = peers(model), random.Random(5)
    rows = []
    for label, adapters in ROWS_OF.items():
        taken: dict[str, list[tuple[Timing, Timing]]] = {}
        agreed = []
        for _ in range(rounds + 1):
            prompts = [draw.choices(range(100, 40000), k=PROMPT_TOKENS) for _ in adapters]
            outputs = {}
            for name, engine in engines.items():
                if name == "transformers" and any(adapters):
                    continue
                unpadded = patch.object(reference, "padded_rows", lambda num_rows, weight: num_rows)
                with unpadded if name == "plain" else patch.object(reference, "padded_rows", reference.padded_rows):
                    *timings, outputs[name] = engine.measure(prompts, adapters)
                taken.setdefault(name, []).append((timings[0], timings[1]))
            agreed += [agreement(outputs["ours"], output) for output in outputs.values()]
        assert statistics.mean(agreed) > 0.9, f"the outputs differ: {agreed}"
        for name, timings in taken.items():
            rows.append(_row(label, len(adapters), name, timings[1:]))  # the first round warms up
    return rows


def _row(label: str, batch: int, name: str, timings: list[tuple[Timing, Timing]]) -> dict:
    prefill, decode = ([statistics.median(t[part][kind] for t in timings) for kind in (0, 1)] for part in (0, 1))
    return {
        "batch": label,
        "engine": name,
        "prefill_tokens_per_cpu_s": round(batch * PROMPT_TOKENS / prefill[0]),
        "decode_cpu_ms": round(decode[0] * 1e3, 1),
        "decode_wall_ms": round(decode[1] * 1e3, 1),
        "decode_tokens_per_cpu_s": round(batch / decode[0], 1),
        "decode_min_cpu_ms": round(min(t[1][0] for t in timings) * 1e3, 1),
    }


def show(num_threads: int, rows: list[dict]) -> None:
    print(f"\n{num_threads} thread{'s' if num_threads > 1 else ''}, fp32, CPU time; ratio: ours over the row's engine")
    print(f"{'batch':14} {'engine':13} {'prefill tok/s':>13} {'ratio':>6} {'decode ms':>10} {'min':>7} {'ratio':>6}")
    ours = {row["batch"]: row for row in rows if row["engine"] == "ours"}
    for row in rows:
        mine = ours[row["batch"]]
        prefill = mine["prefill_tokens_per_cpu_s"] / row["prefill_tokens_per_cpu_s"]
        decode = row["decode_cpu_ms"] / mine["decode_cpu_ms"]
        print(
            f"{row['batch']:14} {row['engine']:13} {row['prefill_tokens_per_cpu_s']:13} {prefill:6.2f} "
            f"{row['decode_cpu_ms']:10.1f} {row['decode_min_cpu_ms']:7.1f} {decode:6.2f}"
        )
    base, mixed, solo = ours["8"], ours["8, 4 adapters"], ours["1"]
    print(f"4 adapters / base, decode: {base['decode_cpu_ms'] / mixed['decode_cpu_ms']:.2f} (must 0.8)")
    print(f"8 decodes / 1: {base['decode_cpu_ms'] / solo['decode_cpu_ms']:.2f} steps (must ≤ 3)")


def record(num_threads: int, rows: list[dict], note: str) -> None:
    line = {
        "bench": "cpu_engine",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {platform.system()} {platform.release()}",
        "versions": {"python": platform.python_version(), "torch": torch.__version__, **_version("transformers")},
        "command": "./run bench cpu_engine " + " ".join(sys.argv[1:]),
        "note": note,
        "threads": num_threads,
        "rows": rows,
    }
    with RESULTS.open("a") as file:
        file.write(json.dumps(line) + "\n")


def _version(package: str) -> dict[str, str]:
    try:
        return {package: version(package)}
    except ImportError:
        return {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--note", default="")
    options = parser.parse_args()
    if "," in options.threads:  # how linears are packed is decided once a process
        for num_threads in options.threads.split(","):
            more = ["--rounds", str(options.rounds), "--note", options.note]
            subprocess.run([sys.executable, "-m", "ops.bench.cpu_engine", "--threads", num_threads, *more], check=True)
        return
    num_threads = int(options.threads)
    torch.set_num_threads(num_threads)
    keep_freed_memory()
    rows = measure_rows(load_model(DEFAULT_GGUF, torch.float32), options.rounds)
    show(num_threads, rows)
    record(num_threads, rows, options.note)


if __name__ == "__main__":
    main()
