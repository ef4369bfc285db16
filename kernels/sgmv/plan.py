"""Which rows belong to which slot, cut into tiles once a step for all layers."""

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.upload import upload

TILE_ROWS = 4  # rows of one slot that are multiplied together; fixed, so that the same kernel takes them always
RANK_MULTIPLE = 8  # see reference.py
_LONG_TILES = 4  # from here on a slot's tiles share its matrices without a copy


@dataclass(frozen=True)
class Group:
    """Tiles that are multiplied in one go: all of one rank, and of one slot if that has many rows.

    ``rows`` [tiles × TILE_ROWS] are row numbers, a slot's last one repeated to fill its last tile; ``real`` are the
    indices into it that count and ``targets`` = rows[real]; ``span`` is the same as a slice where they are one run
    and only the last tile is filled up. ``only_slot`` has all tiles, if not None; ``pieces`` are the tiles' rows of
    weights [S, R, size] seen as [S × R / RANK_MULTIPLE, RANK_MULTIPLE × size].
    """

    lora_rank: int
    rows: Tensor
    real: Tensor
    targets: Tensor
    span: slice | None
    only_slot: int | None
    pieces: Tensor

    @property
    def num_tiles(self) -> int:
        return len(self.rows) // TILE_ROWS


@dataclass(frozen=True)
class Segments:
    """For the GPU: ``rows`` [T] int32, sorted by slot, those without one behind all others, and ``table`` [segments, 4]
    int32: where in ``rows`` a segment begins, its number of rows (0: none, of a captured step with fewer segments), its
    slot (-1: none), 0. The first ``num_owned`` segments have a slot. None has more than ``most_rows``; with one, each
    row is taken by itself."""

    rows: Tensor
    table: Tensor
    num_owned: int
    most_rows: int


@dataclass(frozen=True)
class SgmvPlan:
    """A step's rows by slot. Made by ``plan_sgmv``."""

    num_rows: int
    rows_of_slot: dict[int, list[int]]
    device: torch.device
    _groups: dict[tuple[int, ...], tuple[Group, ...]] = field(default_factory=dict)
    _segments: dict[int, Segments] = field(default_factory=dict)
    _row_slots: list[Tensor] = field(default_factory=list)

    def row_slots(self) -> Tensor:
        """[T] int32 on the device: the slot of each row, -1 = none; remembered."""
        if not self._row_slots:
            self._row_slots.extend(upload([self._slot_of_each()], self.device))
        return self._row_slots[0]

    def segments(self, most_rows: int) -> Segments:
        """Segments of at most ``most_rows`` rows; remembered."""
        if most_rows not in self._segments:
            self._segments[most_rows] = self._make_segments(most_rows)
        return self._segments[most_rows]

    def is_sparse(self, most_rows: int) -> bool:
        """Whether slots have at most ``most_rows`` rows on average: then a GPU takes each row by itself."""
        return sum(map(len, self.rows_of_slot.values())) <= most_rows * len(self.rows_of_slot)

    def _make_segments(self, most_rows: int) -> Segments:
        rows, table = cut_rows(self._slot_of_each(), most_rows)
        on_device = upload([rows, table.ravel()], self.device)
        return Segments(on_device[0], on_device[1].view(-1, 4), int((table[:, 2] >= 0).sum()), most_rows)

    def _slot_of_each(self) -> NDArray[np.int64]:
        row_slots = np.full(self.num_rows, -1, dtype=np.int64)
        for slot, own in self.rows_of_slot.items():
            row_slots[own] = slot
        return row_slots

    def groups(self, lora_ranks: tuple[int, ...], num_ranks: int) -> tuple[Group, ...]:
        """The tiles of the slots with a rank, for a module whose ranks by slot are ``lora_ranks`` in weights
        [S, num_ranks, size]; remembered."""
        found = self._groups.get((num_ranks, *lora_ranks))
        if found is None:
            found = self._groups[num_ranks, *lora_ranks] = tuple(self._make_groups(lora_ranks, num_ranks))
        return found

    def _make_groups(self, lora_ranks: tuple[int, ...], num_ranks: int) -> list[Group]:
        groups: list[Group] = []
        short: dict[int, list[int]] = {}
        for slot, rows in self.rows_of_slot.items():
            if not lora_ranks[slot]:
                continue
            lora_rank = -(-lora_ranks[slot] // RANK_MULTIPLE) * RANK_MULTIPLE
            if len(rows) > _LONG_TILES * TILE_ROWS:
                groups.append(self._group(lora_rank, num_ranks, [slot]))
            else:
                short.setdefault(lora_rank, []).append(slot)
        return groups + [self._group(lora_rank, num_ranks, slots) for lora_rank, slots in short.items()]

    def _group(self, lora_rank: int, num_ranks: int, slots: list[int]) -> Group:
        rows: list[int] = []
        real: list[int] = []
        slot_of_tile: list[int] = []
        for slot in slots:
            own = self.rows_of_slot[slot]
            padding = -len(own) % TILE_ROWS
            real += range(len(rows), len(rows) + len(own))
            rows += own + own[-1:] * padding
            slot_of_tile += [slot] * ((len(own) + padding) // TILE_ROWS)
        every, kept, of_tile = (torch.tensor(numbers, device=self.device) for numbers in (rows, real, slot_of_tile))
        steps = torch.arange(lora_rank // RANK_MULTIPLE, device=self.device)
        pieces = (of_tile[:, None] * (num_ranks // RANK_MULTIPLE) + steps).flatten()
        only_slot = slots[0] if len(slots) == 1 else None
        return Group(lora_rank, every, kept, every[kept], _span(rows, len(real)), only_slot, pieces)


def _span(rows: list[int], num_real: int) -> slice | None:
    """The rows as a slice; None when they are no run, or when a tile before the last is filled up."""
    first, stop = rows[0], rows[0] + num_real
    return slice(first, stop) if rows[:num_real] == list(range(first, stop)) else None


def plan_sgmv(row_slots: list[int], device: torch.device) -> SgmvPlan:
    """row_slots: the slot of each row, -1 = none."""
    rows_of_slot: dict[int, list[int]] = {}
    for row, slot in enumerate(row_slots):
        if slot >= 0:
            rows_of_slot.setdefault(slot, []).append(row)
    return SgmvPlan(len(row_slots), rows_of_slot, device)


def cut_rows(row_slots: NDArray[np.int64], most_rows: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The slot of each row, -1 = none → ``rows`` and ``table`` of Segments of at most ``most_rows`` rows."""
    rows = np.where(row_slots < 0, np.iinfo(np.int64).max, row_slots).argsort(kind="stable")
    slots = row_slots[rows]
    first = np.flatnonzero(np.diff(slots, prepend=-2))
    lengths = np.diff(first, append=len(slots))
    pieces = -(-lengths // most_rows)
    owner = np.repeat(np.arange(len(first)), pieces)
    begin = (np.arange(len(owner)) - (pieces.cumsum() - pieces)[owner]) * most_rows
    count = np.minimum(lengths[owner] - begin, most_rows)
    return rows, np.stack((first[owner] + begin, count, slots[first][owner], np.zeros_like(count)), 1)
