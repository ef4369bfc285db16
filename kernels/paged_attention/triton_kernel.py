# pyright: reportIndexIssue=false, reportCallIssue=false, reportAttributeAccessIssue=false
"""Two kernels: rows over a chunk of their keys (split-KV, FlashAttention's running softmax in base 2), and the merge
of a row's chunks in their order. Which rows and chunks stands in a list (work.py) that serves every layer.

Keys and values are read inside [first_key, last_key) of the sequence only; what else stands in its last block, or
in any other, is never loaded. No atomics; the order of every sum depends on the row's own chunks.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.paged_attention.plan import AttentionPlan
from kernels.paged_attention.work import COLUMNS, AttentionWork, Launch
from kernels.tiles import is_early, pdl, power_of_2, tiles


@triton.jit
def _attend_rows(
    p_queries,
    p_keys,
    p_values,
    p_table,
    p_item,
    p_starts,
    p_contexts,
    p_members,
    p_out,
    p_partials,
    p_stats,
    i_head,
    stride_query,
    stride_table,
    stride_block,
    scale_log2,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    IS_GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """The rows of one item and one key/value head."""
    i_sequence = tl.load(p_item).to(tl.int64)
    o_rows = tl.load(p_item + 1) + tl.arange(0, BLOCK_M)
    first_key = tl.load(p_item + 3)
    last_key = tl.load(p_item + 4)
    i_partial = tl.load(p_item + 5).to(tl.int64)
    if IS_GROUP:  # rows of many sequences, which all see all of the keys
        m_rows = o_rows < tl.load(p_item + 2)
        i_members = tl.load(p_members + i_sequence + o_rows // GROUP, mask=m_rows, other=0).to(tl.int64)
        i_tokens = tl.load(p_starts + i_members, mask=m_rows, other=0).to(tl.int64)
        i_sequence = tl.load(p_members + i_sequence).to(tl.int64)
        begin = last_key
    else:
        i_start = tl.load(p_starts + i_sequence)
        num_queries = tl.load(p_starts + i_sequence + 1) - i_start
        begin = tl.load(p_contexts + i_sequence) - num_queries  # position of the first query
        m_rows = o_rows < num_queries * GROUP
        i_tokens = (i_start + o_rows // GROUP).to(tl.int64)
    if PDL:  # the plan was there before the step began; all that follows is of its launches
        tl.extra.cuda.gdc_wait()

    o_dim = tl.arange(0, BLOCK_D)
    m_dim = o_dim < HEAD_DIM if BLOCK_D > HEAD_DIM else tl.full((BLOCK_D,), True, tl.int1)
    m_out = m_rows[:, None] & m_dim[None, :]
    positions = begin + o_rows // GROUP
    o_heads = (i_head * GROUP + o_rows % GROUP) * HEAD_DIM
    b_queries = tl.load(
        p_queries + (i_tokens * stride_query + o_heads)[:, None] + o_dim[None, :], mask=m_out, other=0.0
    )
    b_largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    b_total = tl.zeros((BLOCK_M,), tl.float32)
    b_sum = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    HAS_OPEN: tl.constexpr = IS_GROUP or (WINDOW == 0 and not IS_SPLIT)
    MASKED: tl.constexpr = min(TILE, 64) if HAS_OPEN else TILE
    first_tile = first_key // TILE * TILE
    # tiles that every row sees whole need no mask; a window's do not pay
    open_end = first_tile
    if IS_GROUP:
        open_end = tl.maximum(first_tile, last_key // TILE * TILE)
    elif HAS_OPEN:
        open_end = tl.maximum(first_tile, tl.minimum(begin + tl.load(p_item + 1) // GROUP + 1, last_key) // TILE * TILE)
    for part in tl.static_range(0 if HAS_OPEN else 1, 2):  # part 1 is masked
        low = open_end if part == 1 else first_tile
        high = last_key if part == 1 else open_end
        for first in range(low, high, MASKED if part == 1 else TILE):
            o_keys = first + tl.arange(0, MASKED if part == 1 else TILE)
            m_keys = (o_keys >= first_key) & (o_keys < last_key) if part == 1 else tl.full((TILE,), True, tl.int1)
            i_blocks = tl.load(p_table + i_sequence * stride_table + o_keys // BLOCK_SIZE, mask=m_keys, other=0).to(
                tl.int64
            )
            o_cache = i_blocks * stride_block + (o_keys % BLOCK_SIZE) * (KV_HEADS * HEAD_DIM) + i_head * HEAD_DIM
            m_cache = m_keys[:, None] & m_dim[None, :]
            b_keys = tl.load(p_keys + o_cache[:, None] + o_dim[None, :], mask=m_cache, other=0.0)
            b_values = tl.load(p_values + o_cache[:, None] + o_dim[None, :], mask=m_cache, other=0.0)
            b_scores = tl.dot(b_queries, tl.trans(b_keys), input_precision=PRECISION) * scale_log2
            if part == 1:
                m_seen = m_keys[None, :] & (o_keys[None, :] <= positions[:, None])
                if WINDOW > 0:
                    m_seen = m_seen & (o_keys[None, :] > positions[:, None] - WINDOW)
                b_scores = tl.where(m_seen, b_scores, float("-inf"))
            b_new = tl.maximum(b_largest, tl.max(b_scores, 1))
            b_shift = (
                tl.where(b_new == float("-inf"), 0.0, b_new) if part == 1 else b_new
            )  # a row that sees nothing yet
            b_weights = tl.exp2(b_scores - b_shift[:, None])
            b_keep = tl.exp2(b_largest - b_shift)
            b_total = b_total * b_keep + tl.sum(b_weights, 1)
            b_sum = b_sum * b_keep[:, None]
            b_sum = tl.dot(b_weights.to(b_values.dtype), b_values, b_sum, input_precision=PRECISION)
            b_largest = b_new

    if i_partial < 0:
        p_rows = p_out + (i_tokens * (KV_HEADS * GROUP * HEAD_DIM) + o_heads)[:, None] + o_dim[None, :]
        tl.store(p_rows, (b_sum / b_total[:, None]).to(p_out.dtype.element_ty), mask=m_out)
    else:
        i_rows = (i_partial + tl.arange(0, BLOCK_M)) * KV_HEADS + i_head
        tl.store(p_partials + i_rows[:, None] * HEAD_DIM + o_dim[None, :], b_sum, mask=m_out)
        tl.store(p_stats + i_rows * 2, b_largest, mask=m_rows)
        tl.store(p_stats + i_rows * 2 + 1, b_total, mask=m_rows)


@triton.jit
def _attend(
    p_queries,
    p_keys,
    p_values,
    p_table,
    p_items,
    p_count,
    p_starts,
    p_contexts,
    p_members,
    p_out,
    p_partials,
    p_stats,
    stride_query,
    stride_table,
    stride_block,
    scale_log2,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    IS_GROUP: tl.constexpr,
    IS_CAPTURED: tl.constexpr,
    PRECISION: tl.constexpr,
    TRIGGERS: tl.constexpr,
    PDL: tl.constexpr,
):
    """partials [rows, KV_HEADS, HEAD_DIM] fp32; stats [rows, KV_HEADS, 2] fp32: a row's largest score (base 2) and its
    sum of weights."""
    if TRIGGERS:
        tl.extra.cuda.gdc_launch_dependents()
    i_item = tl.program_id(0).to(tl.int64)
    if IS_SPLIT:  # the heads of a chunk stand side by side in memory
        i_head = i_item % KV_HEADS
        i_item = i_item // KV_HEADS
    else:  # one head's keys stay in the L2 cache
        i_head = tl.program_id(1).to(tl.int64)
    if IS_CAPTURED:  # programs take the items of a list of any length in turn
        for item in range(i_item, tl.load(p_count).to(tl.int64), tl.num_programs(0) // KV_HEADS):
            _attend_rows(
                p_queries,
                p_keys,
                p_values,
                p_table,
                p_items + item * COLUMNS,
                p_starts,
                p_contexts,
                p_members,
                p_out,
                p_partials,
                p_stats,
                i_head,
                stride_query,
                stride_table,
                stride_block,
                scale_log2,
                KV_HEADS,
                GROUP,
                HEAD_DIM,
                BLOCK_SIZE,
                WINDOW,
                BLOCK_M,
                BLOCK_D,
                TILE,
                IS_SPLIT,
                IS_GROUP,
                PRECISION,
                PDL,
            )
        if PDL:  # who has no item too: kernels.tiles.is_early
            tl.extra.cuda.gdc_wait()
    else:
        _attend_rows(
            p_queries,
            p_keys,
            p_values,
            p_table,
            p_items + i_item * COLUMNS,
            p_starts,
            p_contexts,
            p_members,
            p_out,
            p_partials,
            p_stats,
            i_head,
            stride_query,
            stride_table,
            stride_block,
            scale_log2,
            KV_HEADS,
            GROUP,
            HEAD_DIM,
            BLOCK_SIZE,
            WINDOW,
            BLOCK_M,
            BLOCK_D,
            TILE,
            IS_SPLIT,
            IS_GROUP,
            PRECISION,
            PDL,
        )


@triton.jit
def _merge(
    p_partials,
    p_stats,
    p_merges,
    p_starts,
    p_out,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program merges one row: CHUNKS partials at a time, in their order: the group's, then the own."""
    i_row = tl.program_id(0).to(tl.int64)
    i_head = tl.program_id(1).to(tl.int64)
    p_merge = p_merges + tl.program_id(2).to(tl.int64) * COLUMNS
    if PDL:
        tl.extra.cuda.gdc_wait()
    num_rows = tl.load(p_merge + 2)
    if i_row >= num_rows:
        return
    own_first = tl.load(p_merge + 3).to(tl.int64)
    group_first = tl.load(p_merge + 5).to(tl.int64)
    group_stride = tl.load(p_merge + 6)
    group_count = tl.load(p_merge + 7)
    num_partials = group_count + tl.load(p_merge + 4)
    o_dim = tl.arange(0, BLOCK_D)
    m_dim = o_dim < HEAD_DIM
    b_largest = tl.full((1,), float("-inf"), tl.float32)
    b_total = tl.zeros((1,), tl.float32)
    b_sum = tl.zeros((BLOCK_D,), tl.float32)
    for first in range(0, num_partials, CHUNKS):
        o_chunks = first + tl.arange(0, CHUNKS)
        m_chunks = o_chunks < num_partials
        i_partials = tl.where(
            o_chunks < group_count,
            group_first + o_chunks * group_stride,
            own_first + (o_chunks - group_count) * num_rows,
        )
        i_rows = (i_partials + i_row) * KV_HEADS + i_head
        b_peaks = tl.load(p_stats + i_rows * 2, mask=m_chunks, other=float("-inf"))
        b_totals = tl.load(p_stats + i_rows * 2 + 1, mask=m_chunks, other=0.0)
        b_parts = tl.load(
            p_partials + i_rows[:, None] * HEAD_DIM + o_dim[None, :], mask=m_chunks[:, None] & m_dim[None, :], other=0.0
        )
        b_new = tl.maximum(b_largest, tl.max(b_peaks, 0))
        b_shift = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_keep = tl.exp2(b_largest - b_shift)
        b_weights = tl.exp2(b_peaks - b_shift)
        b_total = b_total * b_keep + tl.sum(b_totals * b_weights, 0)
        b_sum = b_sum * b_keep + tl.sum(b_parts * b_weights[:, None], 0)
        b_largest = b_new
    o_row = tl.load(p_merge + 1) + i_row
    i_token = tl.load(p_starts + tl.load(p_merge)).to(tl.int64) + o_row // GROUP
    o_out = ((i_token * KV_HEADS + i_head) * GROUP + o_row % GROUP) * HEAD_DIM
    tl.store(p_out + o_out + o_dim, (b_sum / b_total).to(p_out.dtype.element_ty), mask=m_dim)


