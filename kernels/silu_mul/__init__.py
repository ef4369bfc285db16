"""silu(gate) · up, the heart of a gated MLP."""

from torch import Tensor

from kernels.silu_mul import reference


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2I], gate before up → silu(gate) · up [T, I]. On a CPU a row's bits depend on that row only."""
    assert gate_up.shape[-1] % 2 == 0, gate_up.shape
    return reference.silu_mul(gate_up)
