"""From an engine's process start to its Welcome and its first token, on a random checkpoint (performance.md §1: 30 s).

    ./run bench gpu_start [--shape llama8b] [--device cuda] [--folder FOLDER] [--runs 3] [--out FOLDER]

``--write`` makes the checkpoint only: safetensors files of some 5 GB, as a real one has them, in ``--folder``, which is
made once and kept. Each run is ``python -m engine`` with its defaults, asked through engine.client; the first one has
an empty cache of compiled kernels, the others what it left. The files are in the page cache: what a disk takes to
read 16 GB comes on top. Where the time goes is the engine's own line ``started in``.
"""

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from engine import wire
from engine.client import EngineClient

READY_S = 280.0
Found = dict[str, float]
SHARD_BYTES = 5 << 30


def write_checkpoint(shape: str, folder: Path, device: str) -> None:
    """config.json, shards with their index, and a tokenizer of bytes."""
    import torch
    from safetensors.torch import save_file

    from ops.bench.random_model import SHAPES, random_config, random_weights

    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, torch.Tensor]] = [{}]
    for name, tensor in random_weights(random_config(shape), torch.device(device), torch.bfloat16).items():
        if sum(one.nbytes for one in shards[-1].values()) + tensor.nbytes > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = tensor
    files = {f"model-{number}.safetensors": shard for number, shard in enumerate(shards)}
    for name, shard in files.items():
        save_file({key: tensor.cpu() for key, tensor in shard.items()}, folder / name, metadata={"format": "pt"})
    index = {"weight_map": {key: name for name, shard in files.items() for key in shard}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    _write_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(SHAPES[shape]))


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


async def first_token(socket: Path, began: float) -> Found:
    """Seconds since ``began`` to the Welcome and to the first token of a prompt of 64."""
    client = EngineClient(str(socket), "bench")
    await client.start()
    await client.ready(READY_S)
    welcome_s = time.perf_counter() - began
    sampling = wire.SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    prompt = wire.pack_ids(range(64))
    stream = client.submit(wire.Submit("first", [prompt], sampling, wire.Flow("f"), b"n", 4, context=b"bench"))
    first_s, finished = 0.0, False
    while not finished:
        for event in await stream.next():
            assert not isinstance(event, wire.Rejected), event
            first_s = first_s or time.perf_counter() - began
            finished = finished or isinstance(event, wire.Finished)
    stream.close(wire.Close("first", 200))
    await client.close()
    return {"welcome_s": welcome_s, "first_token_s": first_s}


async def unless_it_ends(process: "subprocess.Popen[bytes]", asked: Coroutine[Any, Any, Found]) -> Found:
    """What was asked; an engine that ends instead of answering is a fault at once."""
    task = asyncio.create_task(asked)
    while not task.done():
        assert process.poll() is None, f"the engine ended with {process.returncode}"
        await asyncio.wait([task], timeout=0.2)
    return await task


def run_once(options: argparse.Namespace, kernels: Path) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        (home / "run").mkdir(mode=0o700)
        socket, log = home / "run" / "e.sock", home / "log"
        command = [sys.executable, "-m", "engine", "--socket", str(socket), "--dir", str(home / "engine")]
        command += ["--model", f"{options.shape}={options.folder}", "--device", options.device, *options.engine]
        environment = {**os.environ, "TRITON_CACHE_DIR": str(kernels)}
        with log.open("wb") as file:
            began = time.perf_counter()
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=file, env=environment)
        try:
            found: dict[str, object] = dict(asyncio.run(unless_it_ends(process, first_token(socket, began))))
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
            told = log.read_text()
            with (options.out / "gpu_start.log").open("a") as file:
                print(told, file=file)
        lines = [line.split("started in ")[1] for line in told.splitlines() if "started in " in line]
        assert lines, told[-3000:]
        return {**found, "phases": lines[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/tenora-start"))
    parser.add_argument("--runs", type=int, default=3, help="with compiled kernels, after one without")
    parser.add_argument("--write", action="store_true", help="make the checkpoint and no more")
    parser.add_argument("--out", type=Path, default=Path("build/gpu_engine"))
    parser.add_argument("engine", nargs="*", help="options of the engine, after --")
    options = parser.parse_args()
    if options.write:
        write_checkpoint(options.shape, options.folder, options.device)
        return
    if not (options.folder / "config.json").exists():  # in a process of its own, which leaves the device when it ends
        began = time.perf_counter()
        subprocess.run([sys.executable, "-m", "ops.bench.gpu_start", "--write", *sys.argv[1:]], check=True)
        print(f"checkpoint written in {time.perf_counter() - began:.1f} s", flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    rows = []
    with tempfile.TemporaryDirectory() as kernels:
        for number in range(options.runs + 1):
            rows.append({"kernels": "warm" if number else "cold", **run_once(options, Path(kernels))})
            row = rows[-1]
            print(
                f"{row['kernels']}: Welcome {row['welcome_s']:.1f} s, first token {row['first_token_s']:.1f} s; ",
                end="",
            )
            print(row["phases"], flush=True)
            (options.out / "gpu_start.json").write_text(json.dumps(rows, indent=1))
    warm = [float(str(row["first_token_s"])) for row in rows[1:]]
    if warm:
        print(
            f"first token, kernels warm, median of {len(warm)}: {statistics.median(warm):.1f} s (vLLM 0.22.1: 62 to 97)"
        )


if __name__ == "__main__":
    main()
