# pyright: reportIndexIssue=false, reportCallIssue=false, reportAttributeAccessIssue=false
"""A token's experts: one program a row. And what they answered, added up: one program a row's columns."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.moe.plan import ExpertPlan, RoutingRule
from kernels.tiles import early, is_early, power_of_2, tiles


@triton.jit
def _route(
    p_logits,
    p_ids,
    p_weights,
    stride_logits,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SOFTMAX_FIRST: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    LARGEST: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHOICES: tl.constexpr,
    TRIGGERS: tl.constexpr,
):
    """EXPERTS, CHOICES: powers of two that hold NUM_EXPERTS and TOP_K. LARGEST: what stands for infinity."""
    if TRIGGERS:
        tl.extra.cuda.gdc_launch_dependents()
    i_row = tl.program_id(0).to(tl.int64)
    o_experts = tl.arange(0, EXPERTS)
    m_experts = o_experts < NUM_EXPERTS
    b_logits = tl.load(p_logits + i_row * stride_logits + o_experts, mask=m_experts, other=0.0).to(tl.float32)
    b_finite = tl.minimum(tl.maximum(b_logits, -LARGEST), LARGEST)
    b_logits = tl.where(b_logits == b_logits, b_finite, -LARGEST)  # noqa: PLR0124 - NaN
    b_left = tl.where(m_experts, b_logits, -float("inf"))  # below any logit: no lane without an expert is chosen
    highest = tl.max(b_left, 0)
    over = tl.sum(tl.exp(b_left - highest), 0) if SOFTMAX_FIRST else 1.0
    o_choices = tl.arange(0, CHOICES)
    b_ids, b_weights = tl.zeros((CHOICES,), tl.int32), tl.zeros((CHOICES,), tl.float32)
    total = 0.0
    for i_choice in tl.static_range(TOP_K):
        best = tl.max(b_left, 0)
        expert = tl.min(tl.where(b_left == best, o_experts, EXPERTS), 0)
        weight = tl.exp(best - highest) / over
        total += weight
        b_ids = tl.where(o_choices == i_choice, expert, b_ids)
        b_weights = tl.where(o_choices == i_choice, weight, b_weights)
        b_left = tl.where(o_experts == expert, -float("inf"), b_left)
    if RENORMALIZE or not SOFTMAX_FIRST:
        b_weights /= total
    o_out = i_row * TOP_K + o_choices
    tl.store(p_ids + o_out, b_ids, mask=o_choices < TOP_K)
    tl.store(p_weights + o_out, b_weights, mask=o_choices < TOP_K)


@triton.jit
def _combine(
    p_y,
    p_weights,
    p_places,
    p_out,
    p_num_tokens,
    SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Launched without fused multiply-adds, so that a product is rounded before it is added."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    i_row = tl.program_id(0).to(tl.int64)
    o_size = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m_size = o_size < SIZE
    m_y = m_size
    p_own = p_places + i_row * TOP_K
    if IS_PADDED:  # behind the last token's, places are anything
        is_token = i_row < tl.load(p_num_tokens)
        m_y = m_size & is_token
        p_own = p_places + tl.where(is_token, i_row, 0) * TOP_K
    b_total = tl.zeros((BLOCK,), tl.float32)
    for i_choice in tl.static_range(TOP_K):
        i_place = tl.load(p_own + i_choice).to(tl.int64)
        weight = tl.load(p_weights + i_row * TOP_K + i_choice)
        b_y = tl.load(p_y + i_place * SIZE + o_size, mask=m_y, other=0.0).to(tl.float32)
        b_total = b_y * weight if i_choice == 0 else b_total + b_y * weight
    tl.store(p_out + i_row * SIZE + o_size, b_total.to(p_out.dtype.element_ty), mask=m_size)


def route(router_logits: Tensor, top_k: int, rule: RoutingRule, topk_ids: Tensor) -> Tensor:
    """Writes ``topk_ids`` [T, K] int32, dense, → weights."""
    assert router_logits.stride(1) == 1, router_logits.stride()
    assert topk_ids.is_contiguous(), topk_ids.stride()
    num_rows, num_experts = router_logits.shape
    weights = torch.empty((num_rows, top_k), dtype=torch.float32, device=router_logits.device)
    if num_rows:
        _route[(num_rows,)](
            router_logits,
            topk_ids,
            weights,
            router_logits.stride(0),
            NUM_EXPERTS=num_experts,
            TOP_K=top_k,
            SOFTMAX_FIRST=rule.softmax_first,
            RENORMALIZE=rule.renormalize,
            LARGEST=torch.finfo(torch.float32).max,
            EXPERTS=power_of_2(num_experts),
            CHOICES=power_of_2(top_k),
            TRIGGERS=is_early("moe", router_logits.device),
            num_warps=tiles("moe_route", router_logits.device, experts=num_experts)["num_warps"],
        )
    return weights


def combine(y: Tensor, topk_weights: Tensor, plan: ExpertPlan) -> Tensor:
    """See the package."""
    tiled = plan.tiled
    assert tiled is not None
    assert y.is_contiguous(), y.stride()
    assert topk_weights.is_contiguous(), topk_weights.stride()
    (num_rows, top_k), size = topk_weights.shape, y.shape[1]
    out = torch.empty((num_rows, size), dtype=y.dtype, device=y.device)
    row = tiles("moe_combine", y.device, tokens=num_rows)
    block = min(row["block"], power_of_2(size))
    if num_rows:
        _combine[(num_rows, triton.cdiv(size, block))](
            y,
            topk_weights,
            tiled.places,
            out,
            plan.pairs if tiled.num_tokens is None else tiled.num_tokens,
            SIZE=size,
            TOP_K=top_k,
            BLOCK=block,
            IS_PADDED=tiled.num_tokens is not None,
            num_warps=row["num_warps"],
            enable_fp_fusion=False,
            **early("moe", y.device),
        )
    return out
