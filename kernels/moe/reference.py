"""Plain torch. Row exactness comes from ``kernels.linear`` for products; all else here works row by row."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.linear import LinearWeight, linear
from kernels.silu_mul import silu_mul


def route(router_logits: Tensor, top_k: int, softmax_first: bool, renormalize: bool) -> tuple[Tensor, Tensor]:
    limits = torch.finfo(torch.float32)
    logits = router_logits.float().nan_to_num(nan=limits.min, posinf=limits.max, neginf=limits.min)
    # a stable sort and not topk, which promises nothing about ties
    ordered, experts = logits.sort(dim=-1, descending=True, stable=True)
    chosen = experts[:, :top_k].contiguous()
    if not softmax_first:
        return chosen, ordered[:, :top_k].softmax(-1)
    weights = logits.softmax(-1).gather(1, chosen)
    # never 0 / 0: the best of E probabilities is at least 1 / E
    return chosen, weights / _sum_in_order(weights) if renormalize else weights


def _sum_in_order(weights: Tensor) -> Tensor:
    total = weights[:, :1].clone()
    for choice in range(1, weights.shape[1]):
        total += weights[:, choice : choice + 1]
    return total


def sort_by_expert(topk_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    experts = topk_ids.flatten()
    return experts.argsort(stable=True), torch.bincount(experts, minlength=num_experts)


def grouped_silu_mul(x: Tensor, experts: Sequence[LinearWeight], tokens: Tensor, counts: Sequence[int]) -> Tensor:
    return silu_mul(grouped_linear(x[tokens], experts, counts))


def grouped_linear(x: Tensor, experts: Sequence[LinearWeight], counts: Sequence[int]) -> Tensor:
    y = x.new_empty(x.shape[0], experts[0].out_size)
    start = 0
    for expert, count in zip(experts, counts, strict=True):
        if count:
            y[start : start + count] = linear(x[start : start + count], expert)
            start += count
    return y


def combine(y: Tensor, topk_weights: Tensor, pairs: Tensor) -> Tensor:
    num_tokens, top_k = topk_weights.shape
    by_choice = torch.empty_like(y)
    by_choice[pairs] = y
    by_choice = by_choice.view(num_tokens, top_k, -1)
    # product and sum apart: a fused multiply-add would round otherwise in some lanes than in others
    total = by_choice[:, 0].float() * topk_weights[:, 0, None]
    for choice in range(1, top_k):
        total += by_choice[:, choice].float() * topk_weights[:, choice, None]
    return total.to(y.dtype)
