"""Plain torch: the weight is multiplied out, in fp32 on a CPU; on a GPU, for a prompt's many rows, in x's dtype."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels.linear.reference import linear

if TYPE_CHECKING:
    from kernels.quantised_linear import QuantisedWeight

BLOCK = 128  # rows and columns that share a scale of a blocked weight
WIDE_ROWS = 16 * BLOCK  # of a weight that are multiplied out at a time on a GPU


def dequantised(weight: QuantisedWeight) -> Tensor:
    """[out, in] fp32."""
    size_out, size_in = weight.data.shape
    scales = weight.scales[:, None]
    if weight.is_blocked:
        scales = weight.scales.repeat_interleave(BLOCK, 0)[:size_out].repeat_interleave(BLOCK, 1)[:, :size_in]
    return weight.data.float() * scales


def quantised_linear(x: Tensor, weight: QuantisedWeight) -> Tensor:
    if x.is_cuda:
        return _by_parts(x, weight)
    bias = None if weight.bias is None else weight.bias.float()
    return linear(x.float(), dequantised(weight), bias).to(x.dtype)


def _by_parts(x: Tensor, weight: QuantisedWeight) -> Tensor:
    """A channel's scale behind the product, so that its numbers are only widened, which is exact."""
    out = torch.empty((len(x), len(weight.data)), dtype=x.dtype, device=x.device)
    for first in range(0, len(weight.data), WIDE_ROWS):
        rows = slice(first, first + WIDE_ROWS)
        if weight.is_blocked:
            scales = weight.scales[first // BLOCK : (first + WIDE_ROWS) // BLOCK]
            wide = dequantised(replace(weight, data=weight.data[rows], scales=scales, bias=None))
            out[:, rows] = linear(x, wide.to(x.dtype), None)
        else:
            out[:, rows] = linear(x, weight.data[rows].to(x.dtype), None) * weight.scales[rows]
        if weight.bias is not None:
            out[:, rows] += weight.bias[rows]
    return out
