# pyright: reportIndexIssue=false, reportCallIssue=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
"""One program takes HEADS heads of a token: query and key heads are turned, value heads copied; the halves of a head
stay in registers from its norm to its store. What it rounds on the way is what the ops one by one round."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.qk_rope_kv import HeadNorms
from kernels.rope.triton_kernel import rotated
from kernels.tiles import is_early, power_of_2, tiles


@triton.jit
def _normalised(b_first, b_second, p_weight, o_half, m_half, eps, HEAD_DIM: tl.constexpr, KIND: tl.constexpr):
    """Both halves of some heads, fp32, divided by the root mean square of the head; rounded to KIND twice."""
    b_scale = tl.rsqrt((tl.sum(b_first * b_first, 1) + tl.sum(b_second * b_second, 1)) / HEAD_DIM + eps)[:, None]
    b_low = tl.load(p_weight + o_half, mask=m_half, other=0.0).to(tl.float32)[None, :]
    b_high = tl.load(p_weight + HEAD_DIM // 2 + o_half, mask=m_half, other=0.0).to(tl.float32)[None, :]
    b_first = ((b_first * b_scale).to(KIND).to(tl.float32) * b_low).to(KIND).to(tl.float32)
    b_second = ((b_second * b_scale).to(KIND).to(tl.float32) * b_high).to(KIND).to(tl.float32)
    return b_first, b_second


@triton.jit
def turned(
    b_first,
    b_second,
    p_norm,
    b_cosines,
    b_sines,
    o_half,
    eps,
    HEAD_DIM: tl.constexpr,
    NORMS: tl.constexpr,
    KIND: tl.constexpr,
):
    """Both halves of some heads, fp32, with NORMS normalised before; KIND is the dtype of the heads."""
    if NORMS:
        m_half = o_half < HEAD_DIM // 2
        b_first, b_second = _normalised(b_first, b_second, p_norm, o_half, m_half, eps, HEAD_DIM, KIND)
    return rotated(b_first, b_second, b_cosines, b_sines)


@triton.jit
def store_halves(p_to, b_first, b_second, mask, HEAD_DIM: tl.constexpr, KIND: tl.constexpr):
    """Rounded to KIND first: what the caller would have kept of it."""
    tl.store(p_to, b_first.to(KIND).to(p_to.dtype.element_ty), mask=mask)
    tl.store(p_to + HEAD_DIM // 2, b_second.to(KIND).to(p_to.dtype.element_ty), mask=mask)


@triton.jit
def _qk_rope_kv(
    p_heads,
    p_values,
    p_positions,
    p_table,
    p_slots,
    p_query_norm,
    p_key_norm,
    p_out,
    p_key_cache,
    p_value_cache,
    stride_token,
    stride_head,
    stride_value,
    stride_value_head,
    eps,
    NUM_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    NORMS: tl.constexpr,
    TRIGGERS: tl.constexpr,
):
    """Programs of axis 1: the query heads, the key heads, the value heads, each group in pieces of HEADS."""
    if TRIGGERS:
        tl.extra.cuda.gdc_launch_dependents()
    i_token = tl.program_id(0).to(tl.int64)
    i_piece = tl.program_id(1).to(tl.int64)
    QUERY_PIECES: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    KV_PIECES: tl.constexpr = (KV_HEADS + HEADS - 1) // HEADS
    o_half = tl.arange(0, HALF)
    m_half = o_half < HEAD_DIM // 2
    i_slot = tl.load(p_slots + i_token).to(tl.int64)
    if i_piece >= QUERY_PIECES + KV_PIECES:
        i_heads = (i_piece - QUERY_PIECES - KV_PIECES) * HEADS + tl.arange(0, HEADS)
        mask = (i_heads < KV_HEADS)[:, None] & m_half[None, :] & (i_slot >= 0)
        p_from = p_values + i_token * stride_value + i_heads[:, None] * stride_value_head + o_half[None, :]
        p_to = p_value_cache + (i_slot * KV_HEADS + i_heads[:, None]) * HEAD_DIM + o_half[None, :]
        for half in tl.static_range(2):  # pyright: ignore[reportGeneralTypeIssues]
            b_values = tl.load(p_from + half * (HEAD_DIM // 2), mask=mask, other=0.0)
            tl.store(p_to + half * (HEAD_DIM // 2), b_values.to(p_value_cache.dtype.element_ty), mask=mask)
        return
    is_key = i_piece >= QUERY_PIECES
    i_heads = (i_piece - tl.where(is_key, QUERY_PIECES, 0)) * HEADS + tl.arange(0, HEADS)
    mask = (i_heads < tl.where(is_key, KV_HEADS, NUM_HEADS))[:, None] & m_half[None, :]
    i_column = i_heads + tl.where(is_key, NUM_HEADS, 0)
    p_first = p_heads + i_token * stride_token + i_column[:, None] * stride_head + o_half[None, :]
    i_position = tl.load(p_positions + i_token).to(tl.int64)
    p_angles = p_table + i_position * (2 * HEAD_DIM) + o_half
    b_first = tl.load(p_first, mask=mask, other=0.0).to(tl.float32)
    b_second = tl.load(p_first + HEAD_DIM // 2, mask=mask, other=0.0).to(tl.float32)
    b_cosines = tl.load(p_angles, mask=m_half, other=0.0)[None, :]
    b_sines = tl.load(p_angles + HEAD_DIM, mask=m_half, other=0.0)[None, :]
    KIND: tl.constexpr = p_heads.dtype.element_ty
    p_norm = p_key_norm if is_key else p_query_norm
    b_first, b_second = turned(b_first, b_second, p_norm, b_cosines, b_sines, o_half, eps, HEAD_DIM, NORMS, KIND)
    if is_key:
        p_to = p_key_cache + (i_slot * KV_HEADS + i_heads[:, None]) * HEAD_DIM + o_half[None, :]
        store_halves(p_to, b_first, b_second, mask & (i_slot >= 0), HEAD_DIM, KIND)
    else:
        p_to = p_out + (i_token * NUM_HEADS + i_heads[:, None]) * HEAD_DIM + o_half[None, :]
        store_halves(p_to, b_first, b_second, mask, HEAD_DIM, KIND)


def qk_rope_kv(
    heads: Tensor,
    values: Tensor,
    positions: Tensor,
    table: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    norms: HeadNorms | None,
) -> Tensor:
    """See the package; heads and values may be slices of wider rows, the caches are contiguous."""
    num_tokens, _, head_dim = heads.shape
    num_kv_heads = values.shape[1]
    num_heads = heads.shape[1] - num_kv_heads
    assert heads.stride(2) == values.stride(2) == 1, (heads.stride(), values.stride())
    assert table.is_contiguous(), table.stride()
    assert key_cache.is_contiguous(), key_cache.stride()
    assert value_cache.is_contiguous(), value_cache.stride()
    assert norms is None or norms.query.stride() == norms.key.stride() == (1,)
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=heads.dtype, device=heads.device)
    row = tiles("qk_rope_kv", heads.device, tokens=num_tokens)
    pieces = triton.cdiv(num_heads, row["heads"]) + 2 * triton.cdiv(num_kv_heads, row["heads"])
    if num_tokens:
        _qk_rope_kv[(num_tokens, pieces)](
            heads,
            values,
            positions,
            table,
            slot_mapping,
            heads if norms is None else norms.query,
            heads if norms is None else norms.key,
            out,
            key_cache,
            value_cache,
            heads.stride(0),
            heads.stride(1),
            values.stride(0),
            values.stride(1),
            0.0 if norms is None else norms.eps,
            NUM_HEADS=num_heads,
            KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            HALF=power_of_2(head_dim // 2),
            HEADS=row["heads"],
            NORMS=norms is not None,
            TRIGGERS=is_early("attend", heads.device),
            num_warps=row["num_warps"],
        )
    return out
