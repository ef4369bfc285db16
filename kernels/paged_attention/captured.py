"""Decode plans whose lists stand in the caller's memory, for steps that are captured in a CUDA graph.

The caller keeps one flat array of int32 on the host (pinned) and one on the device for each shape that it captures:
``plan_numbers`` says how long. A step is ``fill_plan`` into the host's and one copy; ``captured_plan`` over the
device's serves every replay. Nothing is allocated and nothing waits for the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.paged_attention.plan import AttentionPlan, PrefixGroup
from kernels.paged_attention.work import (
    COLUMNS,
    GROUP_ROWS,
    MAX_SPLIT_ROWS,
    NO_CUT,
    AttentionWork,
    Cut,
    Launch,
    Numbers,
    Pieces,
    chunk_tokens,
    cut,
    group_columns,
    group_pieces,
    merges_of,
    rows_of_pieces,
    split_block_m,
)
from kernels.tiles import tiles
from kernels.upload import spans


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """What a captured step has at most: ``num_sequences`` of up to ``max_tokens`` tokens, each with ``num_queries``
    (1, or the drafted tokens to check and one; at most GROUP_ROWS with the heads of a group). ``has_groups``: some may
    share prefixes (one query, no window)."""

    num_sequences: int
    max_tokens: int
    block_size: int
    num_heads: int
    num_kv_heads: int
    device: torch.device
    num_queries: int = 1
    sliding_window: int | None = None
    has_groups: bool = False

    @property
    def rows(self) -> int:
        """Of a sequence and a key/value head."""
        return self.num_queries * self.num_heads // self.num_kv_heads

    def work_row(self, kernel: str) -> dict[str, int]:
        return tiles(kernel, self.device, sequences=self.num_sequences)

    def most_chunks(self, kernel: str) -> int:
        """Of a piece, however long: see ``chunk_tokens``; two of them may be cut short."""
        row = self.work_row(kernel)
        by_target = row.get("target_items", 0) // (self.num_sequences * self.num_kv_heads)
        found = max(-(-self.max_tokens // row["max_chunk"]), by_target) + 2
        return min(found, row.get("most_chunks", found))

    @property
    def most_partials(self) -> int:
        """Rows of partial results: of each sequence's own keys, and of what it shares."""
        chunks = self.most_chunks("split_work") + (self.most_chunks("group_work") if self.has_groups else 0)
        return self.num_sequences * self.rows * chunks

    def places(self) -> list[slice]:
        """Of starts, contexts, members, counts, merges, items and the groups' items."""
        count = self.num_sequences
        items = count * self.most_chunks("split_work") * COLUMNS
        group_items = 0
        if self.has_groups:
            pieces = count // (GROUP_ROWS // self.rows) + count // 2 + 1
            group_items = pieces * self.most_chunks("group_work") * COLUMNS
        return spans([count + 1, count, count, 2, count * COLUMNS, items, group_items])


def may_capture(num_heads: int, num_kv_heads: int) -> bool:
    """Whether a model's decodes can be captured: a sequence's query heads of a key/value head go into one program."""
    return num_heads // num_kv_heads <= MAX_SPLIT_ROWS


def plan_numbers(shape: DecodeShape) -> int:
    """Length of the arrays, in int32."""
    return shape.places()[-1].stop


