"""Several lists of numbers to the device in one transfer."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNED = 16  # int32 numbers: every list begins at a multiple of 64 bytes, so that kernels may load it in vectors
Numbers = Sequence[int] | NDArray[np.integer]


def spans(lengths: Sequence[int]) -> list[slice]:
    """Where lists of these lengths stand, one behind the other, each aligned."""
    found, start = [], 0
    for length in lengths:
        found.append(slice(start, start + length))
        start += -(-length // ALIGNED) * ALIGNED
    return found


def upload(lists: Sequence[Numbers], device: torch.device) -> list[Tensor]:
    """Each list as an int32 tensor; they share one allocation."""
    places = spans([len(numbers) for numbers in lists])
    host = torch.zeros(places[-1].stop, dtype=torch.int32, pin_memory=device.type == "cuda")
    flat = host.numpy()
    for place, numbers in zip(places, lists, strict=True):
        flat[place] = numbers
    on_device = host.to(device, non_blocking=True)
    return [on_device[place] for place in places]
