"""Captures of CUDA graphs, one after the other."""

from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")


class Captures:
    """All in one stream, their memory in one pool. ``torch.cuda.graph`` gives what is cached back to the driver before
    each capture and takes it anew, which for more than a thousand small ones is most of the time."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def capture(self, compute: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
        """Computes twice: at once, so that kernels are compiled and tables of tiles and of addresses made, and into the
        graph. Its result is overwritten by each replay."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            compute()
            self._stream.synchronize()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = compute()
            finally:
                graph.capture_end()
        current.wait_stream(self._stream)
        return graph, result

    def over(self) -> None:
        """What was computed at once leaves memory behind."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
