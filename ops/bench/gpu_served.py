"""The same workload as gpu_engine, through ``engine.client`` over the socket, with the journal and all accounts on.

    ./run bench gpu_served [--shape llama8b] [--device cuda] [--adapters 0,8,64] [--out FOLDER]

The engine is a process of its own (this file with --serve), as ``python -m engine`` is, over random weights; its
adapters are in host memory from the start. The client is this process: 256 requests of 512 + 128 tokens at once, and
32 of 64 + 129 for the time per token.
"""

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from engine import wire
from engine.client import EngineClient

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


async def batch(client: EngineClient, label: str, num: int, sizes: tuple[int, int], adapters: int) -> dict:
    names = [f"a{index}" for index in range(adapters)] or [""]
    begin = time.perf_counter()
    times = await asyncio.gather(
        *(ask(client, f"{label} {index}", *sizes, names[index % len(names)]) for index in range(num))
    )
    first = sorted(one for one, _ in times)
    return {"seconds": time.perf_counter() - begin, "ttft_p95_s": first[len(first) * 95 // 100]}


async def measure(socket: str, counts: list[int], small: bool) -> dict:
    begin = time.perf_counter()
    client = EngineClient(socket, "bench")
    await client.start()
    await client.ready(READY_S)
    num, sizes = (16, (32, 8)) if small else (256, (512, 128))
    found: dict[str, object] = {"start_to_welcome_s": time.perf_counter() - begin}
    for count in counts:
        await batch(client, f"warm {count}", num, (sizes[0], 4), count)
        wholes = [await batch(client, f"many {count} {turn}", num, sizes, count) for turn in range(4)][1:]
        whole = sorted(wholes, key=lambda one: one["seconds"])[1]
        each = []
        for turn in range(4):
            long = await batch(client, f"long {count} {turn}", 32, (64, 9 if small else 129), count)
            short = await batch(client, f"short {count} {turn}", 32, (64, 1), count)
            each.append((long["seconds"] - short["seconds"]) / (8 if small else 128) * 1e3)
        found[f"{count} adapters"] = {
            "out_tok_s": num * sizes[1] / whole["seconds"],
            "all_out_tok_s": [num * sizes[1] / one["seconds"] for one in wholes],
            "ttft_p95_s": whole["ttft_p95_s"],
            "tpot_ms": statistics.median(each[1:]),
        }
        print(f"served, {count} adapters: {json.dumps(found[f'{count} adapters'])}", flush=True)
    families = {family.name: family.samples for family in await client.stats(10.0)}
    found["gpu_seconds"] = {labels["account"]: value for _, labels, value in families["tenora_gpu_seconds"]}
    await client.close()
    return found


async def serve(options: argparse.Namespace, folder: Path) -> None:
    import torch

    from engine.journal import Journal
    from engine.models.config import module_sizes
    from engine.serve.adapter_tiers import DiskTier
    from engine.serve.server import Identity, Server
    from ops.bench.gpu_engine import Bench

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
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("build/gpu_engine"))
    parser.add_argument("--serve", default="", help="be the engine, at this socket")
    options = parser.parse_args()
    counts = [int(count) for count in options.adapters.split(",")]
    options.most_adapters = max(counts)
    with tempfile.TemporaryDirectory() as folder:
        if options.serve:
            sys.setswitchinterval(0.0005)
            asyncio.run(serve(options, Path(folder)))
            return
        socket = str(Path(folder) / "run" / "e.sock")
        command = [sys.executable, "-m", "ops.bench.gpu_served", *sys.argv[1:], "--serve", socket]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as engine:
            try:
                found = asyncio.run(measure(socket, counts, options.small))
            finally:
                engine.stdin.close()  # type: ignore[union-attr]
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "gpu_served.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
