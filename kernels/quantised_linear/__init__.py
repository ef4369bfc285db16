"""y = x · (data · scales)ᵀ + b of weights of 8 bits: half the bytes of bf16, and decode reads little else."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.quantised_linear import reference
from kernels.quantised_linear.reference import BLOCK, dequantised
from kernels.tiles import tiles
from kernels.timing import timed

__all__ = ["BLOCK", "KINDS", "WIDE_BYTES", "QuantisedWeight", "dequantised", "quantised_linear"]

KINDS = (torch.int8, torch.float8_e4m3fn)
WIDE_BYTES = 128 << 20  # of a weight that is multiplied out on a GPU at a time: enough for cuBLAS at its best


@dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """``data`` [out, in] of one of KINDS, contiguous, and fp32 ``scales`` that its numbers are multiplied by.

    scales [out]: one a channel (compressed-tensors' ``channel`` strategy, int8 or fp8; one scale for all is that, out
    times). scales [⌈out / 128⌉, ⌈in / 128⌉]: one for every block of 128 × 128 (``weight_scale_inv`` of block-fp8).
    Symmetric: no zero points. ``bias`` [out], if any, of x's dtype.
    """

    data: Tensor
    scales: Tensor
    bias: Tensor | None = None

    @property
    def is_blocked(self) -> bool:
        return self.scales.dim() == 2


@timed("linear")
def quantised_linear(x: Tensor, weight: QuantisedWeight) -> Tensor:
    """x [T, in] fp32 or bf16 → [T, out] in x's dtype, accumulated in fp32. On a CPU a row's bits depend on that row
    and the weight only; on a GPU also on T by tables. There few rows meet the weight's numbers as they are, scaled
    behind the product; for many each of them is multiplied by its scale and rounded to x's dtype once, and WIDE_BYTES
    of memory are taken meanwhile."""
    size_out, size_in = weight.data.shape
    blocks = (-(-size_out // BLOCK), -(-size_in // BLOCK))
    assert weight.data.dtype in KINDS, weight.data.dtype
    assert x.shape[1] == size_in, (x.shape, weight.data.shape)
    assert weight.scales.shape == (blocks if weight.is_blocked else (size_out,)), (
        weight.scales.shape,
        weight.data.shape,
    )
    if x.is_cuda:
        from kernels.quantised_linear import triton_kernel, triton_widen

        form = tiles("quantised_form", x.device, tokens=x.shape[0])
        is_widened = form["is_widened"] or x.dtype == torch.float32  # which is for comparisons
        return (triton_widen if is_widened else triton_kernel).quantised_linear(x, weight)
    return reference.quantised_linear(x, weight)
