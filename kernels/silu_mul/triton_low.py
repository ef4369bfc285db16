# pyright: reportIndexIssue=false, reportCallIssue=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false
"""gate and up get what adapters add to them on their way: that saves the launch that would add it, and reading and
writing them once more. Two forms, as ``sgmv`` has: each row by itself, or segments of rows of one slot by the tensor
cores. Rows without an adapter are computed as triton_kernel.py does, to the last bit.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.sgmv import PartialLow
from kernels.sgmv.triton_kernel import add_product
from kernels.sgmv.triton_tables import rank_of, rows_at, segment_at, slice_at, tile_of_b
from kernels.sgmv.triton_vector import RANKS, add_ranks
from kernels.silu_mul.triton_kernel import silu_times
from kernels.tiles import early, is_early, power_of_2, tiles


@triton.jit
def _rank_of(p_slices, i_slot, SLICE: tl.constexpr):
    """Of a slot in a slice; 0 for a slice or a slot of -1."""
    lora_rank = 0
    if SLICE >= 0:
        lora_rank = tl.where(i_slot < 0, 0, rank_of(slice_at(p_slices, SLICE), tl.maximum(i_slot, 0)))
    return lora_rank


@triton.jit(do_not_specialize=["num_rows"])
def _by_rows(
    p_gate_up,
    p_out,
    p_partials,
    p_rows,
    p_segments,
    p_slices,
    num_rows,
    stride_row,
    SIZE: tl.constexpr,
    GATE: tl.constexpr,
    UP: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    RANKS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    ALIGNED: tl.constexpr,
    TRIGGERS: tl.constexpr,
    PDL: tl.constexpr,
):
    """GATE and UP: the numbers of their slices, -1: no adapter has it."""
    if TRIGGERS:
        tl.extra.cuda.gdc_launch_dependents()
    o_size = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    i_place = tl.program_id(1).to(tl.int64)
    _, num_own, i_slot = segment_at(p_segments, i_place)
    if num_own == 0:
        if PDL:
            tl.extra.cuda.gdc_wait()
        return
    i_row = tl.load(p_rows + i_place).to(tl.int64)
    m_size = o_size < SIZE
    gate_rank = _rank_of(p_slices, i_slot, GATE)
    up_rank = _rank_of(p_slices, i_slot, UP)
    if GATE >= 0:
        p_gate, b_gate_b, gate_size = tile_of_b(
            slice_at(p_slices, GATE), p_gate_up, i_slot, gate_rank, o_size, RANKS, ALIGNED
        )
    if UP >= 0:
        p_up, b_up_b, up_size = tile_of_b(slice_at(p_slices, UP), p_gate_up, i_slot, up_rank, o_size, RANKS, ALIGNED)
    if PDL:
        tl.extra.cuda.gdc_wait()
    p_row = p_gate_up + i_row * stride_row + o_size
    b_gate = tl.load(p_row, mask=m_size, other=0.0).to(tl.float32)
    b_up = tl.load(p_row + SIZE, mask=m_size, other=0.0).to(tl.float32)
    o_splits = tl.arange(0, SPLITS)
    m_low = o_splits < SPLIT
    if GATE >= 0:
        i_low = (GATE * SPLIT + o_splits).to(tl.int64) * num_rows + i_place
        b_gate = add_ranks(
            b_gate, p_partials, p_gate, b_gate_b, gate_size, i_low, m_low, gate_rank, m_size, RANKS, MAX_RANK
        )
    if UP >= 0:
        i_low = (UP * SPLIT + o_splits).to(tl.int64) * num_rows + i_place
        b_up = add_ranks(b_up, p_partials, p_up, b_up_b, up_size, i_low, m_low, up_rank, m_size, RANKS, MAX_RANK)
    tl.store(p_out + i_row * SIZE + o_size, silu_times(b_gate, b_up).to(p_out.dtype.element_ty), mask=m_size)


@triton.jit
def _part_of_segment(
    p_from,
    p_like,
    p_partials,
    p_slices,
    i_slot,
    i_places,
    m_rows,
    o_size,
    num_rows,
    SIZE: tl.constexpr,
    SLICE: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """What stands at ``p_from`` [rows, columns], and what the adapter adds to it, fp32."""
    b_y = tl.load(p_from, mask=m_rows[:, None] & (o_size < SIZE)[None, :], other=0.0).to(tl.float32)
    if SLICE >= 0:
        lora_rank = _rank_of(p_slices, i_slot, SLICE)
        if lora_rank > 0:
            _, b_b, _ = tile_of_b(slice_at(p_slices, SLICE), p_like, i_slot, lora_rank, o_size, BLOCK_R, ALIGNED)
            i_low = (SLICE * SPLIT + tl.arange(0, SPLIT)).to(tl.int64)[:, None] * num_rows + i_places[None, :]
            m_low = m_rows[:, None] & (tl.arange(0, BLOCK_R) < tl.cdiv(lora_rank, 8) * 8)[None, :]
            b_y = add_product(b_y, p_partials, b_b, i_low, m_low, BLOCK_R, PRECISION)
    return b_y


@triton.jit(do_not_specialize=["num_rows"])
def _by_segments(
    p_gate_up,
    p_out,
    p_partials,
    p_rows,
    p_segments,
    p_slices,
    num_rows,
    stride_row,
    SIZE: tl.constexpr,
    GATE: tl.constexpr,
    UP: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr,
    TRIGGERS: tl.constexpr,
    PDL: tl.constexpr,
):
    if TRIGGERS:
        tl.extra.cuda.gdc_launch_dependents()
    if PDL:
        tl.extra.cuda.gdc_wait()
    o_size = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    i_segment = tl.program_id(1).to(tl.int64)
    first_row, num_own, i_slot = segment_at(p_segments, i_segment)
    if num_own == 0:
        return
    i_rows, m_rows = rows_at(p_rows, first_row, num_own, BLOCK_M)
    i_places = first_row + tl.arange(0, BLOCK_M)
    p_from = p_gate_up + (i_rows * stride_row)[:, None] + o_size[None, :]
    b_gate = _part_of_segment(
        p_from, p_gate_up, p_partials, p_slices, i_slot, i_places, m_rows, o_size, num_rows,
        SIZE, GATE, SPLIT, BLOCK_R, ALIGNED, PRECISION,
    )  # fmt: skip
    b_up = _part_of_segment(
        p_from + SIZE, p_gate_up, p_partials, p_slices, i_slot, i_places, m_rows, o_size, num_rows,
        SIZE, UP, SPLIT, BLOCK_R, ALIGNED, PRECISION,
    )  # fmt: skip
    p_own = p_out + (i_rows * SIZE)[:, None] + o_size[None, :]
    m_own = m_rows[:, None] & (o_size < SIZE)[None, :]
    tl.store(p_own, silu_times(b_gate, b_up).to(p_out.dtype.element_ty), mask=m_own)


def silu_mul(gate_up: Tensor, low: PartialLow) -> Tensor:
    """See the package; the columns must be dense, and each slice one half of them."""
    size = gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1, gate_up.stride()
    assert gate_up.dtype == low.slices[0].b.dtype, (gate_up.dtype, low.slices[0].b.dtype)
    assert all(part.start in (0, size) and part.b.shape[2] == size for part in low.slices), low.slices
    out = torch.empty((gate_up.shape[0], size), dtype=gate_up.dtype, device=gate_up.device)
    if low.segments.most_rows == 1:
        _launch_by_rows(gate_up, out, low)
    else:
        _launch_by_segments(gate_up, out, low)
    return out


def _places_of_halves(low: PartialLow, size: int) -> tuple[int, int]:
    """The numbers of gate's and up's slices."""
    starts = [part.start for part in low.slices]
    gate, up = (starts.index(start) if start in starts else -1 for start in (0, size))
    return gate, up


def _launch_by_rows(gate_up: Tensor, out: Tensor, low: PartialLow) -> None:
    (num_rows, size), (_, split, _, max_rank) = out.shape, low.partials.shape
    row = tiles("silu_low_vector", out.device, tokens=num_rows, rank=max_rank)
    block_n = min(row["block_n"] * 2 // out.element_size(), power_of_2(size))  # the tables count bf16
    gate, up = _places_of_halves(low, size)
    _by_rows[(triton.cdiv(size, block_n), len(low.segments.table))](
        gate_up,
        out,
        low.partials,
        low.segments.rows,
        low.segments.table,
        low.table,
        num_rows,
        gate_up.stride(0),
        SIZE=size,
        GATE=gate,
        UP=up,
        SPLIT=split,
        SPLITS=power_of_2(split),
        BLOCK_N=block_n,
        RANKS=RANKS,
        MAX_RANK=max_rank,
        ALIGNED=low.is_aligned,
        num_warps=row["num_warps"],
        TRIGGERS=is_early("shrink", out.device),
        **early("silu_mul", out.device),
    )


def _launch_by_segments(gate_up: Tensor, out: Tensor, low: PartialLow) -> None:
    (num_rows, size), (_, split, _, block_r) = out.shape, low.partials.shape
    row = tiles("silu_low_matrix", out.device, tokens=num_rows, rank=low.lora_rank)
    gate, up = _places_of_halves(low, size)
    block_n = row["block_n"] * 2 // out.element_size()  # the tables count bf16
    _by_segments[(triton.cdiv(size, block_n), len(low.segments.table))](
        gate_up,
        out,
        low.partials,
        low.segments.rows,
        low.segments.table,
        low.table,
        num_rows,
        gate_up.stride(0),
        SIZE=size,
        GATE=gate,
        UP=up,
        SPLIT=split,
        BLOCK_M=low.segments.most_rows,
        BLOCK_N=block_n,
        BLOCK_R=block_r,
        ALIGNED=low.is_aligned,
        PRECISION="tf32x3" if out.dtype == torch.float32 else "tf32",
        num_warps=row["num_warps"],
        num_stages=1,
        TRIGGERS=is_early("shrink", out.device),
        **early("silu_mul", out.device),
    )
