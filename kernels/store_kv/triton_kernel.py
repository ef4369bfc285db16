# pyright: reportIndexIssue=false, reportCallIssue=false, reportAttributeAccessIssue=false
"""One program copies the keys and the values of a token."""

import triton
import triton.language as tl
from torch import Tensor

from kernels.tiles import power_of_2, tiles


@triton.jit
def _store_kv(
    p_keys,
    p_values,
    p_key_cache,
    p_value_cache,
    p_slot_mapping,
    stride_key,
    stride_value,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_token = tl.program_id(0).to(tl.int64)
    i_slot = tl.load(p_slot_mapping + i_token).to(tl.int64)
    o_size = tl.arange(0, BLOCK)
    mask = o_size < SIZE
    b_keys = tl.load(p_keys + i_token * stride_key + o_size, mask=mask, other=0.0)
    b_values = tl.load(p_values + i_token * stride_value + o_size, mask=mask, other=0.0)
    tl.store(p_key_cache + i_slot * SIZE + o_size, b_keys.to(p_key_cache.dtype.element_ty), mask=mask)
    tl.store(p_value_cache + i_slot * SIZE + o_size, b_values.to(p_value_cache.dtype.element_ty), mask=mask)


def store_kv(keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """See the package; keys and values may be slices of wider rows, the caches are contiguous."""
    num_tokens, num_kv_heads, head_dim = keys.shape
    for new in (keys, values):
        assert new.stride()[1:] == (head_dim, 1), new.stride()
    assert key_cache.is_contiguous(), key_cache.stride()
    assert value_cache.is_contiguous(), value_cache.stride()
    size = num_kv_heads * head_dim
    block = power_of_2(size)
    if num_tokens:
        _store_kv[(num_tokens,)](
            keys,
            values,
            key_cache,
            value_cache,
            slot_mapping,
            keys.stride(0),
            values.stride(0),
            SIZE=size,
            BLOCK=block,
            num_warps=tiles("store_kv", keys.device, size=block)["num_warps"],
        )
