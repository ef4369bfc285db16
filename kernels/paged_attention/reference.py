"""Plain torch. Scores are taken over tiles of TILE keys, aligned to positions; with the largest score of all tiles
known, the tiles' weights and weighted values are added up in order.

Exactness rests on three facts, each of them tested: a batched matrix product gives a row the same bits in any
batch with at least 4 rows (a multiple of 4, and 4 a thread where threads share one matrix); a tile that a query
does not see is left out, which is exactly adding nothing; and all of it is fp32.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.paged_attention.plan import AttentionPlan, ChunkTile, ChunkTiles, DecodeTiles, padded_rows

MAX_PAIRS = 256  # (sequence, tile) pairs of decodes that are gathered at a time: bounds the memory
_MAX_ELEMENTS = 32768  # at::internal::GRAIN_SIZE: no second thread takes a part, whose cut would change bits


def paged_attention(
    queries: Tensor, key_cache: Tensor, value_cache: Tensor, plan: AttentionPlan, scale: float
) -> Tensor:
    out = torch.empty_like(queries)
    scaled = queries.float() * (scale * math.log2(math.e))  # weights are powers of two: exp costs 3 to 8 times exp2
    if plan.decode is not None:
        seen = _decode(scaled, key_cache, value_cache, plan.decode).to(queries.dtype)
        out.flatten(0, 1).index_copy_(0, plan.decode.targets, seen)
    for chunk in plan.chunks:
        rows = slice(chunk.start, chunk.stop)
        out[rows] = _chunk(scaled[rows], key_cache, value_cache, chunk).to(queries.dtype)
    return out


def _decode(scaled: Tensor, key_cache: Tensor, value_cache: Tensor, tiles: DecodeTiles) -> Tensor:
    """scaled queries [T, N_q, D] → [N × N_q, D] of the rows with one query, as ``tiles.targets`` says."""
    num_matrices, head_dim = len(tiles.keys), scaled.shape[2]
    rows = scaled.flatten(0, 1).index_select(0, tiles.queries).view(num_matrices, -1, head_dim)
    scores = _by_pairs(rows, key_cache, tiles, transpose=True).add_(tiles.mask)
    weights = _powers(scores.sub_(_largest(scores, tiles)))
    total = _add_tiles(weights.sum(dim=-1, keepdim=True), tiles)
    values = _add_tiles(_by_pairs(weights, value_cache, tiles, transpose=False), tiles)
    return values.div_(total).flatten(0, 1).index_select(0, tiles.real)


def _by_pairs(rows: Tensor, cache: Tensor, tiles: DecodeTiles, *, transpose: bool) -> Tensor:
    """rows [P × N_kv, R, …] · each one's part of the cache; at most MAX_PAIRS pairs are gathered at a time."""
    most = MAX_PAIRS * cache.shape[2]
    products = [
        torch.bmm(some, _gather(cache, keys, transpose))
        for some, keys in zip(rows.split(most), tiles.keys.split(most), strict=True)
    ]
    return products[0] if len(products) == 1 else torch.cat(products)


def _largest(scores: Tensor, tiles: DecodeTiles) -> Tensor:
    """scores [P × N_kv, R, TILE] → the largest of all tiles of a sequence, for each of its pairs, [P × N_kv, R, 1]."""
    largest = scores.amax(dim=-1, keepdim=True)
    if len(tiles.counts) == 1:
        return largest
    of_pairs = largest.view(len(tiles.owners), -1)
    stop = tiles.counts[0]
    of_sequences = of_pairs[:stop]
    for count in tiles.counts[1:]:
        start, stop = stop, stop + count
        torch.maximum(of_sequences[:count], of_pairs[start:stop], out=of_sequences[:count])
    return of_sequences.index_select(0, tiles.owners).view_as(largest)


def _add_tiles(parts: Tensor, tiles: DecodeTiles) -> Tensor:
    """parts [P × N_kv, R, …] → the sum over each sequence's tiles, in order, [N × N_kv, R, …]; in place."""
    per_pair = len(parts) // len(tiles.owners)
    stop = tiles.counts[0] * per_pair
    whole = parts[:stop]
    for count in tiles.counts[1:]:
        start, stop = stop, stop + count * per_pair
        whole[: stop - start].add_(parts[start:stop])
    return whole


