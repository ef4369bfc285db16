# pyright: reportIndexIssue=false, reportCallIssue=false, reportAttributeAccessIssue=false
"""The order of a step's pairs, made on the device by one launch: a program an expert, which reads all ids. So nothing
is added up by two, the order is stable, and no launch waits for another."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.moe.plan import ExpertPlan, Tiled
from kernels.tiles import early, tiles

_MOST_COMPACT = 128  # pairs: each is compared with each
_BLOCK = 2048  # pairs that a program reads at a time otherwise
_COLUMNS = 4  # of the table of tiles


@triton.jit
def tile_at(p_table, i_tile):
    """Expert, first place, number of places (0: none)."""
    p_own = p_table + i_tile * 4  # _COLUMNS
    return tl.load(p_own).to(tl.int64), tl.load(p_own + 1).to(tl.int64), tl.load(p_own + 2)


@triton.jit
def _tiles_before(b_ids, own, BLOCK: tl.constexpr, BLOCK_M: tl.constexpr):
    """Tiles of the experts below ``own``: of an expert's pairs every BLOCK_M-th begins one."""
    o_pairs = tl.arange(0, BLOCK)
    is_earlier = (b_ids[:, None] == b_ids[None, :]) & (o_pairs[None, :] < o_pairs[:, None])
    b_rank = tl.sum(is_earlier.to(tl.int32), 1)
    return tl.sum(((b_ids < own) & (b_rank % BLOCK_M == 0)).to(tl.int32), 0)


@triton.jit
def _write_tiles(p_table, first_tile, end_tile, own, start, count, BLOCK_M: tl.constexpr):
    """The table's rows of one expert, those past its last pair empty."""
    AT_ONCE: tl.constexpr = 32  # pyright: ignore[reportAssignmentType]
    for first in range(0, end_tile - first_tile, AT_ONCE):
        o_tiles = first + tl.arange(0, AT_ONCE)
        b_num = tl.minimum(tl.maximum(count - o_tiles * BLOCK_M, 0), BLOCK_M)
        p_rows = p_table + (first_tile + o_tiles) * 4  # _COLUMNS
        m_tiles = first_tile + o_tiles < end_tile
        tl.store(p_rows, tl.where(b_num > 0, own, -1), mask=m_tiles)
        tl.store(p_rows + 1, start + o_tiles * BLOCK_M, mask=m_tiles)
        tl.store(p_rows + 2, b_num, mask=m_tiles)


@triton.jit(do_not_specialize=["num_rows", "num_tiles"])
def _plan(
    p_ids,
    p_pairs,
    p_places,
    p_counts,
    p_totals,
    p_table,
    p_num_tokens,
    num_rows,
    num_tiles,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_COMPACT: tl.constexpr,
    HAS_TOTALS: tl.constexpr,
    IS_PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    """IS_COMPACT: BLOCK holds all pairs, and no tile between two experts is empty. Else an expert's tiles begin at its
    number + its first place / BLOCK_M, which leaves room for all of them without knowing any other's."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    i_expert = tl.program_id(0).to(tl.int64)
    own = i_expert.to(tl.int32)
    if IS_PADDED:
        num_rows = tl.load(p_num_tokens)
    num_real = num_rows * TOP_K
    o_pairs = tl.arange(0, BLOCK)
    b_below, b_own = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32)
    for first in range(0, num_real, BLOCK):
        b_ids = tl.load(p_ids + first + o_pairs, mask=first + o_pairs < num_real, other=NUM_EXPERTS)
        b_below += (b_ids < own).to(tl.int32)
        b_own += (b_ids == own).to(tl.int32)
    start, count = tl.sum(b_below, 0), tl.sum(b_own, 0)
    tl.store(p_counts + i_expert, count.to(tl.int64))
    if HAS_TOTALS:
        tl.store(p_totals + i_expert, tl.load(p_totals + i_expert) + count)
    place = start
    for first in range(0, num_real, BLOCK):
        b_ids = tl.load(p_ids + first + o_pairs, mask=first + o_pairs < num_real, other=NUM_EXPERTS)
        m_own = b_ids == own
        b_places = place + tl.cumsum(m_own.to(tl.int32), 0) - 1
        tl.store(p_pairs + b_places, first + o_pairs, mask=m_own)
        tl.store(p_places + first + o_pairs, b_places, mask=m_own)
        place += tl.sum(m_own.to(tl.int32), 0)
    if IS_COMPACT:
        b_all = tl.load(p_ids + o_pairs, mask=o_pairs < num_real, other=NUM_EXPERTS)
        first_tile = _tiles_before(b_all, own, BLOCK, BLOCK_M)
        end_tile = first_tile + (count + BLOCK_M - 1) // BLOCK_M
    else:
        first_tile = own + start // BLOCK_M
        end_tile = own + 1 + (start + count) // BLOCK_M
    end_tile = tl.where(own == NUM_EXPERTS - 1, num_tiles, end_tile)
    _write_tiles(p_table, first_tile, end_tile, own, start, count, BLOCK_M)


def most_tiles(num_pairs: int, num_experts: int, block_m: int) -> int:
    """So many tiles of ``block_m`` places hold any routing."""
    loose = num_pairs // block_m + num_experts
    return min(num_pairs, loose) if num_pairs <= _MOST_COMPACT else loose


def plan_experts(topk_ids: Tensor, num_experts: int, totals: Tensor | None, num_tokens: Tensor | None) -> ExpertPlan:
    """See the package; ``topk_ids`` int32."""
    assert topk_ids.dtype == torch.int32, topk_ids.dtype
    assert topk_ids.is_contiguous(), topk_ids.stride()
    device, (num_rows, top_k) = topk_ids.device, topk_ids.shape
    num_pairs = num_rows * top_k
    block_m = tiles("moe_plan", device, pairs=-(-num_pairs // num_experts))["block_m"]
    pairs, places = (torch.empty(num_pairs, dtype=torch.int32, device=device) for _ in range(2))  # aligned, both
    table = torch.empty((most_tiles(num_pairs, num_experts, block_m), _COLUMNS), dtype=torch.int32, device=device)
    counts = torch.empty(num_experts, dtype=torch.int64, device=device)
    is_compact = num_pairs <= _MOST_COMPACT
    _plan[(num_experts,)](
        topk_ids,
        pairs,
        places,
        counts,
        counts if totals is None else totals,
        table,
        topk_ids if num_tokens is None else num_tokens,
        num_rows,
        len(table),
        NUM_EXPERTS=num_experts,
        TOP_K=top_k,
        BLOCK_M=block_m,
        BLOCK=_MOST_COMPACT if is_compact else _BLOCK,
        IS_COMPACT=is_compact,
        HAS_TOTALS=totals is not None,
        IS_PADDED=num_tokens is not None,
        num_warps=4,
        **early("moe", device),
    )
    return ExpertPlan(pairs, counts, top_k, Tiled(places, table, block_m, topk_ids, num_tokens))
