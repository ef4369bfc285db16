# pyright: reportIndexIssue=false, reportCallIssue=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
"""Shrink and expand for the few rows of a decode: each row a product of a vector with its own adapter's matrices, on
the ordinary units, at the adapter's own rank, which is read on the device.

A program holds a tile of RANKS ranks of A or B in registers, all of its loads under way at once, and nothing but a
warp's own numbers is added up across ranks (measured: with a tile's ranks spread over warps expand takes twice as
long). Rank 8 pays for 16, never for the largest rank of the step: what stands past a slot's rank exits, and so do
segments without a row. Rows of one slot read it again, from the L2 cache: what a row costs and what bits it gets do not
depend on who shares its slot.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.sgmv.low import LoraSlice, PartialLow
from kernels.sgmv.plan import Segments
from kernels.sgmv.triton_tables import a_of, columns_of, rank_of, segment_at, slice_at, tile_of_b
from kernels.tiles import is_early, pdl, power_of_2, tiles

RANKS = 16  # of a tile


@triton.jit(do_not_specialize=["num_rows"])
def _shrink(
    p_x,
    p_partials,
    p_rows,
    p_segments,
    p_slices,
    num_rows,
    stride_x,
    SIZE_IN: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    RANKS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    TRIGGERS: tl.constexpr,
    PDL: tl.constexpr,
):
    """partials [slices, SPLIT, num_rows, MAX_RANK] fp32 by sorted row; whole tiles of ranks are written."""
    if TRIGGERS:
        tl.extra.cuda.gdc_launch_dependents()
    i_part = tl.program_id(0).to(tl.int64)
    i_split = i_part % SPLIT
    i_ranks = i_part // SPLIT * RANKS
    i_place = tl.program_id(1).to(tl.int64)
    i_slice = tl.program_id(2).to(tl.int64)
    p_slice = slice_at(p_slices, i_slice)
    _, num_own, i_slot = segment_at(p_segments, i_place)
    i_row = tl.load(p_rows + i_place).to(tl.int64)
    p_a, num_ranks = a_of(p_slice, p_x)
    lora_rank = rank_of(p_slice, i_slot)
    if (num_own == 0) | (i_ranks >= lora_rank):
        if PDL:
            tl.extra.cuda.gdc_wait()
        return
    o_ranks = i_ranks + tl.arange(0, RANKS)
    o_in = i_split * BLOCK_K + tl.arange(0, BLOCK_K)
    m_in = o_in < SIZE_IN if SIZE_IN % BLOCK_K else tl.full((BLOCK_K,), True, tl.int1)
    p_tile = p_a + ((i_slot * num_ranks + o_ranks) * SIZE_IN)[:, None] + o_in[None, :]
    b_a = tl.load(p_tile, mask=(o_ranks < lora_rank)[:, None] & m_in[None, :], other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    b_x = tl.load(p_x + i_row * stride_x + o_in, mask=m_in, other=0.0)
    b_low = tl.sum(b_a.to(tl.float32) * b_x.to(tl.float32)[None, :], 1)
    i_out = (i_slice * SPLIT + i_split) * num_rows + i_place
    tl.store(p_partials + i_out * MAX_RANK + o_ranks, b_low)


@triton.jit
def add_ranks(
    b_y, p_partials, p_tile, b_b, size_out, i_low, m_low, lora_rank, m_out, RANKS: tl.constexpr, MAX_RANK: tl.constexpr
):
    """b_y [columns] and what a row's low ranks add to it: the sums of partials' rows ``i_low`` where ``m_low``, times
    B, of which ``tile_of_b`` has given p_tile, b_b and size_out."""
    o_ranks = tl.arange(0, RANKS)
    for i_ranks in range(0, lora_rank, RANKS):
        p_low = p_partials + i_low[:, None] * MAX_RANK + (i_ranks + o_ranks)[None, :]
        b_low = tl.sum(tl.load(p_low, mask=m_low[:, None] & (o_ranks < RANKS)[None, :], other=0.0), 0)
        b_y += tl.sum(b_b.to(tl.float32) * b_low[:, None], 0)
        p_tile += RANKS * size_out
        m_next = (i_ranks + RANKS + o_ranks < lora_rank)[:, None] & m_out[None, :]
        b_b = tl.load(p_tile, mask=m_next, other=0.0)
    return b_y


@triton.jit(do_not_specialize=["num_rows"])
def _expand(
    p_y,
    p_partials,
    p_rows,
    p_segments,
    p_slices,
    num_rows,
    stride_y,
    SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    RANKS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    ALIGNED: tl.constexpr,
    PDL: tl.constexpr,
):
    i_column = tl.program_id(0).to(tl.int64) * BLOCK_N
    i_place = tl.program_id(1).to(tl.int64)
    i_slice = tl.program_id(2).to(tl.int64)
    p_slice = slice_at(p_slices, i_slice)
    _, num_own, i_slot = segment_at(p_segments, i_place)
    i_row = tl.load(p_rows + i_place).to(tl.int64)
    lora_rank = rank_of(p_slice, i_slot)
    start, num_columns = columns_of(p_slice, ALIGNED)
    if (num_own == 0) | (lora_rank == 0) | (i_column >= num_columns):
        if PDL:
            tl.extra.cuda.gdc_wait()
        return
    o_out = i_column + tl.arange(0, BLOCK_N)
    p_tile, b_b, size_out = tile_of_b(p_slice, p_y, i_slot, lora_rank, o_out, RANKS, ALIGNED)
    m_out = o_out < size_out
    if PDL:
        tl.extra.cuda.gdc_wait()
    p_own = p_y + i_row * stride_y + start + o_out
    b_y = tl.load(p_own, mask=m_out, other=0.0).to(tl.float32)
    o_splits = tl.arange(0, SPLITS)
    i_low = (i_slice * SPLIT + o_splits) * num_rows + i_place
    m_low = o_splits < SPLIT
    b_y = add_ranks(b_y, p_partials, p_tile, b_b, size_out, i_low, m_low, lora_rank, m_out, RANKS, MAX_RANK)
    tl.store(p_own, b_y.to(p_y.dtype.element_ty), mask=m_out)


def shrink(
    x: Tensor, slices: Sequence[LoraSlice], segments: Segments, table: Tensor, lora_rank: int, *, may_begin: bool = True
) -> PartialLow:
    """See the package; ``table`` has the slices' rows, no rank in use is above ``lora_rank``, and every segment has one
    row: the first of the rows is the first segment's, and so on. ``may_begin``: before the launch ahead has ended,
    which has written none of the segments."""
    max_rank = max(RANKS, power_of_2(lora_rank))
    num_rows, size_in, itemsize = len(segments.rows), x.shape[1], x.element_size()
    row = tiles("sgmv_vector", x.device, tokens=num_rows, rank=max_rank)
    block_k = min(row["block_k"] * 2 // itemsize, max(16, power_of_2(size_in)))  # the tables count bf16
    split = triton.cdiv(size_in, block_k)
    partials = torch.empty((len(slices), split, num_rows, max_rank), dtype=torch.float32, device=x.device)
    _shrink[(split * max_rank // RANKS, segments.num_owned, len(slices))](
        x,
        partials,
        segments.rows,
        segments.table,
        table,
        num_rows,
        x.stride(0),
        SIZE_IN=size_in,
        SPLIT=split,
        BLOCK_K=block_k,
        RANKS=RANKS,
        MAX_RANK=max_rank,
        TRIGGERS=bool(row["pdl"]),
        num_warps=row["shrink_warps"],
        **pdl(may_begin and is_early("shrink", x.device)),
    )
    return PartialLow(tuple(slices), segments, table, lora_rank, partials)


def expand(y: Tensor, low: PartialLow) -> None:
    """See the package."""
    num_slices, split, num_rows, max_rank = low.partials.shape
    row = tiles("sgmv_vector", y.device, tokens=num_rows, rank=max_rank)
    block_n = row["block_n"] * 2 // y.element_size()
    most = max(part.b.shape[2] for part in low.slices)
    _expand[(triton.cdiv(most, block_n), low.segments.num_owned, num_slices)](
        y,
        low.partials,
        low.segments.rows,
        low.segments.table,
        low.table,
        num_rows,
        y.stride(0),
        SPLIT=split,
        SPLITS=power_of_2(split),
        BLOCK_N=block_n,
        RANKS=RANKS,
        MAX_RANK=max_rank,
        ALIGNED=low.is_aligned,
        num_warps=row["expand_warps"],
        **pdl(row["pdl"]),
    )
