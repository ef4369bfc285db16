"""Plain torch. Scores are taken over tiles of TILE keys, aligned to positions, and merged in their order.

Exactness rests on three facts, each of them tested: a batched matrix product gives a row the same bits in any
batch with at least 4 rows (a multiple of 4, and 4 a thread where threads share one matrix); a tile that a query
does not see is left out, which is exactly a merge with nothing; and all of it is fp32.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.paged_attention.plan import AttentionPlan, ChunkTiles, DecodeTiles

MAX_PAIRS = 256  # (sequence, tile) pairs of decodes that are gathered at a time: bounds the memory


class _Partial(NamedTuple):
    """Softmax over some keys, not yet divided: largest score, sum of weights [..., 1] and weighted values [..., D]."""

    largest: Tensor
    weight: Tensor
    values: Tensor

    def rows(self, start: int, stop: int) -> "_Partial":
        """A view of some rows of the first dimension."""
        return _Partial(self.largest[start:stop], self.weight[start:stop], self.values[start:stop])

    def absorb(self, other: "_Partial") -> None:
        """Merges ``other`` into this, in place. With nothing on either side the other stays bit by bit."""
        largest = torch.maximum(self.largest, other.largest)
        keep, keep_other = self.largest.sub(largest).exp_(), other.largest.sub(largest).exp_()
        self.weight.mul_(keep).add_(other.weight * keep_other)
        self.values.mul_(keep).add_(other.values * keep_other)
        self.largest.copy_(largest)


def paged_attention(
    queries: Tensor, key_cache: Tensor, value_cache: Tensor, plan: AttentionPlan, scale: float
) -> Tensor:
    out = torch.empty_like(queries)
    if plan.decode is not None:
        out[plan.decode.rows] = _decode(queries[plan.decode.rows], key_cache, value_cache, plan.decode, scale)
    for chunk in plan.chunks:
        rows = slice(chunk.start, chunk.stop)
        out[rows] = _chunk(queries[rows], key_cache, value_cache, chunk, scale)
    return out


def _decode(queries: Tensor, key_cache: Tensor, value_cache: Tensor, tiles: DecodeTiles, scale: float) -> Tensor:
    """queries [N, N_q, D], one a sequence → [N, N_q, D]."""
    num_sequences, num_heads, head_dim = queries.shape
    num_kv_heads = key_cache.shape[2]
    group = num_heads // num_kv_heads
    grouped = queries.view(num_sequences, num_kv_heads, group, head_dim).float()
    grouped = F.pad(grouped, (0, 0, 0, _padded(group, num_kv_heads) - group))
    pairs = _decode_pairs(grouped, key_cache, value_cache, tiles, scale)
    merged, stop = pairs.rows(0, num_sequences), num_sequences
    for count in tiles.counts[1:]:
        start, stop = stop, stop + count
        merged.rows(0, count).absorb(pairs.rows(start, stop))
    out = (merged.values / merged.weight)[:, :, :group]
    return out.reshape(queries.shape).to(queries.dtype)


def _decode_pairs(
    grouped: Tensor, key_cache: Tensor, value_cache: Tensor, tiles: DecodeTiles, scale: float
) -> _Partial:
    """Partials [pairs, N_kv, rows, …]; at most MAX_PAIRS are gathered at a time."""
    num_kv_heads = key_cache.shape[2]
    partials = []
    for start in range(0, len(tiles.owners), MAX_PAIRS):
        stop = start + MAX_PAIRS
        heads = tiles.heads[start:stop]
        keys, values = _gather(key_cache, heads), _gather(value_cache, heads)
        rows = grouped.index_select(0, tiles.owners[start:stop]).flatten(0, 1)
        hidden = tiles.hidden[start * num_kv_heads : stop * num_kv_heads]
        partials.append(_attend(rows, keys, values, hidden, scale))
    whole = partials[0] if len(partials) == 1 else _Partial(*map(torch.cat, zip(*partials, strict=True)))
    return _Partial(*(part.unflatten(0, (-1, num_kv_heads)) for part in whole))


def _chunk(queries: Tensor, key_cache: Tensor, value_cache: Tensor, chunk: ChunkTiles, scale: float) -> Tensor:
    """queries [T, N_q, D] of one sequence → [T, N_q, D]."""
    num_queries, num_heads, head_dim = queries.shape
    num_kv_heads = key_cache.shape[2]
    group = num_heads // num_kv_heads
    rows = queries.view(num_queries, num_kv_heads, group, head_dim).transpose(0, 1).reshape(num_kv_heads, -1, head_dim)
    rows = rows.float()
    merged = _nothing((num_kv_heads, rows.shape[1]), head_dim, queries.device)
    for tile in chunk.tiles:
        keys, values = _gather(key_cache, tile.heads), _gather(value_cache, tile.heads)
        partial = _attend_padded(rows[:, tile.first : tile.last], keys, values, tile.hidden, scale)
        _Partial(*(part[:, tile.first : tile.last] for part in merged)).absorb(partial)
    out = (merged.values / merged.weight).unflatten(1, (num_queries, group))
    return out.transpose(0, 1).reshape(queries.shape).to(queries.dtype)


def _attend_padded(rows: Tensor, keys: Tensor, values: Tensor, hidden: Tensor | None, scale: float) -> _Partial:
    """``_attend`` for any number of rows [N_kv, R, D]; those that fill it up see everything."""
    num_kv_heads, num_rows, _ = rows.shape
    padding = _padded(num_rows, num_kv_heads) - num_rows
    if not padding:
        return _attend(rows, keys, values, hidden, scale)
    if hidden is not None:
        hidden = F.pad(hidden, (0, 0, 0, padding))
    partial = _attend(F.pad(rows, (0, 0, 0, padding)), keys, values, hidden, scale)
    return _Partial(*(part[:, :num_rows] for part in partial))


def _attend(rows: Tensor, keys: Tensor, values: Tensor, hidden: Tensor | None, scale: float) -> _Partial:
    """rows [B, R, D], keys and values [B, TILE, D], hidden [B or 1, R or 1, TILE] → _Partial [B, R, …].

    Every row sees a key at least.
    """
    scores = torch.bmm(rows, keys.transpose(1, 2)).mul_(scale)
    if hidden is not None:
        scores.masked_fill_(hidden, float("-inf"))
    largest = scores.amax(dim=-1, keepdim=True)
    weights = scores.sub_(largest).exp_()
    total = weights.sum(dim=-1, keepdim=True)
    if hidden is None or hidden.shape[1] == 1:  # one mask for all rows: what it hides was not gathered
        return _Partial(largest, total, torch.bmm(weights, values))
    return _Partial(largest, total, _weigh_masked(weights, values, hidden))


def _weigh_masked(weights: Tensor, values: Tensor, hidden: Tensor) -> Tensor:
    """weights · values, where a row's hidden values may be NaN or infinite: 0 · NaN would be NaN."""
    if bool(torch.isfinite(values).all()):
        return torch.bmm(weights, values)
    broken = ~torch.isfinite(values)
    seen = torch.bmm((~hidden).float().expand_as(weights), broken.float()) > 0
    return torch.bmm(weights, values.masked_fill(broken, 0.0)).masked_fill_(seen, float("nan"))


def _nothing(shape: tuple[int, int], head_dim: int, device: torch.device) -> _Partial:
    largest = torch.full((*shape, 1), float("-inf"), device=device)
    return _Partial(largest, torch.zeros((*shape, 1), device=device), torch.zeros((*shape, head_dim), device=device))


def _gather(cache: Tensor, heads: Tensor) -> Tensor:
    """cache [num_blocks, block_size, N_kv, D], heads [P, N_kv, TILE] of its rows → [P × N_kv, TILE, D] fp32."""
    head_dim = cache.shape[3]
    return cache.view(-1, head_dim).index_select(0, heads.flatten()).view(-1, heads.shape[2], head_dim).float()


def _padded(num_rows: int, num_matrices: int) -> int:
    """Rows for a product whose rows are exact: as many matrices as threads, or 4 rows a thread."""
    at_least = 4 if num_matrices >= torch.get_num_threads() else 4 * torch.get_num_threads()
    return max(-(-num_rows // 4) * 4, at_least)