def _chunk(scaled: Tensor, key_cache: Tensor, value_cache: Tensor, chunk: ChunkTiles) -> Tensor:
    """scaled queries [T, N_q, D] of one sequence → [T, N_q, D]."""
    num_queries, _, head_dim = scaled.shape
    num_kv_heads = key_cache.shape[2]
    grouped = scaled.view(num_queries, num_kv_heads, -1, head_dim).transpose(0, 1)
    rows = grouped.reshape(num_kv_heads, -1, head_dim)
    scores = [_chunk_scores(rows[:, tile.first : tile.last], key_cache, tile) for tile in chunk.tiles]
    largest = rows.new_full((*rows.shape[:2], 1), float("-inf"))
    for tile, some in zip(chunk.tiles, scores, strict=True):
        part = largest[:, tile.first : tile.last]
        torch.maximum(part, some.amax(dim=-1, keepdim=True)[:, : part.shape[1]], out=part)
    total, values = torch.zeros_like(largest), torch.zeros_like(rows)
    for tile, some in zip(chunk.tiles, scores, strict=True):
        part, num_rows = slice(tile.first, tile.last), tile.last - tile.first
        some[:, :num_rows].sub_(largest[:, part])
        weights = _powers(some)
        total[:, part].add_(weights[:, :num_rows].sum(dim=-1, keepdim=True))
        weighted = _weigh(weights, _gather(value_cache, tile.keys, transpose=False), tile.mask)
        values[:, part].add_(weighted[:, :num_rows])
    return values.div_(total).view_as(grouped).transpose(0, 1).reshape(scaled.shape)


def _chunk_scores(rows: Tensor, key_cache: Tensor, tile: ChunkTile) -> Tensor:
    """rows [N_kv, R, D] → [N_kv, R filled up, TILE]; what fills it up means nothing."""
    num_kv_heads, num_rows, _ = rows.shape
    padding = padded_rows(num_rows, num_kv_heads) - num_rows
    if padding:
        rows = F.pad(rows, (0, 0, 0, padding))
    keys = _gather(key_cache, tile.keys, transpose=True)
    scores = torch.bmm(rows, keys)
    if tile.mask is not None and _is_finite(keys):
        scores[:, :num_rows].add_(tile.mask)
    elif tile.mask is not None:  # NaN - inf would be NaN
        scores[:, :num_rows].masked_fill_(tile.mask.isinf(), float("-inf"))
    return scores


def _weigh(weights: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """weights · values, where a row's hidden values may be NaN or infinite: 0 · NaN would be NaN."""
    if mask is None or _is_finite(values):
        return torch.bmm(weights, values)
    broken = ~torch.isfinite(values)
    is_seen = F.pad(~mask.isinf(), (0, 0, 0, weights.shape[1] - mask.shape[1]), value=True)
    seen = torch.bmm(is_seen.float().expand_as(weights), broken.float()) > 0
    return torch.bmm(weights, values.masked_fill(broken, 0.0)).masked_fill_(seen, float("nan"))


def _powers(exponents: Tensor) -> Tensor:
    """2 to the power of each, in place."""
    for piece in exponents.view(-1).split(_MAX_ELEMENTS):
        piece.exp2_()
    return exponents


def _is_finite(numbers: Tensor) -> bool:
    """False also where the sum of finite ones is not: who asks is right either way."""
    return math.isfinite(numbers.sum().item())


def _gather(cache: Tensor, rows: Tensor, transpose: bool) -> Tensor:
    """cache [num_blocks, block_size, N_kv, D], rows [B, TILE] of its heads → [B, TILE, D] fp32, or [B, D, TILE]."""
    head_dim = cache.shape[3]
    found = cache.view(-1, head_dim).index_select(0, rows.flatten()).view(*rows.shape, head_dim).float()
    return found.transpose(1, 2) if transpose else found
