"""Causal attention of a ragged batch over a paged key/value cache: prefill chunks and decodes in one call."""

from torch import Tensor

from kernels.paged_attention import reference
from kernels.paged_attention.captured import DecodeShape, captured_plan, fill_plan, may_capture, plan_numbers
from kernels.paged_attention.groups import MIN_MEMBERS, MIN_TOKENS, may_group, pays
from kernels.paged_attention.plan import AttentionPlan, PrefixGroup, plan_attention
from kernels.paged_attention.work import MAX_SPLIT_QUERIES
from kernels.timing import timed

__all__ = [
    "MAX_HEAD_BYTES",
    "MAX_SPLIT_QUERIES",
    "MIN_MEMBERS",
    "MIN_TOKENS",
    "AttentionPlan",
    "DecodeShape",
    "PrefixGroup",
    "captured_plan",
    "fill_plan",
    "may_capture",
    "may_group",
    "paged_attention",
    "pays",
    "plan_attention",
    "plan_numbers",
]

MAX_HEAD_BYTES = 512  # of the Triton kernel: of 128 rows of fp32 and head size 256 shared memory has no room


@timed("attention")
def paged_attention(
    queries: Tensor, key_cache: Tensor, value_cache: Tensor, plan: AttentionPlan, *, scale: float
) -> Tensor:
    """queries [T, N_q, D], caches [num_blocks, block_size, N_kv, D] → [T, N_q, D] in the queries' dtype.

    The keys and values of the queries themselves stand in the cache already (``store_kv``). Query head h reads
    key/value head h // (N_q / N_kv). A query at position p sees the positions 0 … p of its own sequence, or the
    last ``plan.sliding_window`` of them. Scores and softmax are fp32. Cache contents that a query does not see
    never reach its row, whatever they hold. On a CPU a row's bits depend on what it sees only: not on the other
    sequences, the chunk that it came in, or the number of threads.

    ``plan`` is made once a step by ``plan_attention`` (or stands in memory for a captured step: ``captured_plan``) and
    serves every layer. After Kwon et al. (arXiv 2309.06180)
    and Dao et al. (arXiv 2205.14135).
    """
    assert key_cache.shape == value_cache.shape, (key_cache.shape, value_cache.shape)
    assert key_cache.shape[1:3] == (plan.block_size, plan.num_kv_heads), key_cache.shape
    assert queries.shape == (plan.num_tokens, plan.num_heads, key_cache.shape[3]), queries.shape
    if queries.is_cuda:
        from kernels.paged_attention import triton_kernel

        if queries.shape[2] * queries.element_size() <= MAX_HEAD_BYTES:
            return triton_kernel.paged_attention(queries, key_cache, value_cache, plan, scale)
    return reference.paged_attention(queries, key_cache, value_cache, plan, scale)
