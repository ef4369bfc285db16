"""Returns freed memory to the system: building a tokenizer and encoding long texts leave tens of megabytes behind."""

import ctypes
import sys

_M_MMAP_THRESHOLD = -3  # of mallopt(3)
_M_ARENA_MAX = -8
_LARGE_BYTES = 128 << 10  # what is as large is mapped by itself, and goes when it is freed


def keep_small() -> None:
    """One malloc arena for all threads: a gateway's threads wait more than they allocate. And a large piece that was
    freed does not make later ones small, as glibc otherwise has it, nor keep twice as much free at the heap's end.
    Call it first."""
    if sys.platform == "linux":
        option = getattr(ctypes.CDLL(None), "mallopt", None)
        if option is not None:
            option(_M_ARENA_MAX, 1)
            option(_M_MMAP_THRESHOLD, _LARGE_BYTES)


def give_back() -> None:
    """glibc keeps what was freed for the next time; elsewhere this does nothing. A few milliseconds."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
