# pyright: reportIndexIssue=false, reportCallIssue=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
"""Heads get what a token's adapter adds to them on their way into norm, rope and cache: that saves the launch that
would add it, and reading and writing them once more. Tokens without an adapter are computed as triton_kernel.py does,
to the last bit (by its tiles, so that norms add up in its order); with one, heads are rounded as that launch would have
rounded them. B is read while shrink, just before, runs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.qk_rope_kv import HeadNorms
from kernels.qk_rope_kv.triton_kernel import store_halves, turned
from kernels.sgmv import PartialLow
from kernels.sgmv.triton_tables import rank_if_any, segment_at, slice_at, tile_of_b
from kernels.sgmv.triton_vector import RANKS, add_ranks
from kernels.tiles import early, is_early, power_of_2, tiles


@triton.jit
def _with_delta(b_half, b_delta, m_delta, KIND: tl.constexpr):
    """Where nothing is added not even a zero is, which would change the sign of another one."""
    return tl.where(m_delta, (b_half + b_delta).to(KIND).to(tl.float32), b_half)


@triton.jit(do_not_specialize=["num_rows"])
def _qk_rope_kv(
    p_heads,
    p_positions,
    p_table,
    p_slots,
    p_query_norm,
    p_key_norm,
    p_out,
    p_key_cache,
    p_value_cache,
    p_partials,
    p_rows,
    p_segments,
    p_slices,
    num_rows,
    stride_token,
    stride_head,
    eps,
    NUM_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    NORMS: tl.constexpr,
    QUERY: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
    RANKS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    ALIGNED: tl.constexpr,
    TRIGGERS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Tokens in the order of the segments; axis 1 as in triton_kernel.py. QUERY, KEY and VALUE: the numbers of their
    slices, -1: no adapter has it."""
    if TRIGGERS:
        tl.extra.cuda.gdc_launch_dependents()
    i_place = tl.program_id(0).to(tl.int64)
    i_piece = tl.program_id(1).to(tl.int64)
    QUERY_PIECES: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    KV_PIECES: tl.constexpr = (KV_HEADS + HEADS - 1) // HEADS
    KIND: tl.constexpr = p_heads.dtype.element_ty
    is_query = i_piece < QUERY_PIECES
    is_value = i_piece >= QUERY_PIECES + KV_PIECES
    i_slice = tl.where(is_query, QUERY, tl.where(is_value, VALUE, KEY))
    i_before = tl.where(is_query, 0, tl.where(is_value, NUM_HEADS + KV_HEADS, NUM_HEADS))
    i_first = (i_piece - tl.where(is_query, 0, tl.where(is_value, QUERY_PIECES + KV_PIECES, QUERY_PIECES))) * HEADS
    i_token = tl.load(p_rows + i_place).to(tl.int64)
    _, _, i_adapter = segment_at(p_segments, i_place)
    lora_rank = rank_if_any(p_slices, i_slice, i_adapter)
    o_all = tl.arange(0, HEADS * 2 * HALF)
    o_columns = (i_first + o_all // (2 * HALF)) * HEAD_DIM + o_all // HALF % 2 * (HEAD_DIM // 2) + o_all % HALF
    p_slice = slice_at(p_slices, tl.maximum(i_slice, 0))
    p_tile, b_b, size_out = tile_of_b(p_slice, p_heads, i_adapter, lora_rank, o_columns, RANKS, ALIGNED)
    o_half = tl.arange(0, HALF)
    m_half = o_half < HEAD_DIM // 2
    i_heads = i_first + tl.arange(0, HEADS)
    mask = (i_heads < tl.where(is_query, NUM_HEADS, KV_HEADS))[:, None] & m_half[None, :]
    i_slot = tl.load(p_slots + i_token).to(tl.int64)
    p_angles = p_table + tl.load(p_positions + i_token).to(tl.int64) * (2 * HEAD_DIM) + o_half
    b_cosines = tl.load(p_angles, mask=m_half, other=0.0)[None, :]
    b_sines = tl.load(p_angles + HEAD_DIM, mask=m_half, other=0.0)[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()
    p_first = p_heads + i_token * stride_token + (i_before + i_heads)[:, None] * stride_head + o_half[None, :]
    b_first = tl.load(p_first, mask=mask, other=0.0).to(tl.float32)
    b_second = tl.load(p_first + HEAD_DIM // 2, mask=mask, other=0.0).to(tl.float32)
    o_splits = tl.arange(0, SPLITS)
    i_low = (tl.maximum(i_slice, 0) * SPLIT + o_splits).to(tl.int64) * num_rows + i_place
    m_low = o_splits < SPLIT
    b_none = tl.zeros((HEADS * 2 * HALF,), tl.float32)
    b_delta = add_ranks(
        b_none, p_partials, p_tile, b_b, size_out, i_low, m_low, lora_rank, o_columns < size_out, RANKS, MAX_RANK
    )
    d_first, d_second = tl.split(tl.permute(tl.reshape(b_delta, (HEADS, 2, HALF)), (0, 2, 1)))
    m_delta = mask & (lora_rank > 0)
    b_first, b_second = _with_delta(b_first, d_first, m_delta, KIND), _with_delta(b_second, d_second, m_delta, KIND)
    o_cache = (i_slot * KV_HEADS + i_heads[:, None]) * HEAD_DIM + o_half[None, :]
    m_cache = mask & (i_slot >= 0)
    if is_value:
        store_halves(p_value_cache + o_cache, b_first, b_second, m_cache, HEAD_DIM, KIND)
    else:
        p_norm = p_query_norm if is_query else p_key_norm
        b_first, b_second = turned(b_first, b_second, p_norm, b_cosines, b_sines, o_half, eps, HEAD_DIM, NORMS, KIND)
        if is_query:
            p_to = p_out + (i_token * NUM_HEADS + i_heads[:, None]) * HEAD_DIM + o_half[None, :]
            store_halves(p_to, b_first, b_second, mask, HEAD_DIM, KIND)
        else:
            store_halves(p_key_cache + o_cache, b_first, b_second, m_cache, HEAD_DIM, KIND)


def qk_rope_kv(
    heads: Tensor,
    positions: Tensor,
    table: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    norms: HeadNorms | None,
    low: PartialLow,
) -> Tensor:
    """See the package; each row is a segment, heads may be a slice of wider rows, the caches are contiguous."""
    num_tokens, num_all, head_dim = heads.shape
    num_kv_heads = key_cache.shape[2]
    num_heads = num_all - 2 * num_kv_heads
    assert low.segments.most_rows == 1, low.segments.most_rows
    assert heads.stride(2) == 1, heads.stride()
    assert table.is_contiguous(), table.stride()
    assert key_cache.is_contiguous(), key_cache.stride()
    assert value_cache.is_contiguous(), value_cache.stride()
    assert norms is None or norms.query.stride() == norms.key.stride() == (1,)
    query, key, value = _slices_of(low, num_heads * head_dim, num_kv_heads * head_dim)
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=heads.dtype, device=heads.device)
    row = tiles("qk_rope_kv", heads.device, tokens=num_tokens)
    pieces = triton.cdiv(num_heads, row["heads"]) + 2 * triton.cdiv(num_kv_heads, row["heads"])
    _, split, _, max_rank = low.partials.shape
    _qk_rope_kv[(len(low.segments.table), pieces)](
        heads,
        positions,
        table,
        slot_mapping,
        heads if norms is None else norms.query,
        heads if norms is None else norms.key,
        out,
        key_cache,
        value_cache,
        low.partials,
        low.segments.rows,
        low.segments.table,
        low.table,
        num_tokens,
        heads.stride(0),
        heads.stride(1),
        0.0 if norms is None else norms.eps,
        NUM_HEADS=num_heads,
        KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        HALF=power_of_2(head_dim // 2),
        HEADS=row["heads"],
        NORMS=norms is not None,
        QUERY=query,
        KEY=key,
        VALUE=value,
        SPLIT=split,
        SPLITS=power_of_2(split),
        RANKS=RANKS,
        MAX_RANK=max_rank,
        ALIGNED=low.is_aligned,
        TRIGGERS=is_early("attend", heads.device),
        num_warps=row["num_warps"],
        **early("rope_low", heads.device),
    )
    return out


def _slices_of(low: PartialLow, query_size: int, kv_size: int) -> list[int]:
    """The numbers of the queries', the keys' and the values' slices."""
    sizes = {0: query_size, query_size: kv_size, query_size + kv_size: kv_size}
    starts = [part.start for part in low.slices]
    assert all(sizes.get(part.start) == part.b.shape[2] for part in low.slices), low.slices
    return [starts.index(start) if start in starts else -1 for start in sizes]
