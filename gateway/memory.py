"""Returns freed memory to the system: building a tokenizer and encoding long texts leave tens of megabytes behind."""

import ctypes
import sys

_M_ARENA_MAX = -8  # mallopt(3)


def keep_small() -> None:
    """One malloc arena for all threads: a gateway's threads wait more than they allocate. Call it first."""
    if sys.platform == "linux":
        option = getattr(ctypes.CDLL(None), "mallopt", None)
        if option is not None:
            option(_M_ARENA_MAX, 1)


def give_back() -> None:
    """glibc keeps what was freed for the next time; elsewhere this does nothing. A few milliseconds."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
