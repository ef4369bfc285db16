"""Time of one call on the GPU: the median of CUDA-graph replays, divided by the calls in the graph."""

import math
from collections.abc import Callable, Sequence

import torch

L2_BYTES = 150e6  # input sets together pass the 60 MB of L2 by this much
MIN_US = 400.0  # of work in a graph


def num_sets(num_bytes: float, most: int = 64) -> int:
    """Input sets to rotate among, so that none is found in the cache again."""
    return int(min(most, max(4, math.ceil(L2_BYTES / max(num_bytes, 1.0)))))


def median_us(calls: Sequence[Callable[[], object]], replays: int = 25) -> float:
    """Of one call; ``calls`` are the same op on different inputs, in turn."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    stream.synchronize()
    repeats, graph = 1, _capture(calls, 1, stream)
    took = _replay_us(graph, 3)
    if took < MIN_US:
        repeats = max(1, min(math.ceil(MIN_US / max(took, 1.0)), 400 // len(calls)))
        graph = _capture(calls, repeats, stream) if repeats > 1 else graph
    return _replay_us(graph, replays) / (repeats * len(calls))


def _capture(calls: Sequence[Callable[[], object]], repeats: int, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(repeats):
            for call in calls:
                call()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def _replay_us(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)]
    for before, after in events:
        before.record()
        graph.replay()
        after.record()
    torch.cuda.synchronize()
    return sorted(before.elapsed_time(after) * 1e3 for before, after in events)[replays // 2]
