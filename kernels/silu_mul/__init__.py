"""silu(gate) · up, the heart of a gated MLP."""

from torch import Tensor

from kernels.sgmv import Low, PartialLow, expand
from kernels.silu_mul import reference
from kernels.tiles import tiles
from kernels.timing import timed


def silu_mul(gate_up: Tensor, low: Low | None = None) -> Tensor:
    """gate_up [T, 2I], gate before up → silu(gate) · up [T, I] in its dtype.

    ``low``: what adapters add to gate and up before (``kernels.sgmv.shrink``), each a slice of I columns; gate_up may
    have changed then. A row depends on itself and its adapter only, on a CPU and on a GPU to the last bit; a GPU
    rounds once where it adds on its way (by the tables), a CPU gate, up and silu(gate) too.
    """
    assert gate_up.shape[-1] % 2 == 0, gate_up.shape
    if isinstance(low, PartialLow) and tiles("silu_low", gate_up.device, tokens=gate_up.shape[0])["fused"]:
        return _with_adapters(gate_up, low)
    if low is not None:
        expand(gate_up, low)
    return _alone(gate_up)


@timed("silu_mul")
def _alone(gate_up: Tensor) -> Tensor:
    if gate_up.is_cuda:
        from kernels.silu_mul import triton_kernel

        return triton_kernel.silu_mul(gate_up)
    return reference.silu_mul(gate_up)


@timed("silu_mul")
def _with_adapters(gate_up: Tensor, low: PartialLow) -> Tensor:
    from kernels.silu_mul import triton_low

    return triton_low.silu_mul(gate_up, low)
