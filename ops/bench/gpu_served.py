"""The same workload as gpu_engine, through ``engine.client`` over the socket, with the journal and all accounts on.

    ./run bench gpu_served [--shape llama8b] [--device cuda] [--adapters 0,8,64] [--turns 3] [--rows 4k] [--out FOLDER]

The engine is a process of its own (this file with --serve), as ``python -m engine`` is, over random weights; its
adapters are in host memory from the start. The client is this process: 256 requests of 512 + 128 tokens at once, and
32 of 64 + 129 for the time per token (of 3,968 + 129 in the row 4k). Medians of ``--turns``, each kind of batch once
before without the clock; adapters differ in content, which the number of slots in use shows.
"""

import argparse
import asyncio
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from engine import wire
from engine.client import EngineClient
from ops.bench.peers import VLLM as PEER

READY_S = 240.0


async def ask(
    client: EngineClient, name: str, prompt_tokens: int, new_tokens: int, adapter: str
) -> tuple[float, float]:
    """One request to its end → seconds to its first and to its last token."""
    draw = random.Random(name)
    prompt = wire.pack_ids(draw.randrange(10, 900) for _ in range(prompt_tokens))
    sampling = wire.SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    begin, first, finished, num_tokens = time.perf_counter(), 0.0, False, 0
    flow = wire.Flow(f"flow {name}")
    stream = client.submit(
        wire.Submit(name, [prompt], sampling, flow, name.encode(), new_tokens, adapter_key=adapter, context=b"bench")
    )
    while not finished:
        for event in await stream.next():
            if isinstance(event, wire.Delta):
                first = first or time.perf_counter() - begin
                num_tokens += len(event.token_ids) // 4
            finished = finished or isinstance(event, wire.Finished | wire.Rejected)
    stream.close(wire.Close(name, 200))
    assert num_tokens == new_tokens, f"{num_tokens} tokens of {new_tokens}"
    return first, time.perf_counter() - begin


