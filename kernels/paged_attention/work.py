"""A step's attention as a list of pieces for the GPU: which program computes which rows over which keys.

A row is a query and a head of its group: row = query × group + head. A piece is up to BLOCK_M rows of a sequence
over one chunk of its keys. Chunks of one sequence depend on its own length and on the number of sequences in the
step, never on the others' lengths: at equal step shape a row has the same bits whoever shares the step.

The decodes of a group of sequences share the blocks of their beginning: its rows (member × group + head) go over
those keys together, each member over the rest alone. Only then do a row's bits depend on who shares the step.

A fixed plan makes them depend on the row's position alone, for decodes and prompts: all rows take the split kernel,
in programs of one number of rows, and keys are cut at the multiples of one number of keys. So a row's tiles of keys and
its chunks stand at the same positions whoever its neighbours in a program are; what they see beyond it is masked, and a
masked key, a tile and a chunk of nothing else change no bit of a running softmax: they add 0 times something and
multiply by 2⁰. One chunk that is merged gives what it gives alone, for the same reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kernels.tiles import power_of_2, tiles
from kernels.upload import upload

if TYPE_CHECKING:
    from kernels.paged_attention.plan import AttentionPlan

Numbers = NDArray[np.int64]
MAX_SPLIT_QUERIES = 8  # up to here (decode, and the check of drafted tokens) a sequence takes the split kernel
MAX_SPLIT_ROWS = 64  # of a program of the split kernel
CHUNK_STEP = 64  # keys: chunks of a split sequence are multiples of it
GROUP_ROWS = 64  # of a program of a group: always, so that a row's bits do not depend on the group's size
COLUMNS = 8  # of an item and of a merge, int32
# partial: the first of the rows of partial results that a piece writes; -1: the rows see no other chunk. Of a group
# ``sequence`` is its first place in the list of members, and num_rows the end of the rows (of all members) it takes.
ITEM = ("sequence", "first_row", "num_rows", "first_key", "last_key", "partial")
MERGE = ("sequence", "first_row", "num_rows", "own_first", "own_count", "group_first", "group_stride", "group_count")


@dataclass(frozen=True)
class Launch:
    """Pieces of ``block_m`` rows: items [W, COLUMNS] int32 with the columns of ITEM, those with the most keys first.

    With a ``count`` [1] int32 on the device only the first of them are real, and ``num_programs`` programs a
    key/value head take them in turn: so a captured launch serves lists of any length.
    """

    block_m: int
    is_split: bool
    items: Tensor
    is_group: bool = False
    count: Tensor | None = None
    num_programs: int = 0


@dataclass(frozen=True)
class AttentionWork:
    """``starts`` [N + 1] and ``contexts`` [N] int32 are the plan's on the device; ``members`` int32 the sequences of
    the groups; ``merges`` [M, COLUMNS] int32 have the columns of MERGE: rows of the ``num_partials`` rows of partial
    results, at most ``merge_rows`` a merge, added in their order: the group's, then the own."""

    starts: Tensor
    contexts: Tensor
    members: Tensor
    launches: tuple[Launch, ...]
    merges: Tensor
    num_partials: int
    merge_rows: int


@dataclass(frozen=True)
class Pieces:
    """Rows over a span of keys each, before the keys are cut: all [P]."""

    sequence: Numbers
    first_row: Numbers
    num_rows: Numbers
    first_key: Numbers
    last_key: Numbers

    @staticmethod
    def of(rows: list[tuple[int, ...]]) -> Pieces:
        return Pieces(*np.array(rows, dtype=np.int64).reshape(-1, 5).T)


@dataclass(frozen=True)
class Cut:
    """``items`` [W, COLUMNS]; of each piece where its partial rows begin (-1: none) and its number of chunks."""

    items: Numbers
    first: Numbers
    counts: Numbers
    num_partials: int


NO_CUT = Cut(np.zeros((0, COLUMNS), np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64), 0)


