"""Writes the keys and values of a step into the paged cache."""

from torch import Tensor

from kernels.store_kv import reference


def store_kv(keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """keys, values [T, N_kv, D] → caches [num_blocks, block_size, N_kv, D], in place, in the caches' dtype.

    Token t goes to block ``slot_mapping[t] // block_size`` at ``slot_mapping[t] % block_size``; slot_mapping [T]
    is int64, its entries differ and lie inside the cache. Nothing else is touched.
    """
    assert keys.shape == values.shape, (keys.shape, values.shape)
    assert keys.shape[1:] == key_cache.shape[2:], (keys.shape, key_cache.shape)
    assert slot_mapping.shape == keys.shape[:1], (slot_mapping.shape, keys.shape)
    if keys.is_cuda:
        from kernels.store_kv import triton_kernel

        triton_kernel.store_kv(keys, values, key_cache, value_cache, slot_mapping)
        return
    reference.store_kv(keys, values, key_cache, value_cache, slot_mapping)
