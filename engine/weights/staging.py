"""Tensors of mapped files onto a GPU, through pinned buffers in turn: the device reads one while all threads fill the
other. A copy straight from pageable memory goes through one thread."""

import torch
from torch import Tensor

_BUFFER_BYTES = 128 << 20


class Staging:
    """Not thread-safe. ``send`` returns before the last copies are done; the device's stream keeps their order."""

    def __init__(self, device: torch.device, buffer_bytes: int = _BUFFER_BYTES) -> None:
        self._device = device
        is_cuda = device.type == "cuda"
        self._buffers = [torch.empty(buffer_bytes, dtype=torch.uint8, pin_memory=is_cuda) for _ in range(2)]
        self._read = [torch.cuda.Event() if is_cuda else None for _ in self._buffers]

    def send(self, tensor: Tensor) -> Tensor:
        """A copy of a host tensor on the device."""
        out = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        source, target = _bytes(tensor), _bytes(out)
        for first in range(0, len(source), len(self._buffers[0])):
            self._send(source[first : first + len(self._buffers[0])], target[first:])
        return out

    def _send(self, source: Tensor, target: Tensor) -> None:
        buffer, read = self._buffers[0][: len(source)], self._read[0]
        self._buffers.reverse()
        self._read.reverse()
        if read is not None:
            read.synchronize()
        buffer.copy_(source)
        target[: len(source)].copy_(buffer, non_blocking=True)
        if read is not None:
            read.record()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)
