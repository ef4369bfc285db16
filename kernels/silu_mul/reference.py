"""Plain torch, in pieces that no second thread takes a part of."""

import torch.nn.functional as F
from torch import Tensor

# at::internal::GRAIN_SIZE: elementwise ops give no thread fewer elements. More are cut between threads at any
# element, and the lanes at such a cut are computed by a scalar exp, whose last bit is another one than the
# vector's (measured: 7 threads change a bit of SmolLM2's MLP at 400 rows).
_MAX_ELEMENTS = 32768


def silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    most_rows = max(1, _MAX_ELEMENTS // gate.shape[-1])
    if gate.device.type != "cpu" or gate.shape[0] <= most_rows:
        return F.silu(gate).mul_(up)
    out = gate.new_empty(gate.shape)
    for piece, some, factor in zip(out.split(most_rows), gate.split(most_rows), up.split(most_rows), strict=True):
        piece.copy_(F.silu(some).mul_(factor))
    return out
