"""A step's attention as a list of pieces for the GPU: which program computes which rows over which keys.

A row is a query and a head of its group: row = query × group + head. A piece is up to BLOCK_M rows of a sequence
over one chunk of its keys. Chunks of one sequence depend on its own length and on the number of sequences in the
step, never on the others' lengths: at equal step shape a row has the same bits whoever shares the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from kernels.tiles import power_of_2, tiles
from kernels.upload import upload

if TYPE_CHECKING:
    from kernels.paged_attention.plan import AttentionPlan

MAX_SPLIT_QUERIES = 8  # up to here (decode, and the check of drafted tokens) a sequence takes the split kernel
CHUNK_STEP = 64  # keys: chunks of a split sequence are multiples of it
COLUMNS = 8  # of an item and of a merge, int32
ITEM = ("sequence", "first_row", "first_key", "last_key", "partial")  # partial -1: the rows see no other chunk
MERGE = ("sequence", "first_row", "num_rows", "first_partial", "num_partials")


@dataclass(frozen=True)
class Launch:
    """Pieces of ``block_m`` rows: items [W, COLUMNS] int32 with the columns of ITEM, those with the most keys first."""

    block_m: int
    is_split: bool
    items: Tensor


@dataclass(frozen=True)
class AttentionWork:
    """``starts`` [N + 1] and ``contexts`` [N] int32 are the plan's on the device; ``merges`` [M, COLUMNS] int32 has
    the columns of MERGE: ``num_partials`` partials of at most ``partial_rows`` rows each, added in their order."""

    starts: Tensor
    contexts: Tensor
    launches: tuple[Launch, ...]
    merges: Tensor
    num_partials: int
    partial_rows: int


@dataclass
class _Builder:
    plan: AttentionPlan
    merges: list[int]
    num_partials: int = 0
    partial_rows: int = 1

    @property
    def group(self) -> int:
        return self.plan.num_heads // self.plan.num_kv_heads

    def num_queries(self, sequence: int) -> int:
        return self.plan.query_starts[sequence + 1] - self.plan.query_starts[sequence]

    def block_m(self, sequence: int) -> int:
        """Rows of a program; 0 for a prompt's chunk, whose table says."""
        if self.num_queries(sequence) > MAX_SPLIT_QUERIES:
            return 0
        rows = self.num_queries(sequence) * self.group
        return min(64, max(16, power_of_2(rows)))

    def items(self, sequences: list[int], block_m: int, row: dict[str, int]) -> list[int]:
        items = [item for sequence in sequences for item in self._of_sequence(sequence, block_m, row)]
        items.sort(key=lambda item: item[2] - item[3])  # the longest first: begun last, they would end last
        return [number for item in items for number in _padded(item)]

    def _of_sequence(self, sequence: int, block_m: int, row: dict[str, int]) -> list[tuple[int, ...]]:
        num_rows = self.num_queries(sequence) * self.group
        begin = self.plan.context_lens[sequence] - self.num_queries(sequence)
        items: list[tuple[int, ...]] = []
        for first_row in range(0, num_rows, block_m):
            rows = min(block_m, num_rows - first_row)
            borders = self._borders(begin + first_row // self.group, begin + (first_row + rows - 1) // self.group, row)
            count = len(borders) - 1
            numbers = range(self.num_partials, self.num_partials + count) if count > 1 else [-1]
            items += [(sequence, first_row, *part) for part in zip(borders, borders[1:], numbers, strict=False)]
            if count > 1:
                self.merges += _padded((sequence, first_row, rows, self.num_partials, count))
                self.num_partials += count
                self.partial_rows = max(self.partial_rows, rows)
        return items

    def _borders(self, first: int, last: int, row: dict[str, int]) -> list[int]:
        """Where the chunks of the keys that the positions first … last see begin and end."""
        window = self.plan.sliding_window
        first_key = 0 if window is None else max(0, first + 1 - window)
        chunk = self._chunk_tokens(last + 1 - first_key, row)
        return [first_key, *range(first_key // chunk * chunk + chunk, last + 1, chunk), last + 1]

    def _chunk_tokens(self, num_keys: int, row: dict[str, int]) -> int:
        """With ``target_items``: so that the step would have that many programs if all of its sequences were as long
        as this one."""
        if "target_items" not in row:
            return row["max_chunk"]
        programs = len(self.plan.context_lens) * self.plan.num_kv_heads
        wanted = -(-num_keys * programs // row["target_items"] // CHUNK_STEP) * CHUNK_STEP
        return min(max(wanted, row["min_chunk"]), row["max_chunk"])


def _padded(numbers: tuple[int, ...]) -> tuple[int, ...]:
    return (*numbers, *(0,) * (COLUMNS - len(numbers)))


def build_work(plan: AttentionPlan) -> AttentionWork:
    """One transfer to the device a step."""
    device = plan.block_tables.device
    builder = _Builder(plan, [])
    classes: dict[int, list[int]] = {}
    for sequence in range(len(plan.context_lens)):
        classes.setdefault(builder.block_m(sequence), []).append(sequence)
    shapes: list[tuple[int, bool]] = []
    lists: list[list[int]] = []
    for block_m, sequences in sorted(classes.items()):
        row = tiles("split_work" if block_m else "chunk_work", device, sequences=len(plan.context_lens))
        shapes.append((block_m or row["block_m"], block_m > 0))
        lists.append(builder.items(sequences, block_m or row["block_m"], row))
    starts, contexts, merges, *items = upload([plan.query_starts, plan.context_lens, builder.merges, *lists], device)
    launches = [Launch(*shape, part.view(-1, COLUMNS)) for shape, part in zip(shapes, items, strict=True)]
    return AttentionWork(
        starts, contexts, tuple(launches), merges.view(-1, COLUMNS), builder.num_partials, builder.partial_rows
    )
