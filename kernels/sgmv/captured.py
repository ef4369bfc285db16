"""A step's rows by slot in memory of the caller, for steps that are captured in a CUDA graph."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kernels.sgmv.plan import Segments, SgmvPlan
from kernels.upload import spans

SEGMENT_ROWS = 16  # of one slot that a program takes


def segment_numbers(num_rows: int) -> int:
    """Length of the array, in int32: in the worst case each row is a segment."""
    return _places(num_rows)[-1].stop


def fill_segments(out: NDArray[np.int32], row_slots: Sequence[int], num_rows: int, empty_slot: int) -> None:
    """row_slots: the slot of each row, -1 = none, at most num_rows of them → out [segment_numbers]. What is left over
    stands for no row of ``empty_slot``, whose rank must be 0."""
    assert len(row_slots) <= num_rows, (len(row_slots), num_rows)
    rows, table = (out[place] for place in _places(num_rows))
    table = table.reshape(-1, 4)
    slots = np.asarray(row_slots, dtype=np.int64)
    order = slots.argsort(kind="stable")
    order = order[slots[order] >= 0]
    rows[: len(order)] = order
    rows[len(order) :] = 0
    _, starts, counts = np.unique(slots[order], return_index=True, return_counts=True)
    pieces = -(-counts // SEGMENT_ROWS)
    owner = np.repeat(np.arange(len(counts)), pieces)
    number = np.arange(len(owner)) - (pieces.cumsum() - pieces)[owner]
    first = starts[owner] + number * SEGMENT_ROWS
    table[: len(owner), 0] = first
    table[: len(owner), 1] = np.minimum(SEGMENT_ROWS, starts[owner] + counts[owner] - first)
    table[: len(owner), 2] = slots[order][starts[owner]]
    table[len(owner) :] = (0, 0, empty_slot, 0)


class CapturedSgmv(SgmvPlan):
    """A plan for ``num_rows`` rows over ``memory`` [segment_numbers] int32 on the device."""

    def __init__(self, memory: Tensor, num_rows: int, empty_slot: int) -> None:
        super().__init__(num_rows, {empty_slot: list(range(num_rows))}, memory.device)
        rows, table = (memory[place] for place in _places(num_rows))
        self._segments[SEGMENT_ROWS] = Segments(rows, table.view(-1, 4))

    def segments(self, most_rows: int) -> Segments:
        assert most_rows == SEGMENT_ROWS, f"segments of {most_rows} rows are not in memory"
        return self._segments[most_rows]


def _places(num_rows: int) -> list[slice]:
    return spans([num_rows, num_rows * 4])
