"""Plain torch: tiles of TILE_ROWS rows of one slot through batched products of one shape.

The shape of a tile's product never depends on the batch, so a row's bits do not either. Ranks are rounded up to a
multiple of RANK_MULTIPLE with zeros, which add nothing: for narrower matrices MKL's choice of kernel depends on
the number of tiles (measured for ranks 1 … 4).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.sgmv.low import LoraSlice, TiledLow
from kernels.sgmv.plan import RANK_MULTIPLE, TILE_ROWS, Group, SgmvPlan


def shrink(x: Tensor, slices: Sequence[LoraSlice], plan: SgmvPlan) -> TiledLow | None:
    gathered: dict[int, Tensor] = {}
    products: list[tuple[LoraSlice, Group, Tensor]] = []
    for part in slices:
        for group in plan.groups(part.lora_ranks, part.a.shape[1]):
            if id(group) not in gathered:  # packed slices mostly share their groups
                gathered[id(group)] = _tiles(x, group)
            low = torch.bmm(gathered[id(group)], _chosen(part.a, group).transpose(1, 2))
            products.append((part, group, low))
    return TiledLow(tuple(products)) if products else None


def expand(y: Tensor, low: TiledLow) -> None:
    for part, group, product in low.products:
        columns = y[:, part.start : part.start + part.b.shape[2]]
        _add(columns, torch.bmm(product, _chosen(part.b, group)).flatten(0, 1), group)


def _tiles(x: Tensor, group: Group) -> Tensor:
    """[tiles, TILE_ROWS, in] fp32."""
    aligned = group.span is not None and len(group.real) == len(group.rows)
    rows = x[group.span] if aligned else x.index_select(0, group.rows)
    return rows.unflatten(0, (-1, TILE_ROWS)).float()


def _chosen(weights: Tensor, group: Group) -> Tensor:
    """weights [S, R, size] → [tiles, group.lora_rank, size] fp32; one slot's without a copy for each tile."""
    size = weights.shape[2]
    if group.only_slot is not None:
        return weights[group.only_slot, : group.lora_rank].float().expand(group.num_tiles, -1, -1)
    found = weights.view(-1, RANK_MULTIPLE * size).index_select(0, group.pieces)
    return found.view(-1, group.lora_rank, size).float()


def _add(y: Tensor, delta: Tensor, group: Group) -> None:
    if group.span is not None:  # one run: what fills the last tile stands behind it
        y[group.span] += delta[: len(group.real)]
        return
    if len(group.real) < len(group.rows):
        delta = delta.index_select(0, group.real)
    y.index_copy_(0, group.targets, (y.index_select(0, group.targets) + delta).to(y.dtype))
