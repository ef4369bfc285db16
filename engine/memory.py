"""Memory of a CPU engine: buffers of a step stay with the process, large pools cost what of them is used."""

import ctypes
import math
import mmap
import time

import torch
from torch import Tensor

# glibc's <malloc.h>
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8
_KEPT_BYTES = 1 << 30
_LARGEST_KEPT_BYTES = 32 << 20  # glibc's own bound: larger ones are mapped and given back each time


def keep_freed_memory() -> None:
    """Lets malloc keep what a step frees for the next one, in one arena. By default glibc maps the larger buffers
    anew in each step, and the kernel zeroes their pages: 7 % of a decode. Nothing happens without glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    mallopt(_ARENA_MAX, 1)
    mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES)
    mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
    mallopt(_TOP_PAD, 64 << 20)


def copy_bytes_s() -> float:
    """What this machine's memory moves, reading and writing, by copies too large for most caches: the best of five."""
    source, target = (torch.ones(_LARGEST_KEPT_BYTES + (1 << 20), dtype=torch.uint8) for _ in range(2))
    best_ns = min(_copy_ns(source, target) for _ in range(5))
    return 2 * source.nbytes / best_ns * 1e9


def _copy_ns(source: Tensor, target: Tensor) -> int:
    began_ns = time.perf_counter_ns()
    target.copy_(source)
    return max(1, time.perf_counter_ns() - began_ns)


def lazy_zeros(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Zeros of ``like``'s dtype on its device. On a CPU a page takes memory and time when it is first written."""
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    num_bytes = max(1, math.prod(shape)) * like.itemsize
    buffer = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(buffer, dtype=like.dtype, count=math.prod(shape)).view(shape)
