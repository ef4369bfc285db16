# pyright: reportIndexIssue=false, reportCallIssue=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false
"""Which adapter each pair has, and the pairs cut into segments of one, made on the device by one launch.

A segment is a run of places of one number, slot · E + expert, that crosses no multiple of ``most_rows``. It stands in
the table at its first place's row, so that no program needs to know another's; all other rows are segments without
places. Pairs of an expert stand in the order of their tokens, so that a chunk's are runs."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.moe.plan import ExpertPlan
from kernels.sgmv.captured import segment_rows
from kernels.sgmv.plan import Segments
from kernels.tiles import early

_PLACES = 128  # of a program: a multiple of any segment's


@triton.jit
def _numbers(
    p_pairs, p_ids, p_slots, o_places, num_real, TOP_K: tl.constexpr, NUM_EXPERTS: tl.constexpr, NUM_SLOTS: tl.constexpr
):
    """The token of each place, 0 where none is, and its number, -1: no adapter."""
    m_real = (o_places >= 0) & (o_places < num_real)
    b_pairs = tl.load(p_pairs + o_places, mask=m_real, other=0)
    b_tokens = b_pairs // TOP_K
    b_slots = tl.load(p_slots + b_tokens, mask=m_real, other=-1)
    b_experts = tl.load(p_ids + b_pairs, mask=m_real, other=0)
    has_one = (b_slots >= 0) & (b_slots < NUM_SLOTS)
    return b_tokens, tl.where(has_one, b_slots * NUM_EXPERTS + b_experts, -1)


@triton.jit(do_not_specialize=["num_rows", "num_pairs"])
def _cut(
    p_pairs,
    p_ids,
    p_slots,
    p_tokens,
    p_places,
    p_table,
    p_num_tokens,
    num_rows,
    num_pairs,
    NUM_EXPERTS: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    TOP_K: tl.constexpr,
    MOST_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if IS_PADDED:
        num_rows = tl.load(p_num_tokens)
    num_real = num_rows * TOP_K
    o_own = tl.arange(0, BLOCK)
    o_places = tl.program_id(0) * BLOCK + o_own
    b_tokens, b_numbers = _numbers(p_pairs, p_ids, p_slots, o_places, num_real, TOP_K, NUM_EXPERTS, NUM_SLOTS)
    b_count = (b_numbers >= 0).to(tl.int32)
    if MOST_ROWS > 1:
        _, b_before = _numbers(p_pairs, p_ids, p_slots, o_places - 1, num_real, TOP_K, NUM_EXPERTS, NUM_SLOTS)
        is_first = (b_numbers != b_before) | (o_places % MOST_ROWS == 0)
        b_run = tl.cumsum(is_first.to(tl.int32), 0)
        b_length = tl.sum((b_run[:, None] == b_run[None, :]).to(tl.int32), 1)
        b_count = tl.where(is_first, b_length * b_count, 0)
    m_places = o_places < num_pairs
    tl.store(p_tokens + o_places, b_tokens, mask=m_places)
    tl.store(p_places + o_places, o_places, mask=m_places)
    p_rows = p_table + o_places * 4
    tl.store(p_rows, o_places, mask=m_places)
    tl.store(p_rows + 1, b_count, mask=m_places)
    tl.store(p_rows + 2, tl.maximum(b_numbers, 0), mask=m_places)


def cut_pairs(plan: ExpertPlan, row_slots: Tensor, num_slots: int) -> tuple[Segments, Segments]:
    """row_slots [T] int32: the slot of each token, -1 = none → the segments of CutPairs."""
    tiled, num_pairs, device = plan.tiled, len(plan.pairs), row_slots.device
    assert tiled is not None
    assert row_slots.dtype == torch.int32, row_slots.dtype
    most_rows = segment_rows(len(row_slots))
    tokens, places = (torch.empty(num_pairs, dtype=torch.int32, device=device) for _ in range(2))
    table = torch.empty((num_pairs, 4), dtype=torch.int32, device=device)
    if num_pairs:
        _cut[(triton.cdiv(num_pairs, _PLACES),)](
            plan.pairs,
            tiled.topk_ids,
            row_slots,
            tokens,
            places,
            table,
            plan.pairs if tiled.num_tokens is None else tiled.num_tokens,
            len(row_slots),
            num_pairs,
            NUM_EXPERTS=len(plan.counts),
            NUM_SLOTS=num_slots,
            TOP_K=plan.top_k,
            MOST_ROWS=most_rows,
            BLOCK=_PLACES,
            IS_PADDED=tiled.num_tokens is not None,
            num_warps=4,
            **early("moe", device),
        )
    return Segments(tokens, table, num_pairs, most_rows), Segments(places, table, num_pairs, most_rows)
