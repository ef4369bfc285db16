# pyright: reportIndexIssue=false, reportCallIssue=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false
"""One program turns HEADS heads of a token."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.tiles import power_of_2, tiles


@triton.jit
def rotated(b_first, b_second, b_cosines, b_sines):
    """Both halves of heads, fp32. Which product is rounded by itself is said here: the compiler would choose by what
    stands around it, and a head would get other bits from another kernel."""
    return tl.fma(b_first, b_cosines, -(b_second * b_sines)), tl.fma(b_second, b_cosines, b_first * b_sines)


@triton.jit
def _rope(
    p_heads,
    p_positions,
    p_table,
    p_out,
    num_heads,
    stride_token,
    stride_head,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
):
    i_token = tl.program_id(0).to(tl.int64)
    i_heads = tl.program_id(1).to(tl.int64) * HEADS + tl.arange(0, HEADS)
    o_half = tl.arange(0, HALF)
    m_half = o_half < HEAD_DIM // 2
    mask = (i_heads < num_heads)[:, None] & m_half[None, :]
    i_position = tl.load(p_positions + i_token).to(tl.int64)
    p_angles = p_table + i_position * (2 * HEAD_DIM) + o_half
    b_cosines = tl.load(p_angles, mask=m_half, other=0.0)[None, :]
    b_sines = tl.load(p_angles + HEAD_DIM, mask=m_half, other=0.0)[None, :]
    p_first = p_heads + i_token * stride_token + i_heads[:, None] * stride_head + o_half[None, :]
    b_first = tl.load(p_first, mask=mask, other=0.0).to(tl.float32)
    b_second = tl.load(p_first + HEAD_DIM // 2, mask=mask, other=0.0).to(tl.float32)
    p_turned = p_out + (i_token * num_heads + i_heads[:, None]) * HEAD_DIM + o_half[None, :]
    b_first, b_second = rotated(b_first, b_second, b_cosines, b_sines)
    tl.store(p_turned, b_first.to(p_out.dtype.element_ty), mask=mask)
    tl.store(p_turned + HEAD_DIM // 2, b_second.to(p_out.dtype.element_ty), mask=mask)


def rope(heads: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """See the package; heads may be a slice of wider rows."""
    num_tokens, num_heads, head_dim = heads.shape
    assert heads.stride(-1) == 1, heads.stride()
    assert table.is_contiguous(), table.stride()
    out = torch.empty(heads.shape, dtype=heads.dtype, device=heads.device)
    half = power_of_2(head_dim // 2)
    row = tiles("rope", heads.device, tokens=num_tokens)
    if num_tokens:
        _rope[(num_tokens, triton.cdiv(num_heads, row["heads"]))](
            heads,
            positions,
            table,
            out,
            num_heads,
            heads.stride(0),
            heads.stride(1),
            HEAD_DIM=head_dim,
            HALF=half,
            HEADS=row["heads"],
            num_warps=row["num_warps"],
        )
    return out
