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

from kernels.sgmv import LoraSlice
from kernels.sgmv.plan import Segments
from kernels.tiles import power_of_2, tiles

RANKS = 16  # of a tile


@triton.jit
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
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """partials [slices, SPLIT, num_rows, MAX_RANK] fp32 by sorted row; whole tiles of ranks are written."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    i_part = tl.program_id(0).to(tl.int64)
    i_split = i_part % SPLIT
    i_ranks = i_part // SPLIT * RANKS
    i_place = tl.program_id(1).to(tl.int64)
    i_slice = tl.program_id(2).to(tl.int64)
    p_slice = p_slices + i_slice * COLUMNS
    num_own = tl.load(p_segments + i_place * 4 + 1)
    i_slot = tl.load(p_segments + i_place * 4 + 2).to(tl.int64)
    i_row = tl.load(p_rows + i_place).to(tl.int64)
    p_a = tl.multiple_of(tl.load(p_slice).to(tl.pointer_type(p_x.dtype.element_ty)), 16)  # bytes
    p_ranks = tl.load(p_slice + 2).to(tl.pointer_type(tl.int32))
    num_ranks = tl.load(p_slice + 5)
    if num_own == 0:
        return
    lora_rank = tl.load(p_ranks + i_slot)
    if i_ranks >= lora_rank:
        return
    o_ranks = i_ranks + tl.arange(0, RANKS)
    o_in = i_split * BLOCK_K + tl.arange(0, BLOCK_K)
    m_in = o_in < SIZE_IN if SIZE_IN % BLOCK_K else tl.full((BLOCK_K,), True, tl.int1)
    p_tile = p_a + ((i_slot * num_ranks + o_ranks) * SIZE_IN)[:, None] + o_in[None, :]
    b_a = tl.load(p_tile, mask=(o_ranks < lora_rank)[:, None] & m_in[None, :], other=0.0)
    b_x = tl.load(p_x + i_row * stride_x + o_in, mask=m_in, other=0.0)
    b_low = tl.sum(b_a.to(tl.float32) * b_x.to(tl.float32)[None, :], 1)
    i_out = (i_slice * SPLIT + i_split) * num_rows + i_place
    tl.store(p_partials + i_out * MAX_RANK + o_ranks, b_low)


@triton.jit
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
    COLUMNS: tl.constexpr,
    ALIGNED: tl.constexpr,
    PDL: tl.constexpr,
):
    """ALIGNED: every slice begins and ends at a multiple of 16 columns, in y and in b."""
    i_column = tl.program_id(0).to(tl.int64) * BLOCK_N
    i_place = tl.program_id(1).to(tl.int64)
    i_slice = tl.program_id(2).to(tl.int64)
    p_slice = p_slices + i_slice * COLUMNS
    num_own = tl.load(p_segments + i_place * 4 + 1)
    i_slot = tl.load(p_segments + i_place * 4 + 2).to(tl.int64)
    i_row = tl.load(p_rows + i_place).to(tl.int64)
    p_b = tl.multiple_of(tl.load(p_slice + 1).to(tl.pointer_type(p_y.dtype.element_ty)), 16)  # bytes
    p_ranks = tl.load(p_slice + 2).to(tl.pointer_type(tl.int32))
    start = tl.load(p_slice + 3)
    size_out = tl.load(p_slice + 4)
    num_ranks = tl.load(p_slice + 5)
    if ALIGNED:
        start = tl.multiple_of(start, 16)
        size_out = tl.multiple_of(size_out, 16)
    if (num_own == 0) | (i_column >= size_out):
        return
    lora_rank = tl.load(p_ranks + i_slot)
    if lora_rank == 0:
        return
    o_ranks = tl.arange(0, RANKS)
    o_splits = tl.arange(0, SPLITS)
    i_low = (i_slice * SPLIT + o_splits) * num_rows + i_place
    o_out = i_column + tl.arange(0, BLOCK_N)
    m_out = o_out < size_out
    m_splits = (o_splits < SPLIT)[:, None] & (o_ranks < RANKS)[None, :]
    p_tile = p_b + ((i_slot * num_ranks + o_ranks) * size_out)[:, None] + o_out[None, :]
    b_b = tl.load(p_tile, mask=(o_ranks < lora_rank)[:, None] & m_out[None, :], other=0.0)
    p_own = p_y + i_row * stride_y + start + o_out
    b_y = tl.load(p_own, mask=m_out, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for i_ranks in range(0, lora_rank, RANKS):
        p_low = p_partials + i_low[:, None] * MAX_RANK + (i_ranks + o_ranks)[None, :]
        b_low = tl.sum(tl.load(p_low, mask=m_splits, other=0.0), 0)
        b_y += tl.sum(b_b.to(tl.float32) * b_low[:, None], 0)
        p_tile += RANKS * size_out
        m_next = (i_ranks + RANKS + o_ranks < lora_rank)[:, None] & m_out[None, :]
        b_b = tl.load(p_tile, mask=m_next, other=0.0)
    tl.store(p_own, b_y.to(p_y.dtype.element_ty), mask=m_out)


def sgmv(y: Tensor, x: Tensor, slices: Sequence[LoraSlice], segments: Segments, table: Tensor, lora_rank: int) -> None:
    """See the package; ``table`` has the slices' rows, no rank in use is above ``lora_rank``, and every segment has one
    row: the first of the rows is the first segment's, and so on."""
    max_rank = max(RANKS, power_of_2(lora_rank))
    (num_rows, size_in), itemsize = x.shape, x.element_size()
    row = tiles("sgmv_vector", x.device, tokens=num_rows, rank=max_rank)
    block_k = min(row["block_k"] * 2 // itemsize, max(16, power_of_2(size_in)))  # the tables count bf16
    split = triton.cdiv(size_in, block_k)
    block_n = row["block_n"] * 2 // itemsize
    partials = torch.empty((len(slices), split, num_rows, max_rank), dtype=torch.float32, device=x.device)
    columns, num_segments = table.shape[1], len(segments.table)
    _shrink[(split * max_rank // RANKS, num_segments, len(slices))](
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
        COLUMNS=columns,
        PDL=bool(row["pdl"]),
        num_warps=row["shrink_warps"],
    )
    most = max(part.b.shape[2] for part in slices)
    _expand[(triton.cdiv(most, block_n), num_segments, len(slices))](
        y,
        partials,
        segments.rows,
        segments.table,
        table,
        num_rows,
        y.stride(0),
        SPLIT=split,
        SPLITS=power_of_2(split),
        BLOCK_N=block_n,
        RANKS=RANKS,
        MAX_RANK=max_rank,
        COLUMNS=columns,
        ALIGNED=all(part.start % 16 == 0 and part.b.shape[2] % 16 == 0 for part in slices),
        PDL=bool(row["pdl"]),
        num_warps=row["expand_warps"],
        **({"launch_pdl": True} if row["pdl"] else {}),
        **({"maxnreg": row["expand_registers"]} if "expand_registers" in row else {}),
    )
