"""Does a request have the same bits in whatever steps it is computed? The engine itself, its scheduler and its cache:
each way of running eight requests is compared with each of them alone.

    python3 -m ops.bench.gpu_engine_bits [SHAPE…]

A deterministic engine of each shape of random_model, real sizes among them; the check below is of a tiny one.
"""

import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.gpu.runner import CudaRunner
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.runner import Runner
from engine.wire import Flow, SamplingParams, Submit, pack_ids
from ops.bench.random_model import of_8_bits, random_adapter, random_config, random_weights

Answers = dict[str, list[Any]]  # by request: each token with its log-probabilities, and what the prompt's were
LENGTHS = (3, 17, 40, 64, 100, 1018, 1500, 31)  # past the keys of one chunk of attention: grown there, and begun
RANKS = (4, 8, 16, 64, 3, 32)  # of adapters a0 … a5
OF_REQUEST = ("", "a0", "a1", "a2", "a3", "a4", "a5", "")
NEW_TOKENS = 12
SIZES = EngineConfig(
    num_blocks=2048,
    context_tokens=2048,
    max_step_tokens=256,
    max_running=256,
    adapter_slots=len(RANKS),
    max_lora_rank=64,
    deterministic=True,
)


@dataclass(frozen=True)
class Ways:
    """One runner, and an engine anew for each way."""

    runner: Runner
    adapters: dict[str, Any]  # as the runner prepared them
    vocab_size: int

    def engine(self, **changes: int) -> Engine:
        engine = Engine(replace(SIZES, **changes), self.runner)
        for name, weights in self.adapters.items():
            engine.adapter_ready(name, weights)
        return engine

    def prompt(self, seed: int, length: int) -> list[int]:
        return random.Random(seed).choices(range(3, self.vocab_size), k=length)

    def request(self, number: int) -> Submit:
        """Of the eight; some are drawn, of one the prompt is scored."""
        params = SamplingParams(
            NEW_TOKENS,
            temperature=0.9 if number % 2 else 0.0,
            top_p=0.95,
            seed=number,
            logprobs=20,
            prompt_logprobs=5 if number == 4 else -1,
            ignore_eos=True,
        )
        adapter = OF_REQUEST[number]
        prompt = pack_ids(self.prompt(number, LENGTHS[number]))
        space = b"n" + adapter.encode()
        return Submit(f"r{number}", [prompt], params, Flow("f"), space, NEW_TOKENS, adapter_key=adapter)

    def other(self, number: int) -> Submit:
        params = SamplingParams(60, temperature=1.0, seed=number, ignore_eos=True)
        adapter = OF_REQUEST[number % 8]
        prompt = pack_ids(self.prompt(1000 + number, 5 + number % 50))
        return Submit(f"o{number}", [prompt], params, Flow("o"), b"o" + adapter.encode(), 60, adapter_key=adapter)

    def alone(self) -> Answers:
        return {name: answer for number in range(8) for name, answer in self.run(self.engine(), [number]).items()}

    def run(self, engine: Engine, numbers: Sequence[int] = range(8), num_others: int = 0) -> Answers:
        """The requests of these numbers; others decode already when they come."""
        for number in range(num_others):
            engine.add(self.other(number))
        started: set[str] = set()
        while len(started) < num_others:
            started |= {delta.request_id for delta in engine.step().deltas}
        for number in numbers:
            engine.add(self.request(number))
        found: Answers = {f"r{number}": [] for number in numbers}
        open_requests = set(found)
        while open_requests:
            result = engine.step()
            for told in (*result.scores, *result.deltas):
                if told.request_id in found:
                    found[told.request_id].extend(told.logprobs)
            open_requests -= {end.request_id for end in result.finished}
        return found


def ways(of: Ways) -> dict[str, Callable[[], Answers]]:
    again = of.engine()
    return {
        "together": lambda: of.run(of.engine()),
        "in another order": lambda: of.run(of.engine(), [5, 2, 7, 0, 1, 6, 4, 3]),
        "twice in one cache": lambda: (of.run(again), of.run(again))[1],
        "chunks of 7": lambda: of.run(of.engine(max_step_tokens=7)),
        "chunks of 33": lambda: of.run(of.engine(max_step_tokens=33)),
        "chunks of 64": lambda: of.run(of.engine(max_step_tokens=64)),
        "two slots": lambda: of.run(of.engine(adapter_slots=2)),
        "beside 5": lambda: of.run(of.engine(), num_others=5),
        "beside 200": lambda: of.run(of.engine(), num_others=200),
        "preempted": lambda: preempted(of),
    }


def preempted(of: Ways) -> Answers:
    """A pool that does not hold what the short ones and others grow to."""
    engine = of.engine(num_blocks=40)
    found = of.run(engine, [0, 1, 2, 3, 4, 7], num_others=20)
    assert engine.scheduler.num_preemptions > 0, "nobody gave way"
    return found


def ways_of(name: str, device: torch.device, *, deterministic: bool = True) -> Ways:
    """Random weights, bf16 on a GPU (NAME-int8 and its like: of 8 bits); adapters of RANKS."""
    model: ModelConfig = random_config(name)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    decoder = Decoder(model, of_8_bits(name, random_weights(model, device, dtype))[0])
    if device.type == "cuda":
        runner: Runner = CudaRunner(decoder, replace(SIZES, deterministic=deterministic))
        runner.warm()
        runner.capture()
    else:
        runner = Runner(decoder, SIZES)
    adapters = {
        f"a{number}": runner.prepare(random_adapter(model, rank, number, device)) for number, rank in enumerate(RANKS)
    }
    return Ways(runner, adapters, model.vocab_size)


def differing(of: Ways) -> dict[str, list[str]]:
    """Each way's requests that have other bits than alone."""
    expected = of.alone()
    assert all(len(answer) >= NEW_TOKENS for answer in expected.values())
    return {
        name: [request for request, answer in run().items() if answer != expected[request]]
        for name, run in ways(of).items()
    }


def wrong_ways(name: str, device: torch.device) -> dict[str, list[str]]:
    """Of a deterministic engine: the ways in which some request has other bits."""
    return {way: requests for way, requests in differing(ways_of(name, device)).items() if requests}


def check_deterministic_requests_have_their_bits_in_whatever_steps(name: str = "tiny") -> dict[str, float]:
    """Log-probabilities of each token and of the best 20, equal to the last bit; how many requests have other ones in
    an engine that is not deterministic is told beside, since there it would be luck."""
    device = torch.device("cuda")
    wrong = wrong_ways(name, device)
    assert not wrong, wrong
    without = differing(ways_of(name, device, deterministic=False))
    return {f"others without, {way}": len(requests) for way, requests in without.items()}


def main() -> int:
    wrong: dict[str, dict[str, list[str]]] = {}
    for name in sys.argv[1:] or ("llama8b", "qwen06b"):
        begin = time.perf_counter()
        wrong[name] = wrong_ways(name, torch.device("cuda"))
        print(f"[{time.perf_counter() - begin:5.1f} s] {name}: {wrong[name] or 'equal in every way'}", flush=True)
    return int(any(wrong.values()))


if __name__ == "__main__":
    sys.exit(main())
