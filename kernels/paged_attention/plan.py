"""What a step's attention needs to know, worked out once for all layers."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kernels.paged_attention.work import GROUP_ROWS, AttentionWork, build_work

TILE = 128  # keys that are scored together; a multiple fixed for all, since it decides the order of summation
MAX_SCORES = 1 << 24  # of a chunk, kept at a time: longer chunks are cut, which changes no bit


@dataclass(frozen=True)
class DecodeTiles:
    """Every (sequence, tile) pair of the N sequences with one query, those with the most tiles first.

    Pairs stand tile by tile: the first ``counts[0]`` = N are each sequence's first tile, then come the second tiles
    of the first ``counts[1]`` sequences, and so on; ``owners`` [P] is the sequence of each pair. A matrix of a product
    is a pair's key/value head with its R query heads, R the group filled up with its last one:
    ``queries`` [P × N_kv × R] are rows of the queries seen as [T × N_q, D], ``keys`` [P × N_kv, TILE] rows of the cache
    seen as [tokens × N_kv, D], ``mask`` [P × N_kv, 1, TILE] is added to scores. Of the result, one matrix for each
    sequence and key/value head, the rows ``real`` [N × N_q] belong to the query rows ``targets``.
    """

    counts: list[int]
    owners: Tensor
    queries: Tensor
    keys: Tensor
    mask: Tensor
    real: Tensor
    targets: Tensor


@dataclass(frozen=True)
class ChunkTile:
    """One tile of a chunk's context and the run of its query heads ``first`` … ``last`` (exclusive, counted within
    a key/value head: query × group + head) that see some of it.

    ``keys`` [N_kv, TILE] are cache rows; ``mask`` [1, last - first, TILE] is added to scores, None where all is seen.
    """

    first: int
    last: int
    keys: Tensor
    mask: Tensor | None


@dataclass(frozen=True)
class ChunkTiles:
    """Queries of a sequence that has several: rows ``start`` … ``stop`` of the batch."""

    start: int
    stop: int
    tiles: tuple[ChunkTile, ...]


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Sequences (their numbers in the step, in order) whose block tables begin with the same ``num_tokens`` tokens'
    blocks: a multiple of the block size, before each member's only query."""

    members: tuple[int, ...]
    num_tokens: int

    @property
    def num_spared(self) -> int:
        """Reads of a token's keys and values less than without the group."""
        return (len(self.members) - 1) * self.num_tokens