def chunk_tokens(num_keys: Numbers, num_programs: int, row: dict[str, int]) -> Numbers:
    """Keys of a chunk of pieces with ``num_keys``. With ``target_items``: so that the step would have that many
    programs if each of its ``num_programs`` uncut ones had as many keys. With ``most_chunks``, no more than those,
    however long a piece is: what partial results take is bounded by it."""
    if "target_items" not in row:
        return np.full_like(num_keys, row["max_chunk"])
    wanted = -(-num_keys * num_programs // row["target_items"] // CHUNK_STEP) * CHUNK_STEP
    wanted = wanted.clip(row["min_chunk"], row["max_chunk"])
    if "most_chunks" not in row:
        return wanted
    return np.maximum(wanted, -(-num_keys // (row["most_chunks"] * CHUNK_STEP)) * CHUNK_STEP)


def cut(
    pieces: Pieces, chunk: Numbers, rows_written: Numbers, num_partials: int, always: NDArray[np.bool_] | bool = False
) -> Cut:
    """Every piece at the multiples of its own chunk; ``num_partials`` rows of partial results are taken already.
    A piece in several chunks (with ``always``: in any) writes ``rows_written`` rows of partial results a chunk."""
    first_chunk = pieces.first_key // chunk
    counts = -(-pieces.last_key // chunk) - first_chunk
    is_partial = counts > np.where(always, 0, 1)
    taken = np.where(is_partial, counts * rows_written, 0)
    first = np.where(is_partial, num_partials + taken.cumsum() - taken, -1)
    owner = np.repeat(np.arange(len(counts)), counts)
    number = np.arange(len(owner)) - (counts.cumsum() - counts)[owner]
    low = (first_chunk[owner] + number) * chunk[owner]
    items = np.zeros((len(owner), COLUMNS), dtype=np.int64)
    items[:, 0], items[:, 1], items[:, 2] = pieces.sequence[owner], pieces.first_row[owner], pieces.num_rows[owner]
    items[:, 3] = np.maximum(low, pieces.first_key[owner])
    items[:, 4] = np.minimum(low + chunk[owner], pieces.last_key[owner])
    items[:, 5] = np.where(is_partial[owner], first[owner] + number * rows_written[owner], -1)
    longest = (items[:, 3] - items[:, 4]).argsort(kind="stable")  # begun last, they would end last
    return Cut(items[longest], first, counts, num_partials + int(taken.sum()))


def merges_of(pieces: Pieces, own: Cut) -> Numbers:
    """[M, COLUMNS], a merge for every piece with partial results; the group's columns are still 0."""
    merged = (own.first >= 0).nonzero()[0]
    merges = np.zeros((len(merged), COLUMNS), dtype=np.int64)
    columns = (pieces.sequence, pieces.first_row, pieces.num_rows, own.first, own.counts)
    for number, column in enumerate(columns):
        merges[:, number] = column[merged]
    return merges


def group_pieces(sizes: Numbers, shared: Numbers, group: int) -> Pieces:
    """Groups of so many members each over so many shared keys, cut into at most GROUP_ROWS rows of whole members."""
    together = GROUP_ROWS // group
    pieces = -(-sizes // together)
    owner = np.repeat(np.arange(len(sizes)), pieces)
    first_row = (np.arange(len(owner)) - (pieces.cumsum() - pieces)[owner]) * together * group
    last_row = np.minimum(sizes[owner] * group, first_row + together * group)
    first_member = (sizes.cumsum() - sizes)[owner]
    return Pieces(first_member, first_row, last_row, np.zeros_like(owner), shared[owner])


def group_columns(sizes: Numbers, group: int, pieces: Pieces, cut_pieces: Cut) -> Numbers:
    """For every member, in order: where its first row of partial results stands, the rows from one chunk to the next,
    the number of chunks, [members, 3]."""
    together = GROUP_ROWS // group
    number = np.arange(sizes.sum()) - np.repeat(sizes.cumsum() - sizes, sizes)  # within the own group
    piece = np.repeat((pieces.first_row == 0).nonzero()[0], sizes) + number // together
    offset = cut_pieces.first[piece] + number % together * group
    return np.stack((offset, rows_of_pieces(pieces)[piece], cut_pieces.counts[piece]), 1)


def rows_of_pieces(pieces: Pieces) -> Numbers:
    """Of groups: the rows that each has, and so writes."""
    return pieces.num_rows - pieces.first_row


def split_block_m(num_rows: int) -> int:
    """Rows of a program of the split kernel."""
    return min(MAX_SPLIT_ROWS, max(16, power_of_2(num_rows)))


@dataclass
class _Builder:
    plan: AttentionPlan
    num_partials: int = 0

    @property
    def group(self) -> int:
        return self.plan.num_heads // self.plan.num_kv_heads

    def num_queries(self, sequence: int) -> int:
        return self.plan.query_starts[sequence + 1] - self.plan.query_starts[sequence]

    def form(self, sequence: int) -> tuple[str, int]:
        """The table of its pieces, and the rows of a program; 0: the table says."""
        num_queries = self.num_queries(sequence)
        if self.plan.is_fixed:
            return "fixed_work", 0
        if num_queries > MAX_SPLIT_QUERIES:
            return "chunk_work", 0
        return "split_work", split_block_m(num_queries * self.group)

    def cut(self, pieces: Pieces, row: dict[str, int], rows_written: Numbers, always: NDArray[np.bool_] | bool) -> Cut:
        programs = len(self.plan.context_lens) * self.plan.num_kv_heads
        chunk = chunk_tokens(pieces.last_key - pieces.first_key, programs, row)
        done = cut(pieces, chunk, rows_written, self.num_partials, always)
        self.num_partials = done.num_partials
        return done

    def pieces(self, sequences: list[int], block_m: int) -> Pieces:
        shared = {member: group.num_tokens for group in self.plan.groups for member in group.members}
        return Pieces.of([piece for sequence in sequences for piece in self._of_sequence(sequence, block_m, shared)])

    def _of_sequence(self, sequence: int, block_m: int, shared: dict[int, int]) -> list[tuple[int, ...]]:
        num_rows = self.num_queries(sequence) * self.group
        begin = self.plan.context_lens[sequence] - self.num_queries(sequence)
        window = self.plan.sliding_window
        found = []
        for first_row in range(0, num_rows, block_m):
            rows = min(block_m, num_rows - first_row)
            first, last = begin + first_row // self.group, begin + (first_row + rows - 1) // self.group
            first_key = shared.get(sequence, 0) if window is None else max(0, first + 1 - window)
            found.append((sequence, first_row, rows, first_key, last + 1))
        return found


def build_work(plan: AttentionPlan) -> AttentionWork:
    """One transfer to the device a step."""
    device = plan.block_tables.device
    builder = _Builder(plan)
    members = [member for group in plan.groups for member in group.members]
    shapes, lists, columns = _of_groups(builder)
    merges: list[Numbers] = []
    for (table, block_m), sequences in _classes(builder):
        row = tiles(table, device, sequences=len(plan.context_lens))
        pieces = builder.pieces(sequences, block_m or row["block_m"])
        done = builder.cut(pieces, row, pieces.num_rows, np.isin(pieces.sequence, members))
        shapes.append((block_m or row["block_m"], table != "chunk_work", False))
        lists.append(done.items)
        merges.append(merges_of(pieces, done))
    merge = np.concatenate(merges)
    merge[np.isin(merge[:, 0], members), 5:] = columns[np.argsort(members)]
    flat = [plan.query_starts, plan.context_lens, members, merge.ravel(), *(items.ravel() for items in lists)]
    starts, contexts, on_device, merged, *items = upload(flat, device)
    launches = (
        Launch(block_m, is_split, part.view(-1, COLUMNS), is_group)
        for (block_m, is_split, is_group), part in zip(shapes, items, strict=True)
    )
    most = int(merge[:, 2].max(initial=1))
    return AttentionWork(
        starts, contexts, on_device, tuple(launches), merged.view(-1, COLUMNS), builder.num_partials, most
    )


def _of_groups(builder: _Builder) -> tuple[list[tuple[int, bool, bool]], list[Numbers], Numbers]:
    """The launch of the groups, if there are any: its shape, its items, and the columns of their members' merges."""
    plan = builder.plan
    if not plan.groups:
        return [], [], np.zeros((0, 3), dtype=np.int64)
    sizes = np.array([len(group.members) for group in plan.groups])
    pieces = group_pieces(sizes, np.array([group.num_tokens for group in plan.groups]), builder.group)
    row = tiles("group_work", plan.block_tables.device, sequences=len(plan.context_lens))
    done = builder.cut(pieces, row, rows_of_pieces(pieces), always=True)
    return [(GROUP_ROWS, True, True)], [done.items], group_columns(sizes, builder.group, pieces, done)


def _classes(builder: _Builder) -> list[tuple[tuple[str, int], list[int]]]:
    """Each form, and the sequences that take it, in order."""
    classes: dict[tuple[str, int], list[int]] = {}
    for sequence in range(len(builder.plan.context_lens)):
        classes.setdefault(builder.form(sequence), []).append(sequence)
    return sorted(classes.items())
