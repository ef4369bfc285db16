"""Between the q/k/v product and attention, in one launch: norms of heads, rope, the write into the cache."""

from dataclasses import dataclass

from torch import Tensor

from kernels.qk_rope_kv import reference
from kernels.sgmv import Low, PartialLow, expand
from kernels.tiles import tiles
from kernels.timing import timed

__all__ = ["HeadNorms", "qk_rope_kv"]


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Weights [D] by which every query head and every key head is normalised by itself (Qwen3); see ``rms_norm``."""

    query: Tensor
    key: Tensor
    eps: float


def qk_rope_kv(
    heads: Tensor,
    positions: Tensor,
    table: Tensor,
    caches: tuple[Tensor, Tensor],
    slot_mapping: Tensor,
    norms: HeadNorms | None = None,
    low: Low | None = None,
) -> Tensor:
    """heads [T, N_q + 2 N_kv, D] (query heads, key heads, value heads) → turned queries [T, N_q, D].

    Does what ``rms_norm`` of each query and key head (with ``norms``), ``rope`` (positions [T] int64, table of
    ``rope_table``) and ``store_kv`` (caches of keys and values, each [num_blocks, block_size, N_kv, D], slot_mapping
    [T] int64) do one after the other; on a CPU to the last bit. A slot of -1 stores nothing: for the rows that fill up
    a captured step; their position must lie in the table like any other.

    ``low``: what adapters add to the heads before (``kernels.sgmv.shrink``), at most a slice each of queries, keys and
    values; a token's heads must be dense then, and may have changed. Without it they are left as they are. A GPU adds
    it on its way where the tables say so.
    """
    key_cache, value_cache = caches
    num_kv_heads, head_dim = key_cache.shape[2:]
    assert heads.shape[2] == head_dim == table.shape[-1], (heads.shape, key_cache.shape, table.shape)
    assert heads.shape[1] > 2 * num_kv_heads, (heads.shape, key_cache.shape)
    assert key_cache.shape == value_cache.shape, (key_cache.shape, value_cache.shape)
    assert positions.shape == slot_mapping.shape == heads.shape[:1], (positions.shape, slot_mapping.shape)
    if isinstance(low, PartialLow) and _adds_on_its_way(low, heads):
        return _with_adapters(heads, positions, table, caches, slot_mapping, norms, low)
    if low is not None:
        expand(heads.view(len(heads), heads.shape[1] * head_dim), low)
    return _alone(heads, positions, table, caches, slot_mapping, norms)


def _adds_on_its_way(low: PartialLow, heads: Tensor) -> bool:
    row = tiles("rope_low", heads.device, tokens=len(heads), rank=low.lora_rank)
    return low.segments.most_rows == 1 and bool(row["fused"])


@timed("rope")
def _alone(
    heads: Tensor,
    positions: Tensor,
    table: Tensor,
    caches: tuple[Tensor, Tensor],
    slot_mapping: Tensor,
    norms: HeadNorms | None,
) -> Tensor:
    num_kv_heads = caches[0].shape[2]
    turned, values = heads[:, :-num_kv_heads], heads[:, -num_kv_heads:]
    if heads.is_cuda:
        from kernels.qk_rope_kv import triton_kernel

        return triton_kernel.qk_rope_kv(turned, values, positions, table, *caches, slot_mapping, norms)
    return reference.qk_rope_kv(turned, values, positions, table, *caches, slot_mapping, norms)


@timed("rope")
def _with_adapters(
    heads: Tensor,
    positions: Tensor,
    table: Tensor,
    caches: tuple[Tensor, Tensor],
    slot_mapping: Tensor,
    norms: HeadNorms | None,
    low: PartialLow,
) -> Tensor:
    from kernels.qk_rope_kv import triton_low

    return triton_low.qk_rope_kv(heads, positions, table, *caches, slot_mapping, norms, low)