@dataclass(frozen=True)
class AttentionPlan:
    """Which tokens see what. Made by ``plan_attention`` or ``captured_plan``.

    block_tables [N, most blocks] of an int type (what lies past a sequence's blocks is not read), query_starts N + 1
    ints, context_lens N ints: tokens of each sequence in the cache, its queries among them. ``given``: the pieces for
    the GPU, where they stand in memory that the caller fills.

    ``is_fixed`` (without groups): on a GPU too a row's bits depend on what it sees only, not on the chunk it came in,
    its place there, or who shares the step (work.py says why). Prompts and decodes take one kernel then, which suits
    neither best.
    """

    block_tables: Tensor
    query_starts: list[int]
    context_lens: list[int]
    block_size: int
    num_heads: int
    num_kv_heads: int
    sliding_window: int | None
    groups: tuple[PrefixGroup, ...] = ()
    given: AttentionWork | None = None
    is_fixed: bool = False

    @property
    def num_tokens(self) -> int:
        return self.query_starts[-1]

    @cached_property
    def work(self) -> AttentionWork:
        """The step as pieces for the GPU."""
        return self.given or build_work(self)

    @cached_property
    def decode(self) -> DecodeTiles | None:
        sequences = [index for index in range(len(self.context_lens)) if self._num_queries(index) == 1]
        return self._decode_tiles(sequences) if sequences else None

    @cached_property
    def chunks(self) -> tuple[ChunkTiles, ...]:
        sequences = (index for index in range(len(self.context_lens)) if self._num_queries(index) > 1)
        return tuple(piece for index in sequences for piece in self._pieces(index))

    def _num_queries(self, sequence: int) -> int:
        return self.query_starts[sequence + 1] - self.query_starts[sequence]

    def _first_seen(self, position: int) -> int:
        return 0 if self.sliding_window is None else max(0, position + 1 - self.sliding_window)

    def _cache_rows(self, sequences: Tensor, positions: Tensor) -> Tensor:
        """sequences [P, 1], positions [P, TILE] → rows of the cache seen as [tokens × N_kv, D], [P × N_kv, TILE]."""
        blocks = self.block_tables[sequences, positions // self.block_size]
        tokens = blocks * self.block_size + positions % self.block_size
        heads = torch.arange(self.num_kv_heads, device=tokens.device)
        return (tokens[:, None, :] * self.num_kv_heads + heads[:, None]).flatten(0, 1)

    def _decode_tiles(self, sequences: list[int]) -> DecodeTiles:
        device = self.block_tables.device
        spans = {sequence: self._tiles(sequence) for sequence in sequences}
        ordered = sorted(sequences, key=lambda sequence: -len(spans[sequence]))
        counts = [sum(len(span) > index for span in spans.values()) for index in range(len(spans[ordered[0]]))]
        pairs = [(owner, spans[ordered[owner]][index]) for index, count in enumerate(counts) for owner in range(count)]
        owners, tiles = torch.tensor(pairs, device=device).T.contiguous()
        last = [self.context_lens[sequence] - 1 for sequence in ordered]
        low = torch.tensor([self._first_seen(position) for position in last], device=device)[owners, None]
        high = torch.tensor(last, device=device)[owners, None]
        positions = tiles[:, None] * TILE + torch.arange(TILE, device=device)
        hidden = (positions < low) | (positions > high)
        # a hidden key reads the query's own token instead: never memory that the query must not see
        numbers = torch.tensor(ordered, device=device)[owners, None]
        keys = self._cache_rows(numbers, torch.where(hidden, high, positions))
        mask = _mask(hidden).repeat_interleave(self.num_kv_heads, 0)[:, None]
        rows = torch.tensor([self.query_starts[sequence] for sequence in ordered], device=device)
        return DecodeTiles(counts, owners, self._query_heads(rows)[owners].flatten(), keys, mask, *self._result(rows))

    def _query_heads(self, rows: Tensor) -> Tensor:
        """Query rows [N] → rows of the queries seen as [T × N_q, D], [N, N_kv × R]."""
        group = self.num_heads // self.num_kv_heads
        filled = torch.arange(padded_rows(group, self.num_kv_heads), device=rows.device).clamp(max=group - 1)
        heads = torch.arange(self.num_kv_heads, device=rows.device)[:, None] * group + filled
        return rows[:, None] * self.num_heads + heads.flatten()

    def _result(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """``DecodeTiles.real`` and ``targets`` of query rows [N]."""
        group = self.num_heads // self.num_kv_heads
        heads = torch.arange(self.num_heads, device=rows.device)
        matrices = torch.arange(len(rows), device=rows.device)[:, None] * self.num_kv_heads + heads // group
        real = matrices * padded_rows(group, self.num_kv_heads) + heads % group
        return real.flatten(), (rows[:, None] * self.num_heads + heads).flatten()

    def _tiles(self, sequence: int) -> range:
        """The tiles that a sequence's only query sees some of."""
        position = self.context_lens[sequence] - 1
        return range(self._first_seen(position) // TILE, position // TILE + 1)

    def _pieces(self, sequence: int) -> list[ChunkTiles]:
        start, stop = self.query_starts[sequence], self.query_starts[sequence + 1]
        size = max(1, MAX_SCORES // (self.num_heads * self.context_lens[sequence]))
        return [self._chunk_tiles(sequence, first, min(first + size, stop)) for first in range(start, stop, size)]

    def _chunk_tiles(self, sequence: int, start: int, stop: int) -> ChunkTiles:
        shift = self.context_lens[sequence] - self.query_starts[sequence + 1]
        begin, end = start + shift, stop + shift  # positions of the queries
        tiles = range(self._first_seen(begin) // TILE, (end - 1) // TILE + 1)
        return ChunkTiles(start, stop, tuple(self._chunk_tile(sequence, tile, begin, end) for tile in tiles))

    def _chunk_tile(self, sequence: int, tile: int, begin: int, end: int) -> ChunkTile:
        device = self.block_tables.device
        positions = tile * TILE + torch.arange(TILE, device=device)
        first = max(begin, tile * TILE)
        last = end if self.sliding_window is None else min(end, (tile + 1) * TILE + self.sliding_window - 1)
        queries = torch.arange(first, last, device=device)[:, None]
        hidden = positions > queries
        if self.sliding_window is not None:
            hidden |= positions <= queries - self.sliding_window
        group = self.num_heads // self.num_kv_heads
        mask = _mask(hidden).repeat_interleave(group, 0)[None] if bool(hidden.any()) else None
        keys = self._cache_rows(
            torch.tensor([[sequence]], device=device), positions.clamp(self._first_seen(first), end - 1)[None]
        )
        return ChunkTile((first - begin) * group, (last - begin) * group, keys, mask)


def _mask(hidden: Tensor) -> Tensor:
    """-inf where hidden, 0 elsewhere."""
    return torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, float("-inf"))


def padded_rows(num_rows: int, num_matrices: int) -> int:
    """Rows for a product whose rows are exact: a multiple of 4, and 4 a thread where threads share a matrix."""
    at_least = 4 if num_matrices >= torch.get_num_threads() else 4 * torch.get_num_threads()
    return max(-(-num_rows // 4) * 4, at_least)


def plan_attention(
    block_tables: Tensor,
    query_starts: list[int],
    context_lens: list[int],
    *,
    block_size: int,
    num_heads: int,
    num_kv_heads: int,
    sliding_window: int | None = None,
    groups: tuple[PrefixGroup, ...] = (),
) -> AttentionPlan:
    """A step's plan. Sequence i has the query rows query_starts[i] … query_starts[i + 1], at its last positions.

    ``groups`` (no sequence in two of them; only where ``may_group``) let a GPU read the blocks that decodes share
    once; a CPU takes no notice. A member's row has other last bits then than alone.
    """
    assert len(query_starts) == len(context_lens) + 1 == len(block_tables) + 1
    assert num_heads % num_kv_heads == 0, (num_heads, num_kv_heads)
    assert not (groups and sliding_window), "a window cuts what is shared"
    assert not groups or num_heads // num_kv_heads <= GROUP_ROWS, (num_heads, num_kv_heads)
    for group in groups:
        assert group.num_tokens % block_size == 0, group
        assert all(group.num_tokens < context_lens[member] for member in group.members), group
        assert all(query_starts[member + 1] - query_starts[member] == 1 for member in group.members), group
    return AttentionPlan(
        block_tables, query_starts, context_lens, block_size, num_heads, num_kv_heads, sliding_window, groups
    )
