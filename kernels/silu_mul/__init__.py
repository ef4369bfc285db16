"""silu(gate) · up, the heart of a gated MLP."""

from torch import Tensor

from kernels.prefetch import prefetch_beside
from kernels.silu_mul import reference
from kernels.timing import timed


@timed("silu_mul")
def silu_mul(gate_up: Tensor, next_weight: Tensor | None = None) -> Tensor:
    """gate_up [T, 2I], gate before up → silu(gate) · up [T, I] in its dtype. A row depends on itself only, on a CPU
    and on a GPU to the last bit; a GPU rounds once, a CPU silu(gate) too. ``next_weight`` [out, in]: see
    kernels/prefetch."""
    assert gate_up.shape[-1] % 2 == 0, gate_up.shape
    if gate_up.is_cuda:
        from kernels.silu_mul import triton_kernel

        return triton_kernel.silu_mul(gate_up, prefetch_beside("silu_mul", next_weight, len(gate_up)))
    return reference.silu_mul(gate_up)