def paged_attention(
    queries: Tensor, key_cache: Tensor, value_cache: Tensor, plan: AttentionPlan, scale: float
) -> Tensor:
    """See the package; scale is positive."""
    head_dim = queries.shape[2]
    assert queries.stride()[1:] == (head_dim, 1), queries.stride()
    assert key_cache.is_contiguous(), key_cache.stride()
    assert value_cache.is_contiguous(), value_cache.stride()
    assert scale > 0, scale
    work = plan.work
    out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
    shape = (work.num_partials, plan.num_kv_heads)
    partials = torch.empty((*shape, head_dim), dtype=torch.float32, device=queries.device)
    stats = torch.empty((*shape, 2), dtype=torch.float32, device=queries.device)
    for launch in work.launches:
        _launch(launch, work, plan, (queries, key_cache, value_cache, out, partials, stats), scale)
    if work.num_partials:
        _launch_merge(work, plan, out, partials, stats)
    return out


def _launch(
    launch: Launch, work: AttentionWork, plan: AttentionPlan, tensors: tuple[Tensor, ...], scale: float
) -> None:
    queries, key_cache, value_cache, out, partials, stats = tensors
    head_dim = queries.shape[2]
    num_items = len(launch.items) if launch.count is None else launch.num_programs
    grid = (num_items * plan.num_kv_heads,) if launch.is_split else (num_items, plan.num_kv_heads)
    kernel = "attend_group" if launch.is_group else "attend_split" if launch.is_split else "attend_chunk"
    row = tiles(kernel, out.device, head_bytes=head_dim * queries.element_size(), rows=launch.block_m)
    is_last = launch is work.launches[-1]
    _attend[grid](
        queries,
        key_cache,
        value_cache,
        plan.block_tables,
        launch.items,
        launch.items if launch.count is None else launch.count,
        work.starts,
        work.contexts,
        work.members,
        out,
        partials,
        stats,
        queries.stride(0),
        plan.block_tables.stride(0),
        key_cache.stride(0),
        scale * math.log2(math.e),
        KV_HEADS=plan.num_kv_heads,
        GROUP=plan.num_heads // plan.num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=plan.block_size,
        WINDOW=plan.sliding_window or 0,
        COLUMNS=COLUMNS,
        BLOCK_M=launch.block_m,
        BLOCK_D=max(16, power_of_2(head_dim)),
        TILE=row["tile"],
        IS_SPLIT=launch.is_split,
        IS_GROUP=launch.is_group,
        IS_CAPTURED=launch.count is not None,
        PRECISION="tf32x3" if queries.dtype == torch.float32 else "tf32",
        TRIGGERS=bool(is_last and work.num_partials and tiles("merge", out.device)["pdl"]),
        num_warps=row["num_warps"],
        num_stages=row["num_stages"],
        **pdl(launch.count is not None and is_early("attend", out.device)),
        **({"maxnreg": row["captured_registers"]} if launch.count is not None and "captured_registers" in row else {}),
    )


def _launch_merge(work: AttentionWork, plan: AttentionPlan, out: Tensor, partials: Tensor, stats: Tensor) -> None:
    row = tiles("merge", out.device)
    head_dim = out.shape[2]
    _merge[(work.merge_rows, plan.num_kv_heads, len(work.merges))](
        partials,
        stats,
        work.merges,
        work.starts,
        out,
        KV_HEADS=plan.num_kv_heads,
        GROUP=plan.num_heads // plan.num_kv_heads,
        HEAD_DIM=head_dim,
        COLUMNS=COLUMNS,
        BLOCK_D=max(16, power_of_2(head_dim)),
        CHUNKS=row["chunks"],
        num_warps=row["num_warps"],
        **pdl(row["pdl"]),
    )
