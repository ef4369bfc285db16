"""Plain torch: the weight is multiplied out in fp32."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from kernels.linear.reference import linear

if TYPE_CHECKING:
    from kernels.quantised_linear import QuantisedWeight

BLOCK = 128  # rows and columns that share a scale of a blocked weight


def dequantised(weight: QuantisedWeight) -> Tensor:
    """[out, in] fp32."""
    size_out, size_in = weight.data.shape
    scales = weight.scales[:, None]
    if weight.is_blocked:
        scales = weight.scales.repeat_interleave(BLOCK, 0)[:size_out].repeat_interleave(BLOCK, 1)[:, :size_in]
    return weight.data.float() * scales


def quantised_linear(x: Tensor, weight: QuantisedWeight) -> Tensor:
    bias = None if weight.bias is None else weight.bias.float()
    return linear(x.float(), dequantised(weight), bias).to(x.dtype)
