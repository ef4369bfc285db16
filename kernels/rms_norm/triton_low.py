# pyright: reportIndexIssue=false, reportCallIssue=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false
"""A row gets what its adapter adds to it between its parts and its norm: that saves the launch that would add it, and
reading and writing the sum once more. Rows without an adapter are computed as triton_kernel.py does one row a program,
to the last bit (by its warps, so that sums have its order). A program reads all of its row's B: RANKS of it while
shrink, just before, runs; the rest behind that, so the cost grows with the rank.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.rms_norm.triton_kernel import store_normed
from kernels.sgmv import PartialLow
from kernels.sgmv.triton_tables import rank_if_any, segment_at, slice_at, tile_of_b
from kernels.sgmv.triton_vector import add_ranks
from kernels.tiles import early, power_of_2, tiles


@triton.jit
def _add_rms_norm(
    p_x,
    p_residual,
    p_weight,
    p_out,
    p_partials,
    p_rows,
    p_segments,
    p_slices,
    num_rows,
    stride_row,
    stride_part,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
    RANKS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    ALIGNED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rows in the order of the segments, of which each is one."""
    i_place = tl.program_id(0).to(tl.int64)
    _, _, i_slot = segment_at(p_segments, i_place)
    i_row = tl.load(p_rows + i_place).to(tl.int64)
    o_size = tl.arange(0, BLOCK)
    m_size = o_size < SIZE
    lora_rank = rank_if_any(p_slices, 0, i_slot)
    p_tile, b_b, size_out = tile_of_b(slice_at(p_slices, 0), p_residual, i_slot, lora_rank, o_size, RANKS, ALIGNED)
    if PDL:
        tl.extra.cuda.gdc_wait()
    p_own = p_x + i_row * stride_row + o_size
    b_x = tl.load(p_own, mask=m_size, other=0.0).to(tl.float32)
    for _ in tl.static_range(1, PARTS):
        p_own += stride_part
        b_x += tl.load(p_own, mask=m_size, other=0.0)
    o_splits = tl.arange(0, SPLITS)
    i_low = o_splits.to(tl.int64) * num_rows + i_place
    m_low = o_splits < SPLIT
    b_x = add_ranks(b_x, p_partials, p_tile, b_b, size_out, i_low, m_low, lora_rank, m_size, RANKS, MAX_RANK)
    o_out = (i_row * SIZE + o_size)[None, :]
    store_normed(b_x[None, :], p_residual, p_weight, p_out, o_out, m_size[None, :], o_size, eps, SIZE, True)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, low: PartialLow) -> Tensor:
    """See the package; each row is a segment, and of x only the columns must be dense."""
    num_rows, size = residual.shape
    (part,) = low.slices
    assert low.segment_rows == 1, low.segment_rows
    assert (part.start, part.b.shape[2]) == (0, size), (part.start, part.b.shape, size)
    assert part.b.dtype == residual.dtype, (part.b.dtype, residual.dtype)
    assert x.stride(-1) == 1, x.stride()
    assert residual.is_contiguous(), residual.stride()
    out = torch.empty(residual.shape, dtype=residual.dtype, device=residual.device)
    _, split, _, max_rank = low.partials.shape
    block = power_of_2(size)
    row = tiles("norm_low_row", residual.device, size=block)
    _add_rms_norm[(len(low.segments.table),)](
        x,
        residual,
        weight,
        out,
        low.partials,
        low.segments.rows,
        low.segments.table,
        low.table,
        num_rows,
        x.stride(-2),
        x.stride(0) if x.dim() == 3 else 0,
        eps,
        SIZE=size,
        BLOCK=block,
        PARTS=len(x) if x.dim() == 3 else 1,
        SPLIT=split,
        SPLITS=power_of_2(split),
        RANKS=row["ranks"],
        MAX_RANK=max_rank,
        ALIGNED=low.is_aligned,
        num_warps=tiles("rms_norm", residual.device, size=block)["num_warps"],
        **early("norm_low", residual.device),
        **({"maxnreg": row["registers"]} if "registers" in row else {}),
    )
    return out
