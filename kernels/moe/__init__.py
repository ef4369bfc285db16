"""Mixture of experts: token-choice, dropless. route → plan_experts → grouped_silu_mul → grouped_linear → combine.

Every token goes to the ``top_k`` experts that its own router logits name: no capacity, no other token has a say.
Rows that go to one expert stand together, so that each expert is one product. On a GPU that order is made there:
no op waits for the device, so that steps may be captured.
"""

import torch
from torch import Tensor

from kernels.linear import LinearWeight
from kernels.moe import reference
from kernels.moe.plan import ExpertPlan, RoutingRule
from kernels.timing import timed

__all__ = [
    "ExpertPlan",
    "ExpertWeights",
    "RoutingRule",
    "combine",
    "grouped_gate_up",
    "grouped_linear",
    "grouped_silu_mul",
    "plan_experts",
    "route",
]


class ExpertWeights:
    """One matrix an expert, [E, out, in], laid out once for the products. The argument is copied or kept."""

    def __init__(self, weights: Tensor) -> None:
        self.num_experts, self.out_size, self.in_size = weights.shape
        # a CPU may pack each apart; on a GPU they stand together and are no second copy
        self.stacked = weights.contiguous() if weights.is_cuda else None
        self.experts = [] if weights.is_cuda else [LinearWeight(weight) for weight in weights]

    def weight(self) -> Tensor:
        """The plain weights [E, out, in]: on a CPU a copy."""
        return torch.stack([expert.weight for expert in self.experts]) if self.stacked is None else self.stacked


@timed("moe")
def route(
    router_logits: Tensor, top_k: int, rule: RoutingRule, topk_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """router_logits [T, E] of any float dtype → topk_ids [T, K] int32, topk_weights [T, K] fp32. The ids go to
    ``topk_ids`` where that is given.

    The K largest logits in falling order, ties to the lowest expert: K different ids in [0, E) for any row
    whatsoever. NaN and -inf are the smallest float and +inf the largest, so that all weights are finite. A row's
    result depends on that row only.
    """
    num_rows, num_experts = router_logits.shape
    assert 1 <= top_k <= num_experts, (top_k, num_experts)
    if topk_ids is None:
        topk_ids = torch.empty((num_rows, top_k), dtype=torch.int32, device=router_logits.device)
    assert topk_ids.shape == (num_rows, top_k), (topk_ids.shape, num_rows, top_k)
    assert topk_ids.dtype == torch.int32, topk_ids.dtype
    if router_logits.is_cuda:
        from kernels.moe import triton_route

        return topk_ids, triton_route.route(router_logits, top_k, rule, topk_ids)
    ids, weights = reference.route(router_logits, top_k, rule.softmax_first, rule.renormalize)
    return topk_ids.copy_(ids), weights


@timed("moe")
def plan_experts(
    topk_ids: Tensor, num_experts: int, totals: Tensor | None = None, num_tokens: Tensor | None = None
) -> ExpertPlan:
    """topk_ids [T, K] int32, each below ``num_experts``, as one order for all products of a layer.

    ``totals`` [E] int64 grow by each expert's pairs. ``num_tokens`` [1] int32 on a GPU: only so many rows are tokens;
    the others go to no expert and count nowhere, and ``combine`` gives zeros for them.
    """
    if topk_ids.is_cuda:
        from kernels.moe import triton_plan

        return triton_plan.plan_experts(topk_ids, num_experts, totals, num_tokens)
    assert num_tokens is None, "a CPU computes tokens only"
    pairs, counts = reference.sort_by_expert(topk_ids, num_experts)
    if totals is not None:
        totals += counts
    return ExpertPlan(pairs, counts, topk_ids.shape[1])


@timed("moe")
def grouped_silu_mul(x: Tensor, weights: ExpertWeights, plan: ExpertPlan) -> Tensor:
    """x [T, in], weights [E, 2I, in] with gate before up → silu(gate · x) · (up · x) of each pair, [T·K, I] in the
    order of the plan and x's dtype; gate and up are rounded to it first. Rows as of ``grouped_linear``."""
    assert x.shape == (len(plan.pairs) // plan.top_k, weights.in_size), (x.shape, len(plan.pairs), weights.in_size)
    assert len(plan.counts) == weights.num_experts, (len(plan.counts), weights.num_experts)
    if weights.stacked is not None:
        from kernels.moe import triton_kernel

        return triton_kernel.grouped_silu_mul(x, weights.stacked, plan)
    return reference.grouped_silu_mul(x, weights.experts, plan.pairs // plan.top_k, plan.counts.tolist())


@timed("moe")
def grouped_gate_up(x: Tensor, weights: ExpertWeights, plan: ExpertPlan) -> Tensor:
    """``grouped_silu_mul`` for who adds to gate and up before ``silu_mul``: both, [T·K, 2I], of the same bits."""
    assert x.shape == (len(plan.pairs) // plan.top_k, weights.in_size), (x.shape, len(plan.pairs), weights.in_size)
    assert len(plan.counts) == weights.num_experts, (len(plan.counts), weights.num_experts)
    if weights.stacked is not None:
        from kernels.moe import triton_kernel

        return triton_kernel.grouped_gate_up(x, weights.stacked, plan)
    return reference.grouped_linear(x[plan.pairs // plan.top_k], weights.experts, plan.counts.tolist())


@timed("moe")
def grouped_linear(x: Tensor, weights: ExpertWeights, plan: ExpertPlan) -> Tensor:
    """x [T·K, in] in the order of the plan, each row times its expert's weight → [T·K, out] in x's dtype.

    On a CPU a row's bits depend on that row and its expert's weight only (as ``linear``), on a GPU also on T, by
    tables. Rows behind the last token's pairs are neither read nor written.
    """
    assert len(plan.counts) == weights.num_experts, (len(plan.counts), weights.num_experts)
    assert x.shape == (len(plan.pairs), weights.in_size), (x.shape, len(plan.pairs), weights.in_size)
    if weights.stacked is not None:
        from kernels.moe import triton_kernel

        return triton_kernel.grouped_linear(x, weights.stacked, plan)
    return reference.grouped_linear(x, weights.experts, plan.counts.tolist())


@timed("moe")
def combine(y: Tensor, topk_weights: Tensor, plan: ExpertPlan) -> Tensor:
    """y [T·K, H] in the order of the plan → [T, H] in y's dtype: the weighted sum of each token's K rows, in fp32,
    added in the order of its choices."""
    assert y.shape[0] == topk_weights.numel(), (y.shape, topk_weights.shape)
    if y.is_cuda:
        from kernels.moe import triton_route

        return triton_route.combine(y, topk_weights, plan)
    return reference.combine(y, topk_weights, plan.pairs)
