"""Between the q/k/v product and attention, in one launch: norms of heads, rope, the write into the cache."""

from dataclasses import dataclass

from torch import Tensor

from kernels.qk_rope_kv import reference
from kernels.timing import timed

__all__ = ["HeadNorms", "qk_rope_kv"]


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Weights [D] by which every query head and every key head is normalised by itself (Qwen3); see ``rms_norm``."""

    query: Tensor
    key: Tensor
    eps: float


@timed("rope")
def qk_rope_kv(
    heads: Tensor,
    values: Tensor,
    positions: Tensor,
    table: Tensor,
    caches: tuple[Tensor, Tensor],
    slot_mapping: Tensor,
    norms: HeadNorms | None = None,
) -> Tensor:
    """heads [T, N_q + N_kv, D] (query heads, then key heads), values [T, N_kv, D] → turned queries [T, N_q, D].

    Does what ``rms_norm`` of each head (with ``norms``), ``rope`` (positions [T] int64, table of ``rope_table``) and
    ``store_kv`` (caches of keys and values, each [num_blocks, block_size, N_kv, D], slot_mapping [T] int64) do one
    after the other; on a CPU to the last bit. The inputs are left as they are. A slot of -1 stores nothing: for the
    rows that fill up a captured step; their position must lie in the table like any other.
    """
    key_cache, value_cache = caches
    num_kv_heads, head_dim = key_cache.shape[2:]
    assert heads.shape[2] == head_dim == table.shape[-1], (heads.shape, key_cache.shape, table.shape)
    assert heads.shape[1] > num_kv_heads, (heads.shape, key_cache.shape)
    assert values.shape == (heads.shape[0], num_kv_heads, head_dim), (values.shape, heads.shape, key_cache.shape)
    assert key_cache.shape == value_cache.shape, (key_cache.shape, value_cache.shape)
    assert positions.shape == slot_mapping.shape == heads.shape[:1], (positions.shape, slot_mapping.shape)
    if heads.is_cuda:
        from kernels.qk_rope_kv import triton_kernel

        return triton_kernel.qk_rope_kv(heads, values, positions, table, *caches, slot_mapping, norms)
    return reference.qk_rope_kv(heads, values, positions, table, *caches, slot_mapping, norms)
