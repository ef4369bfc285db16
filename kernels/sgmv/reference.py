"""Plain torch: tiles of TILE_ROWS rows of one slot through batched products of one shape.

The shape of a tile's product never depends on the batch, so a row's bits do not either. Ranks are rounded up to a
multiple of RANK_MULTIPLE with zeros, which add nothing: for narrower matrices MKL's choice of kernel depends on
the number of tiles (measured for ranks 1 … 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels.sgmv.plan import TILE_ROWS, Group, SgmvPlan

if TYPE_CHECKING:
    from kernels.sgmv import LoraSlice

RANK_MULTIPLE = 8


def sgmv(y: Tensor, x: Tensor, slices: Sequence[LoraSlice], plan: SgmvPlan) -> None:
    gathered: dict[int, Tensor] = {}
    for part in slices:
        for group in plan.groups(part.lora_ranks, RANK_MULTIPLE):
            if id(group) not in gathered:  # packed slices mostly share their groups
                gathered[id(group)] = x[group.rows].unflatten(0, (-1, TILE_ROWS)).float()
            delta = torch.bmm(_shrink(gathered[id(group)], part.a, group), _chosen(part.b, group)).flatten(0, 1)
            _add(y[:, part.start : part.start + part.b.shape[2]], delta, group)


def _shrink(tiles: Tensor, a: Tensor, group: Group) -> Tensor:
    return torch.bmm(tiles, _chosen(a, group).transpose(1, 2))


def _chosen(weights: Tensor, group: Group) -> Tensor:
    """weights [S, R, size] → [tiles, group.lora_rank, size] fp32; one slot's without a copy for each tile."""
    ranked = weights[:, : group.lora_rank]
    if isinstance(group.slots, int):
        return ranked[group.slots].float().expand(len(group.rows) // TILE_ROWS, -1, -1)
    return ranked[group.slots].float()


def _add(y: Tensor, delta: Tensor, group: Group) -> None:
    rows = group.rows
    if group.real is not None:
        rows, delta = rows[group.real], delta[group.real]
    y[rows] = (y[rows].float() + delta).to(y.dtype)
