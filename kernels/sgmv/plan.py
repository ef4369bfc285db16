"""Which rows belong to which slot, cut into tiles once a step for all layers."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

TILE_ROWS = 4  # rows of one slot that are multiplied together; fixed, so that the same kernel takes them always
_LONG_TILES = 4  # from here on a slot's tiles share its matrices without a copy


@dataclass(frozen=True)
class Group:
    """Tiles that are multiplied in one go: all of one rank, and of one slot if that has many rows.

    ``rows`` [tiles × TILE_ROWS] are row numbers, the last one of a tile repeated to fill it; ``real`` says which
    of them count (None = all). ``slots`` [tiles], or one number for all.
    """

    lora_rank: int
    rows: Tensor
    real: Tensor | None
    slots: Tensor | int


@dataclass(frozen=True)
class SgmvPlan:
    """A step's rows by slot. Made by ``plan_sgmv``."""

    num_rows: int
    rows_of_slot: dict[int, list[int]]
    device: torch.device
    _groups: dict[tuple[int, ...], tuple[Group, ...]] = field(default_factory=dict)

    def groups(self, lora_ranks: tuple[int, ...], multiple: int) -> tuple[Group, ...]:
        """The tiles of the slots with a rank, for a module whose ranks by slot are ``lora_ranks``; remembered."""
        found = self._groups.get(lora_ranks)
        if found is None:
            found = self._groups[lora_ranks] = tuple(self._make_groups(lora_ranks, multiple))
        return found

    def _make_groups(self, lora_ranks: tuple[int, ...], multiple: int) -> list[Group]:
        groups: list[Group] = []
        short: dict[int, list[int]] = {}
        for slot, rows in self.rows_of_slot.items():
            if not lora_ranks[slot]:
                continue
            lora_rank = -(-lora_ranks[slot] // multiple) * multiple
            if len(rows) > _LONG_TILES * TILE_ROWS:
                groups.append(self._group(lora_rank, [slot], slot))
            else:
                short.setdefault(lora_rank, []).append(slot)
        return groups + [self._group(lora_rank, slots, None) for lora_rank, slots in short.items()]

    def _group(self, lora_rank: int, slots: list[int], only_slot: int | None) -> Group:
        rows: list[int] = []
        real: list[bool] = []
        slot_of_tile: list[int] = []
        for slot in slots:
            own = self.rows_of_slot[slot]
            padding = -len(own) % TILE_ROWS
            rows += own + own[-1:] * padding
            real += [True] * len(own) + [False] * padding
            slot_of_tile += [slot] * ((len(own) + padding) // TILE_ROWS)
        kept = None if all(real) else torch.tensor(real, device=self.device).nonzero().squeeze(-1)
        where = torch.tensor(slot_of_tile, device=self.device) if only_slot is None else only_slot
        return Group(lora_rank, torch.tensor(rows, device=self.device), kept, where)


def plan_sgmv(row_slots: list[int], device: torch.device) -> SgmvPlan:
    """row_slots: the slot of each row, -1 = none."""
    rows_of_slot: dict[int, list[int]] = {}
    for row, slot in enumerate(row_slots):
        if slot >= 0:
            rows_of_slot.setdefault(slot, []).append(row)
    return SgmvPlan(len(row_slots), rows_of_slot, device)
