"""Where a step's time goes, by op, on one step in many: by events on a GPU, by the clock on a CPU."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kernels.timing import watched

Pair = tuple[torch.cuda.Event, torch.cuda.Event]


class OpClock:
    """Adds to ``op_ns``. Not thread-safe: the step thread's. Events are read when the next step is timed: by then the
    device is long past them."""

    def __init__(self, op_ns: Counter[str], device: torch.device, every: int) -> None:
        self._op_ns = op_ns
        self._every = every
        self._watch = self._on_device if device.type == "cuda" else self._on_host
        self._num_steps = 0
        self._events: list[tuple[str, Pair]] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around the launch of a step."""
        self._num_steps += 1
        if self._num_steps % self._every:
            yield
            return
        self._read()
        with watched(self._watch):
            yield

    @contextmanager
    def _on_host(self, op: str) -> Iterator[None]:
        began_ns = time.perf_counter_ns()
        yield
        self._op_ns[op] += time.perf_counter_ns() - began_ns

    @contextmanager
    def _on_device(self, op: str) -> Iterator[None]:
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        yield
        ended.record()
        self._events.append((op, (began, ended)))

    def _read(self) -> None:
        events, self._events = self._events, []
        for op, (began, ended) in events:
            ended.synchronize()
            self._op_ns[op] += round(began.elapsed_time(ended) * 1e6)
