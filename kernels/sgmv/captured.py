"""A step's rows by slot in memory of the caller, for steps that are captured in a CUDA graph."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kernels.sgmv.plan import Segments, SgmvPlan, cut_rows
from kernels.upload import spans

SEGMENT_ROWS = 16  # of one slot that a program takes in a large step
# Up to here each row is by itself, whatever the mix: 64 rows of 64 adapters 9.9 µs instead of 11.7, of 8 adapters 7.2
# instead of 6.7. 256 rows of 8 adapters would take 24 instead of 13.
SPARSE_ROWS = 64


def segment_numbers(num_rows: int) -> int:
    """Length of the array, in int32: in the worst case each row is a segment."""
    return _places(num_rows)[-1].stop


def fill_segments(out: NDArray[np.int32], row_slots: Sequence[int], num_rows: int, empty_slot: int) -> None:
    """row_slots: the slot of each row, -1 = none, at most num_rows of them → out [segment_numbers]. Rows without one
    stand as rows of ``empty_slot``, whose rank must be 0; segments that are left over have no row."""
    assert len(row_slots) <= num_rows, (len(row_slots), num_rows)
    rows, slot_of_row, table = (out[place] for place in _places(num_rows))
    table = table.reshape(-1, 4)
    slots = np.full(num_rows, -1, dtype=np.int64)
    slots[: len(row_slots)] = row_slots
    slot_of_row[:] = slots
    rows[:], segments = cut_rows(slots, segment_rows(num_rows))
    segments[segments[:, 2] < 0, 2] = empty_slot
    table[: len(segments)] = segments
    table[len(segments) :] = (0, 0, empty_slot, 0)


class CapturedSgmv(SgmvPlan):
    """A plan for ``num_rows`` rows over ``memory`` [segment_numbers] int32 on the device.

    It serves any mix of adapters whose slices have a ``rank_table``, which has an entry for ``empty_slot`` too;
    ``lora_ranks[empty_slot]`` of a slice is what no rank in use is above. Run the step once before it is captured.
    """

    def __init__(self, memory: Tensor, num_rows: int, empty_slot: int) -> None:
        super().__init__(num_rows, {empty_slot: list(range(num_rows))}, memory.device)
        rows, slot_of_row, table = (memory[place] for place in _places(num_rows))
        self._row_slots.append(slot_of_row)
        self._given = Segments(rows, table.view(-1, 4), num_rows, segment_rows(num_rows))

    def is_sparse(self, most_rows: int) -> bool:
        return self._given.most_rows == 1

    def segments(self, most_rows: int) -> Segments:
        """Those in memory, whatever a table would have: no more rows each."""
        assert self._given.most_rows <= most_rows, (self._given.most_rows, most_rows)
        return self._given


def segment_rows(num_rows: int) -> int:
    """Of one slot that a program takes at most, in a step of so many."""
    return 1 if num_rows <= SPARSE_ROWS else SEGMENT_ROWS


def _places(num_rows: int) -> list[slice]:
    return spans([num_rows, num_rows, num_rows * 4])
