"""An Engine of random weights, its adapters in host memory, and requests for it: what the benches of a GPU load."""

import random
import time
from dataclasses import replace

import torch

from engine.build import begin_compilers, make_runner
from engine.config import EngineConfig
from engine.engine import Engine
from engine.gpu.shapes import ONE_SHAPE, in_one_shape
from engine.models.decoder import Decoder
from engine.phases import Phases
from engine.wire import Flow, SamplingParams, Submit, pack_ids
from ops.bench.random_model import random_adapter, random_decoder

RANK = 16


class Bench:
    """One model with its adapters in host memory, and an Engine over it."""

    def __init__(
        self,
        shape: str,
        device: torch.device,
        num_adapters: int,
        small: bool,
        decoder: Decoder | None = None,
        *,
        deterministic: bool = False,
        **sizes: int,
    ) -> None:
        begin = time.perf_counter()
        self.shape, self.device, self.small = shape, device, small
        compilers = begin_compilers(device)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.decoder = decoder or random_decoder(shape, device, dtype)
        self.sizes = EngineConfig(
            num_blocks=2048 if small else 16384,
            context_tokens=2048 if small else 8192,
            max_step_tokens=512 if small else 8192,
            max_running=256,
            adapter_slots=num_adapters,
            max_lora_rank=RANK,
            host_adapter_bytes=64 << 30,
        )
        self.sizes = replace(self.sizes, **sizes)
        if deterministic:
            self.sizes = in_one_shape(replace(self.sizes, max_step_tokens=ONE_SHAPE, deterministic=True))
        self.sync()
        self.loaded_s = time.perf_counter() - begin
        self.runner = make_runner(self.decoder, self.sizes, Phases(), compilers)
        self.engine = Engine(self.sizes, self.runner)
        self.number = 0
        self.step_ms: list[float] = []
        self.sync()
        self.built_s = time.perf_counter() - begin
        for seed in range(num_adapters):
            weights = random_adapter(self.decoder.config, RANK, seed, device)
            self.engine.adapter_ready(f"a{seed}", self.runner.prepare(weights))

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def add(self, prompt_tokens: int, new_tokens: int, adapter: str = "", **sampling) -> None:
        draw = random.Random(self.number)
        prompt = [draw.randrange(10, self.decoder.config.vocab_size - 10) for _ in range(prompt_tokens)]
        params = SamplingParams(**{"max_tokens": new_tokens, "temperature": 0.0, "ignore_eos": True, **sampling})
        name = f"r{self.number}"
        self.number += 1
        self.engine.add(
            Submit(name, [pack_ids(prompt)], params, Flow("f"), name.encode(), new_tokens, adapter_key=adapter)
        )

    def fill(self, num: int, prompt_tokens: int, new_tokens: int, names: list[str]) -> None:
        for index in range(num):
            self.add(prompt_tokens, new_tokens, names[index % len(names)])

    def drain(self) -> float:
        """Steps until nothing is left → seconds. ``step_ms`` has each step's, ``kind_s`` their sums by kind,
        ``most_slots`` is how many adapter slots a step used, ``slots_used`` those that any did, ``num_loads`` how often
        one was filled."""
        self.most_slots = self.num_loads = 0
        self.slots_used: set[int] = set()
        self.step_ms, self.kind_s = [], {"": 0.0, "prefill": 0.0, "mixed": 0.0, "decode": 0.0}
        self.sync()
        begin = last = time.perf_counter()
        first: dict[str, float] = {}
        while self.engine.has_work:
            result = self.engine.step()
            stats, now = result.stats, time.perf_counter()
            for delta in result.deltas:
                first.setdefault(delta.request_id, now - begin)
            self.step_ms.append((now - last) * 1e3)
            slots = {sequence.adapter_slot for sequence in self.engine.scheduler.running} - {-1}
            self.most_slots = max(self.most_slots, len(slots))
            self.slots_used |= slots
            self.num_loads += len(stats.load_times_ns)
            self.kind_s[stats.kind if stats.num_tokens else ""] += now - last
            last = now
        self.first_s = sorted(first.values())
        return last - begin


def adapters(num: int) -> list[str]:
    return [f"a{index}" for index in range(num)] or [""]


def check_slots(bench: Bench, names: list[str], num: int) -> None:
    """Each adapter had a slot of its own: adapters of equal content would share one. Not all run at once where steps
    are small."""
    expected = min(num, len({*names} - {""}), bench.sizes.adapter_slots)
    assert len(bench.slots_used) == expected, f"{len(bench.slots_used)} distinct slots, not {expected}"
