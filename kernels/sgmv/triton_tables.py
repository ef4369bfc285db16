# pyright: reportIndexIssue=false, reportCallIssue=false, reportAttributeAccessIssue=false
"""How a launch finds its rows and their adapters: plan.py's table of segments, and a table of the slices that stand for
one projection. Every kernel that adds adapters reads both by these functions."""

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.sgmv.low import LoraSlice

_COLUMNS = 8  # int64 of a slice's row: pointers to a, b and ranks; start, out, num_ranks


@triton.jit
def segment_at(p_segments, i_segment):
    """Where in the sorted rows a segment begins, its number of rows (0: none) and its slot (-1: none)."""
    p_own = p_segments + i_segment * 4
    return tl.load(p_own), tl.load(p_own + 1), tl.load(p_own + 2).to(tl.int64)


@triton.jit
def rows_at(p_rows, first, num_own, ROWS: tl.constexpr):
    """The rows of a segment, and which of ROWS there are."""
    o_rows = tl.arange(0, ROWS)
    m_rows = o_rows < num_own
    return tl.load(p_rows + first + o_rows, mask=m_rows, other=0).to(tl.int64), m_rows


@triton.jit
def slice_at(p_slices, i_slice):
    """A slice's row, which the functions below read."""
    return p_slices + i_slice * 8  # _COLUMNS


@triton.jit
def rank_of(p_slice, i_slot):
    """Of a slot in a slice; 0: it has none there."""
    p_ranks = tl.load(p_slice + 2).to(tl.pointer_type(tl.int32))
    return tl.load(p_ranks + i_slot)


@triton.jit
def rank_if_any(p_slices, i_slice, i_slot):
    """``rank_of``; 0 for a slice or a slot of -1."""
    lora_rank = rank_of(slice_at(p_slices, tl.maximum(i_slice, 0)), tl.maximum(i_slot, 0))
    return tl.where((i_slice < 0) | (i_slot < 0), 0, lora_rank)


@triton.jit
def a_of(p_slice, p_like):
    """A of a slice, which has the dtype of ``p_like``, and how many ranks a slot has room for."""
    p_a = tl.multiple_of(tl.load(p_slice).to(tl.pointer_type(p_like.dtype.element_ty)), 16)  # bytes
    return p_a, tl.load(p_slice + 5)


@triton.jit
def columns_of(p_slice, ALIGNED: tl.constexpr):
    """The column of y in which a slice begins, and how many it has. ALIGNED: see PartialLow."""
    start = tl.load(p_slice + 3)
    if ALIGNED:
        start = tl.multiple_of(start, 16)
    return start, tl.load(p_slice + 4)


@triton.jit
def tile_of_b(p_slice, p_like, i_slot, lora_rank, o_out, RANKS: tl.constexpr, ALIGNED: tl.constexpr):
    """B's first RANKS ranks of a slice's columns ``o_out``: where they stand, they, and the ranks' distance. B has the
    dtype of ``p_like``; what is past the slot's rank or the slice's columns is zero. ALIGNED: see PartialLow."""
    p_b = tl.multiple_of(tl.load(p_slice + 1).to(tl.pointer_type(p_like.dtype.element_ty)), 16)  # bytes
    size_out = tl.load(p_slice + 4)
    num_ranks = tl.load(p_slice + 5)
    if ALIGNED:
        size_out = tl.multiple_of(size_out, 16)
    o_ranks = tl.arange(0, RANKS)
    p_tile = p_b + ((i_slot * num_ranks + o_ranks) * size_out)[:, None] + o_out[None, :]
    m_tile = (o_ranks < lora_rank)[:, None] & (o_out < size_out)[None, :]
    return p_tile, tl.load(p_tile, mask=m_tile, other=0.0), size_out


def slice_table(slices: Sequence[LoraSlice], device: torch.device) -> Tensor:
    """[slices, columns] int64."""
    return _table(tuple(map(_row, slices)), device)


def _row(part: LoraSlice) -> tuple[int, ...]:
    ranks = _rank_table(part.lora_ranks, part.a.device) if part.rank_table is None else part.rank_table
    return (part.a.data_ptr(), part.b.data_ptr(), ranks.data_ptr(), part.start, part.b.shape[2], part.a.shape[1])


@lru_cache(maxsize=4096)
def _rank_table(lora_ranks: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(lora_ranks, dtype=torch.int32, device=device)


@lru_cache(maxsize=4096)
def _table(rows: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    """All that it holds is its key, so it is never stale."""
    return torch.tensor([(*row, *(0,) * (_COLUMNS - len(row))) for row in rows], dtype=torch.int64, device=device)