def fill_plan(
    out: NDArray[np.int32], context_lens: Sequence[int], shape: DecodeShape, groups: Sequence[PrefixGroup] = ()
) -> None:
    """A step's lists into ``out`` [plan_numbers]. context_lens as in ``plan_attention``, at most num_sequences of them:
    the rows of what is missing, and of a length of 0, stay as they are. A sequence's cut depends on its own length,
    what it shares, and the shape."""
    assert out.shape == (plan_numbers(shape),), (out.shape, plan_numbers(shape))
    assert len(context_lens) <= shape.num_sequences, (len(context_lens), shape)
    assert max(context_lens, default=0) <= shape.max_tokens, (max(context_lens), shape)
    assert shape.has_groups or not groups, "a shape without groups"
    starts, contexts, members, counts, merges, items, group_items = (out[place] for place in shape.places())
    starts[:] = np.arange(shape.num_sequences + 1) * shape.num_queries
    contexts[:] = 0
    contexts[: len(context_lens)] = context_lens
    lengths = contexts.astype(np.int64)
    shared = np.zeros_like(lengths)
    chosen = np.array([member for group in groups for member in group.members], dtype=np.int64)
    members[: len(chosen)] = chosen
    sizes = np.array([len(group.members) for group in groups], dtype=np.int64)
    tokens = np.array([group.num_tokens for group in groups], dtype=np.int64)
    shared[chosen] = tokens.repeat(sizes)
    pieces = group_pieces(sizes, tokens, shape.rows)
    of_groups = _cut(pieces, shape, "group_work", rows_of_pieces(pieces), 0) if groups else NO_CUT
    own_pieces = _own_pieces(lengths, shared, shape)
    own = _cut(
        own_pieces, shape, "split_work", own_pieces.num_rows, of_groups.num_partials, shared[own_pieces.sequence]
    )
    merge = merges_of(own_pieces, own)
    if len(chosen):
        merge[np.isin(merge[:, 0], chosen), 5:] = group_columns(sizes, shape.rows, pieces, of_groups)[chosen.argsort()]
    counts[:] = len(own.items), len(of_groups.items)
    merges[merge.size :] = 0
    for place, numbers in ((merges, merge), (items, own.items), (group_items, of_groups.items)):
        place[: numbers.size] = numbers.ravel()


def _own_pieces(lengths: Numbers, shared: Numbers, shape: DecodeShape) -> Pieces:
    real = lengths.nonzero()[0]
    first = np.maximum(0, lengths[real] - shape.num_queries + 1 - (shape.sliding_window or 1 << 62))
    rows = np.full_like(real, shape.rows)
    return Pieces(real, np.zeros_like(real), rows, np.maximum(first, shared[real]), lengths[real])


def _cut(
    pieces: Pieces, shape: DecodeShape, kernel: str, rows: Numbers, taken: int, shared: Numbers | None = None
) -> Cut:
    """``shared`` is 0 for the pieces that need no partial result where they are whole; None: all need one."""
    programs = shape.num_sequences * shape.num_kv_heads
    chunk = chunk_tokens(pieces.last_key - pieces.first_key, programs, shape.work_row(kernel))
    return cut(pieces, chunk, rows, taken, True if shared is None else shared > 0)


def captured_plan(memory: Tensor, block_tables: Tensor, shape: DecodeShape) -> AttentionPlan:
    """The plan over ``memory`` [plan_numbers] int32 on the device and block_tables [num_sequences, blocks of
    max_tokens], whose contents are a later step's at every replay. For the GPU only."""
    assert memory.shape == (plan_numbers(shape),), (memory.shape, plan_numbers(shape))
    assert memory.dtype == torch.int32, memory.dtype
    count, block_m = shape.num_sequences, split_block_m(shape.rows)
    assert shape.rows <= block_m, shape
    assert len(block_tables) == count, (block_tables.shape, shape)
    starts, contexts, members, counts, merges, items, group_items = (memory[place] for place in shape.places())
    launches = [_launch(block_m, items, counts[:1], shape)]
    if shape.has_groups:
        launches.insert(0, _launch(GROUP_ROWS, group_items, counts[1:], shape, is_group=True))
    merges = merges.view(-1, COLUMNS)
    work = AttentionWork(starts, contexts, members, tuple(launches), merges, shape.most_partials, shape.rows)
    return AttentionPlan(
        block_tables,
        [index * shape.num_queries for index in range(count + 1)],
        [shape.max_tokens] * count,
        shape.block_size,
        shape.num_heads,
        shape.num_kv_heads,
        shape.sliding_window,
        given=work,
    )


def _launch(block_m: int, items: Tensor, count: Tensor, shape: DecodeShape, *, is_group: bool = False) -> Launch:
    row = shape.work_row("captured_group_work" if is_group else "captured_work")
    items = items.view(-1, COLUMNS)
    least = -(-row["programs"] // shape.num_kv_heads)
    programs = min(len(items), max(least, shape.num_sequences * row["per_sequence"]))
    return Launch(block_m, True, items, is_group, count, programs)
