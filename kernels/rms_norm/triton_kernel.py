# pyright: reportIndexIssue=false, reportCallIssue=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false
"""One program normalises ROWS rows; a row stays in registers between its mean and its result."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.tiles import power_of_2, tiles


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm(
    p_x,
    p_residual,
    p_weight,
    p_out,
    num_rows,
    num_inner,
    stride_outer,
    stride_inner,
    stride_part,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    ADDS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Row i is x[i // num_inner, i % num_inner], or the sum of PARTS such; residual and out are contiguous."""
    i_rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    o_size = tl.arange(0, BLOCK)
    m_size = o_size < SIZE
    mask = (i_rows < num_rows)[:, None] & m_size[None, :]
    o_x = (i_rows // num_inner) * stride_outer + (i_rows % num_inner) * stride_inner
    o_out = i_rows[:, None] * SIZE + o_size[None, :]
    p_own = p_x + o_x[:, None] + o_size[None, :]
    b_x = tl.load(p_own, mask=mask, other=0.0)
    for _ in tl.static_range(1, PARTS):
        p_own += stride_part
        b_x += tl.load(p_own, mask=mask, other=0.0)
    b_x = b_x.to(p_out.dtype.element_ty)
    if ADDS:
        b_x = (b_x.to(tl.float32) + tl.load(p_residual + o_out, mask=mask, other=0.0).to(tl.float32)).to(b_x.dtype)
        tl.store(p_residual + o_out, b_x, mask=mask)
    b_wide = b_x.to(tl.float32)
    b_scale = tl.rsqrt(tl.sum(b_wide * b_wide, 1) / SIZE + eps)
    b_normed = (b_wide * b_scale[:, None]).to(b_x.dtype).to(tl.float32)
    b_weight = tl.load(p_weight + o_size, mask=m_size, other=0.0).to(tl.float32)
    tl.store(p_out + o_out, (b_normed * b_weight[None, :]).to(p_out.dtype.element_ty), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """See the package; x [T, H] or [T, N, H], with ``residual`` [T, H] or [P, T, H] to be added up, of which only the
    last dimension must be dense."""
    assert x.stride(-1) == 1, x.stride()
    assert x.dim() in {2, 3}, x.shape
    assert residual is None or (residual.is_contiguous() and residual.shape == x.shape[-2:]), x.shape
    has_parts = residual is not None and x.dim() == 3
    num_parts, stride_part, one = (len(x), x.stride(0), x[0]) if has_parts else (1, 0, x)
    size = x.shape[-1]
    num_rows = one.numel() // size
    like = one if residual is None else residual
    out = torch.empty(one.shape, dtype=like.dtype, device=x.device)
    block = power_of_2(size)
    rows = max(1, 1024 // block)
    if num_rows:
        _rms_norm[(triton.cdiv(num_rows, rows),)](
            x,
            x if residual is None else residual,
            weight,
            out,
            num_rows,
            one.shape[1] if one.dim() == 3 else 1,
            one.stride(0),
            one.stride(1) if one.dim() == 3 else 0,
            stride_part,
            eps,
            SIZE=size,
            BLOCK=block,
            ROWS=rows,
            ADDS=residual is not None,
            PARTS=num_parts,
            num_warps=tiles("rms_norm", x.device, size=block)["num_warps"],
        )
    return out
