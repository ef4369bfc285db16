"""kernels/paged_attention: the right sums, exact rows, and nothing read that a query must not see."""

import random

import pytest
import torch

from kernels.paged_attention import paged_attention
from kernels.paged_attention.plan import TILE
from kernels.testing import NAN, Heads, RaggedKv, assert_matches_reference, dense_attention, ragged_kv

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = {
    "gqa": Heads(),
    "mha": Heads(num_heads=4, num_kv_heads=4),
    "mqa": Heads(num_heads=4, num_kv_heads=1),
    "group-of-3": Heads(num_heads=9, num_kv_heads=3, head_dim=64, block_size=16),
    "window": Heads(sliding_window=50),
    "window-over-tiles": Heads(num_heads=8, num_kv_heads=1, sliding_window=TILE + 9),
}
LENGTHS = [1, 2, TILE - 1, TILE, TILE + 1, 2 * TILE + 37, 17]


@pytest.fixture(autouse=True, params=[1, 2], ids=["1-thread", "2-threads"])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def attend(kv: RaggedKv, spans: list[tuple[int, int, int]]) -> list[torch.Tensor]:
    """The rows of each span (sequence, first position, end), all computed in one call."""
    queries, plan = kv.step(spans)
    out = paged_attention(queries, kv.key_cache, kv.value_cache, plan, scale=kv.heads.head_dim**-0.5)
    return list(out.split([end - first for _, first, end in spans]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", SHAPES.values(), ids=SHAPES)
def test_a_ragged_batch_matches_dense_attention(heads: Heads, dtype):
    kv = ragged_kv(LENGTHS, heads, dtype)
    spans = [(index, max(0, length - 1 - 20 * (index % 3)), length) for index, length in enumerate(LENGTHS)]

    out = attend(kv, spans)

    for (index, first, end), rows in zip(spans, out, strict=True):
        expected = dense_attention(kv.sequences[index], heads.head_dim**-0.5, heads.sliding_window)
        assert_matches_reference(rows, expected[first:end])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", SHAPES.values(), ids=SHAPES)
def test_chunks_of_any_size_and_decodes_equal_the_prefill_in_one_shot(heads: Heads, dtype):
    length = 2 * TILE + 37
    kv = ragged_kv([length], heads, dtype)
    (whole,) = attend(kv, [(0, 0, length)])

    for size in (1, 2, 3, 4, 16, 31, 64, 256):
        cuts = [(first, min(first + size, length)) for first in range(0, length, size)]
        for first, end in cuts[:: max(1, len(cuts) // 20)] + cuts[-1:]:
            assert torch.equal(attend(kv, [(0, first, end)])[0], whole[first:end]), (size, first)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", SHAPES.values(), ids=SHAPES)
def test_rows_equal_their_solo_run_in_any_company(heads: Heads, dtype):
    kv = ragged_kv(LENGTHS, heads, dtype)
    everything = [(i, 0, length) for i, length in enumerate(LENGTHS)] + [(i, n - 1, n) for i, n in enumerate(LENGTHS)]
    solo = {span: attend(kv, [span])[0] for span in everything}
    rng = random.Random(1)

    for _ in range(10):
        spans = rng.sample(everything, rng.choice([2, 5, 8, 14]))
        for span, rows in zip(spans, attend(kv, spans), strict=True):
            assert torch.equal(rows, solo[span]), (span, spans)


@pytest.mark.parametrize("heads", SHAPES.values(), ids=SHAPES)
def test_what_stands_in_memory_that_is_not_seen_changes_nothing(heads: Heads):
    """The cache is NaN outside the sequences; fill that with numbers, and the bits stay."""
    kv = ragged_kv(LENGTHS, heads)
    spans = [(0, 0, 1), (2, 3, TILE - 1), (4, TILE, TILE + 1), (6, 2, 17)]
    poisoned = attend(kv, spans)

    for cache in (kv.key_cache, kv.value_cache):
        cache.nan_to_num_(nan=7.0)
    other = attend(kv, spans)

    assert all(torch.equal(a, b) for a, b in zip(poisoned, other, strict=True))
    assert not any(rows.isnan().any() for rows in poisoned)


@pytest.mark.parametrize("heads", SHAPES.values(), ids=SHAPES)
def test_a_later_position_that_is_nan_does_not_reach_earlier_ones(heads: Heads):
    length, broken = TILE + 40, TILE + 11
    kv = ragged_kv([length], heads)
    (before,) = attend(kv, [(0, 0, length)])
    block, offset = kv.sequences[0].blocks[broken // heads.block_size], broken % heads.block_size
    kv.key_cache[block, offset], kv.value_cache[block, offset] = NAN, NAN

    (after,) = attend(kv, [(0, 0, length)])

    assert torch.equal(after[:broken], before[:broken])
    assert after[broken].isnan().all()


def test_keys_before_the_window_may_be_anything():
    heads = SHAPES["window"]
    kv = ragged_kv([200], heads)
    spans = [(0, 150, 200), (0, 199, 200)]
    before = attend(kv, spans)
    for block in kv.sequences[0].blocks[: (150 - 50) // heads.block_size]:  # given back to the pool
        kv.key_cache[block], kv.value_cache[block] = NAN, NAN

    after = attend(kv, spans)

    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_many_decodes_are_exact_over_several_gathers():
    """More (sequence, tile) pairs than are gathered at a time."""
    lengths = [3 * TILE + 5] * 3 + [9] * 260
    kv = ragged_kv(lengths, Heads())
    spans = [(index, length - 1, length) for index, length in enumerate(lengths)]

    together = attend(kv, spans)

    for span in (spans[0], spans[2], spans[150], spans[-1]):
        assert torch.equal(together[span[0]], attend(kv, [span])[0])
