"""Mixture of experts: token-choice, dropless. route → plan_experts → grouped_linear … → combine.

Every token goes to the ``top_k`` experts that its own router logits name: no capacity, no other token has a say.
Rows that go to one expert stand together, so that each expert is one product.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.linear import LinearWeight
from kernels.moe import reference
from kernels.timing import timed


@dataclass(frozen=True, slots=True)
class RoutingRule:
    """How logits become weights: softmax over all experts and then the best of them (``renormalize``: divided by
    their sum), or, without ``softmax_first``, softmax over the logits of the best, which sums to 1 anyway."""

    softmax_first: bool = True
    renormalize: bool = True


@dataclass(frozen=True, slots=True)
class ExpertPlan:
    """The T·K (token, choice) pairs of a step ordered by expert, pairs of one expert by token.

    ``pairs`` [T·K] int64: token · K + choice, in that order. ``counts`` [E] int64: pairs of each expert.
    """

    pairs: Tensor
    counts: Tensor
    top_k: int


class ExpertWeights:
    """One matrix an expert, [E, out, in], laid out once for ``grouped_linear``. The argument is copied or kept."""

    def __init__(self, weights: Tensor) -> None:
        self.num_experts, self.out_size, self.in_size = weights.shape
        self.experts = [LinearWeight(weight) for weight in weights]

    def weight(self) -> Tensor:
        """The plain weights [E, out, in]: a copy."""
        return torch.stack([expert.weight for expert in self.experts])


@timed("moe")
def route(router_logits: Tensor, top_k: int, rule: RoutingRule) -> tuple[Tensor, Tensor]:
    """router_logits [T, E] of any float dtype → topk_ids [T, K] int64, topk_weights [T, K] fp32.

    The K largest logits in falling order, ties to the lowest expert: K different ids in [0, E) for any row
    whatsoever. NaN and -inf are the smallest float and +inf the largest, so that all weights are finite. A row's
    result depends on that row only.
    """
    num_experts = router_logits.shape[1]
    assert 1 <= top_k <= num_experts, (top_k, num_experts)
    return reference.route(router_logits, top_k, rule.softmax_first, rule.renormalize)


@timed("moe")
def plan_experts(topk_ids: Tensor, num_experts: int) -> ExpertPlan:
    """topk_ids [T, K], each below ``num_experts``, as one order for all products of a layer."""
    pairs, counts = reference.sort_by_expert(topk_ids, num_experts)
    return ExpertPlan(pairs, counts, topk_ids.shape[1])


@timed("moe")
def gather(x: Tensor, plan: ExpertPlan) -> Tensor:
    """x [T, H] → [T·K, H]: each pair's token, in the order of the plan."""
    return x[plan.pairs // plan.top_k]


@timed("moe")
def grouped_linear(x: Tensor, weights: ExpertWeights, plan: ExpertPlan) -> Tensor:
    """x [T·K, in] in the order of the plan, each row times its expert's weight → [T·K, out] in x's dtype.

    On a CPU a row's bits depend on that row and its expert's weight only (as ``linear``).
    """
    assert len(plan.counts) == weights.num_experts, (len(plan.counts), weights.num_experts)
    assert x.shape == (len(plan.pairs), weights.in_size), (x.shape, len(plan.pairs), weights.in_size)
    return reference.grouped_linear(x, weights.experts, plan.counts.tolist())


@timed("moe")
def combine(y: Tensor, topk_weights: Tensor, plan: ExpertPlan) -> Tensor:
    """y [T·K, H] in the order of the plan → [T, H] in y's dtype: the weighted sum of each token's K rows, in fp32,
    added in the order of its choices."""
    assert y.shape[0] == topk_weights.numel(), (y.shape, topk_weights.shape)
    return reference.combine(y, topk_weights, plan.pairs)
