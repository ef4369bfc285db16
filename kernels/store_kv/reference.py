"""Plain torch."""

from torch import Tensor


def store_kv(keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    for new, cache in ((keys, key_cache), (values, value_cache)):
        cache.view(-1, *cache.shape[2:]).index_copy_(0, slot_mapping, new.to(cache.dtype))
