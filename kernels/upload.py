"""Several lists of numbers to the device in one transfer."""

from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGNED = 16  # int32 numbers: every list begins at a multiple of 64 bytes, so that kernels may load it in vectors


def upload(lists: Sequence[Sequence[int]], device: torch.device) -> list[Tensor]:
    """Each list as an int32 tensor; they share one allocation."""
    flat: list[int] = []
    spans = []
    for numbers in lists:
        spans.append((len(flat), len(flat) + len(numbers)))
        flat.extend(numbers)
        flat.extend([0] * (-len(flat) % _ALIGNED))
    host = torch.tensor(flat, dtype=torch.int32, pin_memory=device.type == "cuda")
    on_device = host.to(device, non_blocking=True)
    return [on_device[first:last] for first, last in spans]
