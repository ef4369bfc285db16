"""Plain torch. Scores are taken over tiles of TILE keys, aligned to positions, and merged in their order.

Exactness rests on three facts, each of them tested: a batched matrix product gives a row the same bits in any
batch with at least 4 rows (a multiple of 4, and 4 a thread where threads share one matrix); a tile that a query
does not see is left out, which is exactly a merge with nothing; and all of it is fp32.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.paged_attention.plan import AttentionPlan, ChunkTile, ChunkTiles, DecodeTiles

MAX_PAIRS = 256  # (sequence, tile) pairs of decodes that are gathered at a time: bounds the memory


class Partial(NamedTuple):
    """Softmax over some keys, not yet divided: largest score, sum of weights [..., 1] and weighted values [..., D]."""

    largest: Tensor
    weight: Tensor
    values: Tensor


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
    partials = [
        _decode_pairs(grouped, key_cache, value_cache, tiles, slice(first, first + MAX_PAIRS), scale)
        for first in range(0, len(tiles.owners), MAX_PAIRS)
    ]
    nothing = _nothing((1, *partials[0].largest.shape[1:-1]), head_dim, queries.device)
    pairs = Partial(*(torch.cat(parts) for parts in zip(*partials, nothing, strict=True)))
    merged = _nothing((num_sequences, *partials[0].largest.shape[1:-1]), head_dim, queries.device)
    for chosen in tiles.order:
        merged = _merge(merged, Partial(*(part[chosen] for part in pairs)))
    out = (merged.values / merged.weight)[:, :, :group]
    return out.reshape(queries.shape).to(queries.dtype)


def _decode_pairs(
    grouped: Tensor, key_cache: Tensor, value_cache: Tensor, tiles: DecodeTiles, chosen: slice, scale: float
) -> Partial:
    """Partials [pairs, N_kv, rows, …] of the chosen pairs."""
    owners, tokens, hidden = tiles.owners[chosen], tiles.tokens[chosen], tiles.hidden[chosen]
    num_kv_heads = key_cache.shape[2]
    keys, values = _gather(key_cache, tokens), _gather(value_cache, tokens)
    partial = _attend(grouped[owners].flatten(0, 1), keys, values, hidden.repeat_interleave(num_kv_heads, 0), scale)
    return Partial(*(part.unflatten(0, (-1, num_kv_heads)) for part in partial))


def _chunk(queries: Tensor, key_cache: Tensor, value_cache: Tensor, chunk: ChunkTiles, scale: float) -> Tensor:
    """queries [T, N_q, D] of one sequence → [T, N_q, D]."""
    num_queries, num_heads, head_dim = queries.shape
    num_kv_heads = key_cache.shape[2]
    group = num_heads // num_kv_heads
    rows = queries.view(num_queries, num_kv_heads, group, head_dim).transpose(0, 1).reshape(num_kv_heads, -1, head_dim)
    rows = rows.float()
    merged = _nothing(rows.shape[:2], head_dim, queries.device)
    for tile in chunk.tiles:
        seen = slice(tile.first * group, tile.last * group)
        keys, values = _gather(key_cache, tile.tokens[None]), _gather(value_cache, tile.tokens[None])
        partial = _attend_rows(rows[:, seen], keys, values, tile, scale)
        for whole, part in zip(merged, _merge(Partial(*(part[:, seen] for part in merged)), partial), strict=True):
            whole[:, seen] = part
    out = (merged.values / merged.weight).unflatten(1, (num_queries, group))
    return out.transpose(0, 1).reshape(queries.shape).to(queries.dtype)


def _attend_rows(rows: Tensor, keys: Tensor, values: Tensor, tile: ChunkTile, scale: float) -> Partial:
    """rows [N_kv, queries × group, D]: pads them for the product and repeats the mask for each head of a group."""
    num_kv_heads, num_rows, _ = rows.shape
    padding = _padded(num_rows, num_kv_heads) - num_rows
    hidden = tile.hidden
    if hidden is not None:
        hidden = hidden.repeat_interleave(num_rows // len(hidden), 0)
        hidden = F.pad(hidden, (0, 0, 0, padding))[None]  # padding sees all
    partial = _attend(F.pad(rows, (0, 0, 0, padding)), keys, values, hidden, scale)
    return Partial(*(part[:, :num_rows] for part in partial))


def _attend(rows: Tensor, keys: Tensor, values: Tensor, hidden: Tensor | None, scale: float) -> Partial:
    """rows [B, R, D], keys and values [B, TILE, D], hidden [B or 1, R or nothing, TILE] → Partial [B, R, …].

    Every row sees a key at least.
    """
    scores = torch.bmm(rows, keys.transpose(1, 2)).mul_(scale)
    if hidden is not None:
        scores.masked_fill_(hidden if hidden.dim() == 3 else hidden[:, None], float("-inf"))
    largest = scores.amax(dim=-1, keepdim=True)
    weights = scores.sub_(largest).exp_()
    total = weights.sum(dim=-1, keepdim=True)
    per_row = hidden is not None and hidden.dim() == 3
    return Partial(largest, total, _weigh_masked(weights, values, hidden) if per_row else torch.bmm(weights, values))


def _weigh_masked(weights: Tensor, values: Tensor, hidden: Tensor) -> Tensor:
    """weights · values, where a row's hidden values may be NaN or infinite: 0 · NaN would be NaN."""
    if bool(torch.isfinite(values).all()):
        return torch.bmm(weights, values)
    broken = ~torch.isfinite(values)
    seen = torch.bmm((~hidden).float().expand_as(weights), broken.float()) > 0
    return torch.bmm(weights, values.masked_fill(broken, 0.0)).masked_fill_(seen, float("nan"))


def _merge(left: Partial, right: Partial) -> Partial:
    """Both together. With nothing on either side the other comes back bit by bit."""
    largest = torch.maximum(left.largest, right.largest)
    keep_left, keep_right = (left.largest - largest).exp_(), (right.largest - largest).exp_()
    weight = left.weight * keep_left + right.weight * keep_right
    return Partial(largest, weight, left.values * keep_left + right.values * keep_right)


def _nothing(shape: tuple[int, ...], head_dim: int, device: torch.device) -> Partial:
    largest = torch.full((*shape, 1), float("-inf"), device=device)
    return Partial(largest, torch.zeros((*shape, 1), device=device), torch.zeros((*shape, head_dim), device=device))


def _gather(cache: Tensor, tokens: Tensor) -> Tensor:
    """cache [num_blocks, block_size, N_kv, D], tokens [P, TILE] → [P × N_kv, TILE, D] fp32."""
    num_kv_heads, head_dim = cache.shape[2:]
    heads = torch.arange(num_kv_heads, device=cache.device)
    index = tokens[:, None, :] * num_kv_heads + heads[:, None]
    found = cache.view(-1, head_dim).index_select(0, index.flatten())
    return found.view(-1, tokens.shape[1], head_dim).float()


def _padded(num_rows: int, num_matrices: int) -> int:
    """Rows for a product whose rows are exact: as many matrices as threads, or 4 rows a thread."""
    at_least = 4 if num_matrices >= torch.get_num_threads() else 4 * torch.get_num_threads()
    return max(-(-num_rows // 4) * 4, at_least)
