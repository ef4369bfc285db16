"""The references of the three ops, one after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels.rms_norm.reference import rms_norm
from kernels.rope.reference import rope
from kernels.store_kv.reference import store_kv

if TYPE_CHECKING:
    from kernels.qk_rope_kv import HeadNorms


def qk_rope_kv(
    heads: Tensor,
    values: Tensor,
    positions: Tensor,
    table: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    norms: HeadNorms | None,
) -> Tensor:
    num_heads = heads.shape[1] - values.shape[1]
    turned = rope(heads if norms is None else _normalised(heads, num_heads, norms), positions, table)
    keys = turned[:, num_heads:]
    if bool((slot_mapping < 0).any()):
        kept = slot_mapping >= 0
        keys, values, slot_mapping = keys[kept], values[kept], slot_mapping[kept]
    store_kv(keys, values, key_cache, value_cache, slot_mapping)
    return turned[:, :num_heads].contiguous()


def _normalised(heads: Tensor, num_heads: int, norms: HeadNorms) -> Tensor:
    queries, keys = heads.split((num_heads, heads.shape[1] - num_heads), dim=1)
    return torch.cat((rms_norm(queries, norms.query, norms.eps), rms_norm(keys, norms.key, norms.eps)), 1)