async def batch(client: EngineClient, label: str, num: int, sizes: tuple[int, int], adapters: int) -> dict[str, float]:
    names = [f"a{index}" for index in range(adapters)] or [""]
    begin = time.perf_counter()
    times = await asyncio.gather(
        *(ask(client, f"{label} {index}", *sizes, names[index % len(names)]) for index in range(num))
    )
    first = sorted(one for one, _ in times)
    return {"seconds": time.perf_counter() - begin, "ttft_p95_s": first[len(first) * 95 // 100]}


async def warm(client: EngineClient, num: int, sizes: tuple[int, int], adapters: int) -> int:
    """A batch that nobody times, so that none that is timed compiles a kernel → the most slots in use at once."""
    most, done = 0, asyncio.create_task(batch(client, f"warm {num} {sizes} {adapters}", num, sizes, adapters))
    while not done.done():
        await asyncio.wait([done], timeout=0.05)
        slots = next(each for each in await client.stats(10.0) if each.name == "tenora_adapter_slots")
        most = max(most, *(int(value) for _, labels, value in slots.samples if labels["state"] == "pinned"))
    await done
    assert most == min(num, adapters), f"{most} slots are in use, not {min(num, adapters)}: adapters of equal content?"
    return most


async def throughput(client: EngineClient, num: int, sizes: tuple[int, int], adapters: int, turns: int) -> dict:
    distinct = await warm(client, num, sizes, adapters)
    found = [await batch(client, f"many {adapters} {turn}", num, sizes, adapters) for turn in range(turns)]
    speeds = [num * sizes[1] / one["seconds"] for one in found]
    first_s = statistics.median(one["ttft_p95_s"] for one in found)
    return {"out_tok_s": statistics.median(speeds), "all_out_tok_s": speeds, "ttft_p95_s": first_s, "slots": distinct}


async def tpot(client: EngineClient, sizes: tuple[int, int], adapters: int, turns: int) -> dict:
    """(Time of all tokens − time of one) / (all − 1) of 32 sequences."""
    distinct = await warm(client, 32, sizes, adapters)
    each = []
    for turn in range(turns):
        whole = await batch(client, f"long {sizes} {adapters} {turn}", 32, sizes, adapters)
        one = await batch(client, f"short {sizes} {adapters} {turn}", 32, (sizes[0], 1), adapters)
        each.append((whole["seconds"] - one["seconds"]) / (sizes[1] - 1) * 1e3)
    return {"tpot_ms": statistics.median(each), "all_tpot_ms": each, "slots": distinct}


async def measure(socket: str, options: argparse.Namespace) -> dict:
    begin = time.perf_counter()
    client = EngineClient(socket, "bench")
    await client.start()
    await client.ready(READY_S)
    small, turns = options.small, options.turns
    num, many, short, long = (16, (32, 8), (64, 9), (128, 9)) if small else (256, (512, 128), (64, 129), (3968, 129))
    found: dict[str, object] = {"start_to_welcome_s": time.perf_counter() - begin}
    for count in options.counts:
        row = await throughput(client, num, many, count, turns) | await tpot(client, short, count, turns)
        if "4k" in options.rows:
            row |= {f"4k {name}": value for name, value in (await tpot(client, long, count, turns)).items()}
        found[f"{count} adapters"] = row
        print(f"served, {count} adapters: {json.dumps(row)}", flush=True)
    families = {family.name: family.samples for family in await client.stats(10.0)}
    found["gpu_seconds"] = {labels["account"]: value for _, labels, value in families["tenora_gpu_seconds"]}
    await client.close()
    summary(options.shape, {count: found[f"{count} adapters"] for count in options.counts})
    return found


def summary(shape: str, rows: dict[int, Any]) -> None:
    """Medians beside vLLM's figures, which are of another day: for ratios run both on one machine in one hour."""
    base = rows[0]["out_tok_s"] if 0 in rows else math.nan
    print(f"{shape:10} {'adapters':>8} {'slots':>6} {'tok/s':>7} {'/ base':>6} {'vLLM':>6} {'ratio':>6} ", end="")
    print(f"{'TTFT P95 s':>11} {'TPOT ms':>8} {'vLLM':>6} {'at 4k':>6}")
    for count, row in rows.items():
        speed, ms = PEER.get(shape, {}).get(count, (math.nan, math.nan))
        print(f"{shape:10} {count:8} {row['slots']:6} {row['out_tok_s']:7.0f} {row['out_tok_s'] / base:6.2f} ", end="")
        print(f"{speed:6.0f} {row['out_tok_s'] / speed:6.2f} {row['ttft_p95_s']:11.2f} {row['tpot_ms']:8.2f} ", end="")
        print(f"{ms:6.2f} {row.get('4k tpot_ms', math.nan):6.2f}")


async def serve(options: argparse.Namespace, folder: Path) -> None:
    import torch

    from engine.journal import Journal
    from engine.models.config import module_sizes
    from engine.serve.adapter_tiers import DiskTier
    from engine.serve.server import Identity, Server
    from ops.bench.loaded_engine import Bench

    bench = Bench(options.shape, torch.device(options.device), options.most_adapters, options.small)
    model, sizes = bench.decoder.config, bench.sizes
    card = wire.ModelCard(
        options.shape, "00" * 32, model.vocab_size, sizes.context_tokens, sizes.block_size, sizes.num_blocks,
        model.num_layers, module_sizes(model), sizes.max_lora_rank, sizes.adapter_slots, model.eos_token_ids,
        "bfloat16", options.device,
    )  # fmt: skip
    identity = Identity("bench", card, wire.TokenizerCard("{}", "", {}, False))
    server = Server(identity, bench.engine, Journal(folder), DiskTier(folder / "adapters"))
    await server.start(Path(options.serve))
    await asyncio.to_thread(sys.stdin.read)  # until the client is gone
    await server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--adapters", default="0,8,64")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rows", default="4k", help="4k, or nothing")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("build/gpu_engine"))
    parser.add_argument("--serve", default="", help="be the engine, at this socket")
    options = parser.parse_args()
    options.counts = [int(count) for count in options.adapters.split(",")]
    options.most_adapters = max(options.counts)
    with tempfile.TemporaryDirectory() as folder:
        if options.serve:
            sys.setswitchinterval(0.0005)
            asyncio.run(serve(options, Path(folder)))
            return
        socket = str(Path(folder) / "run" / "e.sock")
        command = [sys.executable, "-m", "ops.bench.gpu_served", *sys.argv[1:], "--serve", socket]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as engine:
            try:
                found = asyncio.run(measure(socket, options))
            finally:
                engine.stdin.close()  # type: ignore[union-attr]
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "gpu_served.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
