# pyright: reportIndexIssue=false, reportCallIssue=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false
"""For prompts; a decode takes triton_vector.py. Two launches for all slices of a projection: shrink stores its sums
over parts of ``in`` (split-K), expand adds them in their order, multiplies by B and adds the result to y. No atomics,
nothing to clear before.

Rows stand sorted by slot in segments of at most BLOCK_M of one slot (plan.py); a slot is read at its own rank. The
shrunk row is split into two numbers of the weights' dtype, so that the tensor cores lose nothing of it.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.sgmv import triton_vector
from kernels.sgmv.low import LoraSlice, PartialLow
from kernels.sgmv.plan import Segments, SgmvPlan
from kernels.sgmv.triton_tables import a_of, columns_of, rank_of, rows_at, segment_at, slice_at, slice_table, tile_of_b
from kernels.tiles import is_early, pdl, power_of_2, tiles

_MOST_PROGRAMS = 1 << 15  # of a grid's second axis, which ends at 65535; a multiple keeps the table aligned


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
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr,
    TRIGGERS: tl.constexpr,
    PDL: tl.constexpr,
):
    """partials [slices, SPLIT, num_rows, BLOCK_R] fp32 by sorted row; a slot's own ranks are written, rounded up to
    a multiple of 8 with zeros, so that expand may load vectors."""
    if TRIGGERS:
        tl.extra.cuda.gdc_launch_dependents()
    if PDL:
        tl.extra.cuda.gdc_wait()
    i_slice = tl.program_id(0).to(tl.int64)  # the slices of a segment run together, since they read the same rows
    i_segment = tl.program_id(1).to(tl.int64)
    i_split = tl.program_id(2).to(tl.int64)
    first_row, num_own, i_slot = segment_at(p_segments, i_segment)
    p_slice = slice_at(p_slices, i_slice)
    lora_rank = rank_of(p_slice, i_slot)
    if (lora_rank == 0) | (num_own == 0):
        return
    p_a, num_ranks = a_of(p_slice, p_x)
    i_rows, m_rows = rows_at(p_rows, first_row, num_own, BLOCK_M)
    o_ranks = tl.arange(0, BLOCK_R)
    m_ranks = o_ranks < lora_rank
    o_a = (i_slot * num_ranks + o_ranks) * SIZE_IN
    PART: tl.constexpr = (SIZE_IN + SPLIT * BLOCK_K - 1) // (SPLIT * BLOCK_K) * BLOCK_K
    first = i_split * PART
    b_low = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    for i_step in range(PART // BLOCK_K):
        o_in = first + i_step * BLOCK_K + tl.arange(0, BLOCK_K)
        m_in = o_in < SIZE_IN if SIZE_IN % (SPLIT * BLOCK_K) else tl.full((BLOCK_K,), True, tl.int1)
        b_x = tl.load(
            p_x + (i_rows * stride_x)[:, None] + o_in[None, :], mask=m_rows[:, None] & m_in[None, :], other=0.0
        )
        b_a = tl.load(p_a + o_a[:, None] + o_in[None, :], mask=m_ranks[:, None] & m_in[None, :], other=0.0)
        b_low = tl.dot(b_x, tl.trans(b_a), b_low, input_precision=PRECISION)
    i_out = (i_slice * SPLIT + i_split) * num_rows + first_row + tl.arange(0, BLOCK_M)
    m_low = m_rows[:, None] & (o_ranks < tl.cdiv(lora_rank, 8) * 8)[None, :]
    tl.store(p_partials + i_out[:, None] * BLOCK_R + o_ranks[None, :], b_low, mask=m_low)


@triton.jit
def add_product(b_y, p_partials, b_b, i_low, m_low, BLOCK_R: tl.constexpr, PRECISION: tl.constexpr):
    """b_y [rows, columns] and what the rows' low ranks add to it: the sums over the first axis of partials' rows
    ``i_low`` [parts, rows], where ``m_low`` [rows, ranks], times B."""
    p_low = p_partials + i_low[:, :, None] * BLOCK_R + tl.arange(0, BLOCK_R)[None, None, :]
    b_low = tl.sum(tl.load(p_low, mask=m_low[None, :, :], other=0.0), 0)
    b_high = b_low.to(b_b.dtype)
    b_y = tl.dot(b_high, b_b, b_y, input_precision=PRECISION)
    if b_b.dtype != tl.float32:
        b_y = tl.dot((b_low - b_high.to(tl.float32)).to(b_b.dtype), b_b, b_y, input_precision=PRECISION)
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    i_column = tl.program_id(0).to(tl.int64) * BLOCK_N
    i_segment = tl.program_id(1).to(tl.int64)
    i_slice = tl.program_id(2).to(tl.int64)
    p_slice = slice_at(p_slices, i_slice)
    first_row, num_own, i_slot = segment_at(p_segments, i_segment)
    lora_rank = rank_of(p_slice, i_slot)
    start, num_columns = columns_of(p_slice, ALIGNED)
    if (lora_rank == 0) | (num_own == 0) | (i_column >= num_columns):
        if PDL:
            tl.extra.cuda.gdc_wait()
        return
    i_rows, m_rows = rows_at(p_rows, first_row, num_own, BLOCK_M)
    o_out = i_column + tl.arange(0, BLOCK_N)
    _, b_b, size_out = tile_of_b(p_slice, p_y, i_slot, lora_rank, o_out, BLOCK_R, ALIGNED)
    if PDL:
        tl.extra.cuda.gdc_wait()
    p_own = p_y + (i_rows * stride_y)[:, None] + (start + o_out)[None, :]
    m_own = m_rows[:, None] & (o_out < size_out)[None, :]
    b_y = tl.load(p_own, mask=m_own, other=0.0).to(tl.float32)
    i_low = ((i_slice * SPLIT + tl.arange(0, SPLIT)) * num_rows + first_row)[:, None] + tl.arange(0, BLOCK_M)[None, :]
    m_low = m_rows[:, None] & (tl.arange(0, BLOCK_R) < tl.cdiv(lora_rank, 8) * 8)[None, :]
    b_y = add_product(b_y, p_partials, b_b, i_low, m_low, BLOCK_R, PRECISION)
    tl.store(p_own, b_y.to(p_y.dtype.element_ty), mask=m_own)


def shrink(x: Tensor, slices: Sequence[LoraSlice], plan: SgmvPlan) -> PartialLow | None:
    """See the package; a, b and x have one dtype."""
    _check(x, slices)
    lora_rank = max((part.lora_ranks[slot] for part in slices for slot in plan.rows_of_slot), default=0)
    if not lora_rank:
        return None
    table = slice_table(slices, x.device)
    if plan.is_sparse(tiles("sgmv_form", x.device, tokens=plan.num_rows)["rows_of_slot"]):
        return triton_vector.shrink(x, slices, plan.segments(1), table, lora_rank)
    segments = plan.segments(tiles("sgmv_shrink", x.device, tokens=plan.num_rows, rank=lora_rank)["block_m"])
    return _shrink_segments(x, slices, segments, table, lora_rank)


def shrink_segments(x: Tensor, slices: Sequence[LoraSlice], segments: Segments, lora_rank: int) -> PartialLow:
    """See the package. The device may still be at work on the segments, so nothing begins before it has done."""
    _check(x, slices)
    shrink_form = triton_vector.shrink if segments.most_rows == 1 else _shrink_segments
    return shrink_form(x, slices, segments, slice_table(slices, x.device), lora_rank, may_begin=False)


def _check(x: Tensor, slices: Sequence[LoraSlice]) -> None:
    for part in slices:
        assert part.a.dtype == part.b.dtype == x.dtype, (part.a.dtype, part.b.dtype, x.dtype)
        assert part.a.is_contiguous(), part.a.stride()
        assert part.b.is_contiguous(), part.b.stride()
        assert part.a.data_ptr() % 16 == part.b.data_ptr() % 16 == 0
    assert x.stride(1) == 1, x.stride()


def expand(y: Tensor, low: PartialLow) -> None:
    """See the package; y has the dtype of x."""
    assert y.dtype == low.slices[0].b.dtype, (y.dtype, low.slices[0].b.dtype)
    assert y.stride(1) == 1, y.stride()
    if low.segments.most_rows == 1:
        triton_vector.expand(y, low)
    else:
        _expand_segments(y, low)


def _shrink_segments(
    x: Tensor, slices: Sequence[LoraSlice], segments: Segments, table: Tensor, lora_rank: int, *, may_begin: bool = True
) -> PartialLow:
    row = tiles("sgmv_shrink", x.device, tokens=len(segments.rows), rank=lora_rank)
    num_rows, split, block_r = len(segments.rows), row["split"], max(16, power_of_2(lora_rank))
    partials = torch.empty((len(slices), split, num_rows, block_r), dtype=torch.float32, device=x.device)
    for own in _launched(segments):
        _shrink[(len(slices), len(own), split)](
            x,
            partials,
            segments.rows,
            own,
            table,
            num_rows,
            x.stride(0),
            SIZE_IN=x.shape[1],
            SPLIT=split,
            BLOCK_M=segments.most_rows,
            BLOCK_K=row["block_k"] * 2 // x.element_size(),  # the tables count bf16
            BLOCK_R=block_r,
            PRECISION="tf32x3" if x.dtype == torch.float32 else "tf32",
            TRIGGERS=bool(_expand_row(x, num_rows, lora_rank)["pdl"]),
            num_warps=row["num_warps"],
            num_stages=row["num_stages"],
            **pdl(may_begin and is_early("shrink", x.device)),
        )
    return PartialLow(tuple(slices), segments, table, lora_rank, partials)


def _expand_segments(y: Tensor, low: PartialLow) -> None:
    num_slices, split, num_rows, block_r = low.partials.shape
    row = _expand_row(y, num_rows, low.lora_rank)
    most = max(part.b.shape[2] for part in low.slices)
    for own in _launched(low.segments):
        _expand[(triton.cdiv(most, row["block_n"]), len(own), num_slices)](
            y,
            low.partials,
            low.segments.rows,
            own,
            low.table,
            num_rows,
            y.stride(0),
            SPLIT=split,
            BLOCK_M=low.segments.most_rows,
            BLOCK_N=row["block_n"],
            BLOCK_R=block_r,
            ALIGNED=low.is_aligned,
            PRECISION="tf32x3" if y.dtype == torch.float32 else "tf32",
            num_warps=row["num_warps"],
            num_stages=1,
            **pdl(row["pdl"]),
        )


def _launched(segments: Segments) -> tuple[Tensor, ...]:
    """The table in pieces of what one launch may have."""
    return segments.table[: segments.num_owned].split(_MOST_PROGRAMS)


def _expand_row(like: Tensor, num_rows: int, lora_rank: int) -> dict[str, int]:
    return tiles("sgmv_expand", like.device, tokens=num_rows, rank=lora_rank)
