# pyright: reportIndexIssue=false, reportCallIssue=false, reportAttributeAccessIssue=false
"""For many rows: the weight is multiplied out into x's dtype, in parts of WIDE_BYTES, and each part is one plain
product. That costs a read of the weight and a write of twice its bytes, whatever the number of rows.

A channel's scale is multiplied in like a block's: to scale y instead would round y twice, which is as far from the
exact product as rounding the weight once (2.34e-3 either way, 1.66e-3 of it for y's own rounding), and costs passes
over y."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.quantised_linear import WIDE_BYTES, QuantisedWeight
from kernels.quantised_linear.reference import BLOCK
from kernels.tiles import power_of_2, tiles


@triton.jit
def _widen(
    p_data,
    p_scales,
    p_wide,
    first_row,
    num_rows,
    SIZE_IN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Rows first_row … of the weight, num_rows of them, into wide [num_rows, SIZE_IN]. SCALED: rows and columns that
    share a scale, a multiple of BLOCK_K; 0: a scale a row."""
    i_rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    first_in = tl.program_id(1).to(tl.int64) * BLOCK_K
    o_in = first_in + tl.arange(0, BLOCK_K)
    m_rows = i_rows < num_rows
    mask = m_rows[:, None] & (o_in < SIZE_IN)[None, :] if SIZE_IN % BLOCK_K else m_rows[:, None]
    b_data = tl.load(p_data + ((first_row + i_rows) * SIZE_IN)[:, None] + o_in[None, :], mask=mask, other=0.0)
    if SCALED:
        p_scale = p_scales + (first_row + i_rows) // SCALED * ((SIZE_IN + SCALED - 1) // SCALED) + first_in // SCALED
    else:
        p_scale = p_scales + first_row + i_rows
    b_wide = b_data.to(tl.float32) * tl.load(p_scale, mask=m_rows, other=0.0)[:, None]
    tl.store(p_wide + (i_rows * SIZE_IN)[:, None] + o_in[None, :], b_wide.to(p_wide.dtype.element_ty), mask=mask)


def widened(weight: QuantisedWeight, first_row: int, num_rows: int, dtype: torch.dtype) -> Tensor:
    """[num_rows, in]: rows first_row … multiplied out, rounded once."""
    data, size_in = weight.data, weight.data.shape[1]
    assert data.is_contiguous(), data.stride()
    assert weight.scales.is_contiguous(), weight.scales.stride()
    wide = torch.empty((num_rows, size_in), dtype=dtype, device=data.device)
    row = tiles("quantised_widen", data.device)
    block_k = min(row["block_k"], BLOCK if weight.is_blocked else power_of_2(size_in))
    _widen[(triton.cdiv(num_rows, row["block_n"]), triton.cdiv(size_in, block_k))](
        data,
        weight.scales,
        wide,
        first_row,
        num_rows,
        SIZE_IN=size_in,
        BLOCK_N=row["block_n"],
        BLOCK_K=block_k,
        SCALED=BLOCK if weight.is_blocked else 0,
        num_warps=row["num_warps"],
    )
    return wide


def quantised_linear(x: Tensor, weight: QuantisedWeight) -> Tensor:
    """See the package; worth it for many rows. Takes one part's memory beside the output."""
    size_out, size_in = weight.data.shape
    parts = -(-size_out * size_in * x.dtype.itemsize // WIDE_BYTES)
    part = -(-size_out // (parts * BLOCK)) * BLOCK
    if part >= size_out:
        return torch.nn.functional.linear(x, widened(weight, 0, size_out, x.dtype), weight.bias)
    out = torch.empty((x.shape[0], size_out), dtype=x.dtype, device=x.device)
    for first in range(0, size_out, part):
        rows = slice(first, min(first + part, size_out))
        wide = widened(weight, first, rows.stop - first, x.dtype)
        if weight.bias is None:
            torch.mm(x, wide.T, out=out[:, rows])
        else:
            torch.addmm(weight.bias[rows], x, wide.T, out=out[:, rows])
    return out
