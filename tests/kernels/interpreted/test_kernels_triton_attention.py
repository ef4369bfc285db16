"""Paged attention under Triton's interpreter, against the whole score matrix in float64."""

import pytest
import torch

from kernels.paged_attention import PrefixGroup
from kernels.paged_attention import triton_kernel as attention_kernel
from kernels.testing import Heads, RaggedKv, ragged_kv
from tests.kernels.interpreted.checks import (
    attend,
    attend_captured,
    check_attention,
    planted,
    share_prefix,
    small_tiles,
)

FLOAT, BF16 = torch.float32, torch.bfloat16
BOTH = pytest.mark.parametrize("dtype", [FLOAT, BF16])


def last(*lengths: int, queries: int = 1) -> list[tuple[int, int, int]]:
    """The last queries of sequences of these lengths."""
    return [(index, length - queries, length) for index, length in enumerate(lengths)]


@BOTH
@pytest.mark.parametrize("block_size", [16, 64])
def test_decode_reads_its_own_blocks_to_their_last_token(block_size, dtype):
    lengths = [1, 15, 16, 17, 63, 65, 130]
    batch = ragged_kv(lengths, Heads(4, 2, 16, block_size), dtype)
    check_attention(attention_kernel, batch, last(*lengths))


@BOTH
@pytest.mark.parametrize(
    "heads",
    [
        Heads(3, 3, 64, 16),
        Heads(8, 1, 64, 16),
        Heads(9, 3, 64, 16),
        Heads(32, 1, 16, 16),
        Heads(4, 2, 80, 16),
        Heads(2, 1, 256, 16),
    ],
    ids=["multi-head", "multi-query", "groups of 3", "32 rows", "head size 80", "head size 256"],
)
def test_decode_of_every_kind_of_heads(heads, dtype):
    check_attention(attention_kernel, ragged_kv([20, 70], heads, dtype), last(20, 70))


@BOTH
@pytest.mark.parametrize("sliding_window", [None, 40])
def test_decode_merges_the_chunks_of_a_long_sequence(sliding_window, dtype, monkeypatch):
    small_tiles(monkeypatch)
    lengths = [31, 32, 33, 97, 130]
    batch = ragged_kv(lengths, Heads(4, 2, 32, 16, sliding_window), dtype)
    check_attention(attention_kernel, batch, last(*lengths))


def test_chunks_and_one_piece_agree(monkeypatch):
    batch = ragged_kv([200], Heads(4, 2, 32, 16))
    whole = attend(attention_kernel, batch, last(200))
    small_tiles(monkeypatch)
    torch.testing.assert_close(attend(attention_kernel, batch, last(200)), whole, rtol=1e-5, atol=1e-5)


@BOTH
@pytest.mark.parametrize("queries", [2, 3, 5, 8])
def test_a_few_queries_of_one_sequence_see_causally(queries, dtype, monkeypatch):
    small_tiles(monkeypatch)
    lengths = [9, 34, 66]
    check_attention(attention_kernel, ragged_kv(lengths, Heads(4, 2, 16, 16), dtype), last(*lengths, queries=queries))


def test_more_rows_than_a_program_has_are_cut(monkeypatch):
    small_tiles(monkeypatch)
    check_attention(attention_kernel, ragged_kv([40], Heads(16, 1, 16, 16)), last(40, queries=8))


@BOTH
@pytest.mark.parametrize("sliding_window", [None, 24])
@pytest.mark.parametrize(("first", "end"), [(0, 9), (0, 70), (33, 90), (64, 80)])
def test_a_prompt_chunk_sees_what_stands_before_it(first, end, sliding_window, dtype):
    batch = ragged_kv([end], Heads(6, 2, 16, 16, sliding_window), dtype)
    check_attention(attention_kernel, batch, [(0, first, end)])


def test_a_prompt_chunk_of_many_programs_and_chunks(monkeypatch):
    small_tiles(monkeypatch)
    check_attention(attention_kernel, ragged_kv([72], Heads(4, 2, 16, 16)), [(0, 48, 72)])


def test_prompts_decodes_and_checks_share_a_step():
    batch = ragged_kv([40, 17, 90, 25], Heads(4, 2, 16, 16), BF16)
    check_attention(attention_kernel, batch, [(0, 10, 40), (1, 16, 17), (2, 89, 90), (3, 21, 25)])


def test_permuted_sequences_give_permuted_bits():
    batch = ragged_kv([40, 130, 17], Heads(4, 2, 16, 16), BF16)
    one = attend(attention_kernel, batch, [(0, 39, 40), (1, 129, 130), (2, 16, 17)])
    other = attend(attention_kernel, batch, [(2, 16, 17), (0, 39, 40), (1, 129, 130)])
    assert torch.equal(other, one[[2, 0, 1]])


def test_where_blocks_lie_changes_no_bit():
    batches = [ragged_kv([40, 70], Heads(4, 2, 16, 16), BF16) for _ in range(2)]
    batches[1] = _moved(batches[1])
    one, other = (attend(attention_kernel, batch, last(40, 70)) for batch in batches)
    assert torch.equal(one, other)


@pytest.mark.parametrize("heads", [Heads(2, 1, 16, 16), Heads(3, 1, 16, 16, 20)], ids=str)
def test_by_a_fixed_plan_a_row_has_its_bits_however_its_prompt_is_cut_and_whoever_is_beside_it(heads, monkeypatch):
    """In bf16, whose products are exact: numpy's own of fp32 are fused with sums in some rows of a tile only."""
    small_tiles(monkeypatch)
    batch = ragged_kv([50, 40, 17], heads, BF16)
    whole = attend(attention_kernel, batch, [(0, 0, 50)], is_fixed=True)

    for chunk in [(0, 0, 7), (0, 7, 40), (0, 31, 32), (0, 49, 50)]:
        alone = attend(attention_kernel, batch, [chunk], is_fixed=True)
        among = attend(attention_kernel, batch, [(1, 39, 40), chunk, (2, 13, 17)], is_fixed=True)
        assert torch.equal(alone, whole[chunk[1] : chunk[2]]), chunk
        assert torch.equal(among[1 : 1 + len(alone)], alone), chunk


@BOTH
@pytest.mark.parametrize("head_dim", [80, 96])
def test_head_sizes_that_are_no_power_of_two_are_filled_up_in_every_form(head_dim, dtype, monkeypatch):
    small_tiles(monkeypatch)
    batch = ragged_kv([40, 17, 50, 25], Heads(2, 1, head_dim, 16), dtype)
    spans = [(0, 10, 40), (1, 16, 17), (2, 49, 50), (3, 21, 25)]
    check_attention(attention_kernel, batch, spans)
    check_attention(attention_kernel, batch, spans, is_fixed=True)
    check_attention(attention_kernel, batch, last(40, 17, 50), room=1)


@BOTH
@pytest.mark.parametrize("sliding_window", [None, 40])
def test_a_fixed_plan_sees_what_any_other_sees(sliding_window, dtype, monkeypatch):
    small_tiles(monkeypatch)
    batch = ragged_kv([40, 17, 90, 25], Heads(4, 2, 16, 16, sliding_window), dtype)
    check_attention(attention_kernel, batch, [(0, 10, 40), (1, 16, 17), (2, 89, 90), (3, 21, 25)], is_fixed=True)


def _moved(batch: RaggedKv) -> RaggedKv:
    count = len(batch.key_cache)
    for sequence in batch.sequences:
        sequence.blocks[:] = [count - 1 - block for block in sequence.blocks]
    return RaggedKv(batch.heads, batch.sequences, batch.key_cache.flip(0), batch.value_cache.flip(0))


@BOTH
@pytest.mark.parametrize("sliding_window", [None, 40])
@pytest.mark.parametrize("room", [0, 3])
def test_a_captured_plan_serves_steps_of_any_lengths(room, sliding_window, dtype, monkeypatch):
    small_tiles(monkeypatch)
    lengths = [31, 32, 97, 130]
    batch = ragged_kv(lengths, Heads(4, 2, 32, 16, sliding_window), dtype)
    check_attention(attention_kernel, batch, last(*lengths), room=room)


def test_a_captured_plan_gives_the_bits_of_its_step(monkeypatch):
    small_tiles(monkeypatch)
    batch = ragged_kv([31, 130, 17], Heads(4, 2, 16, 16), BF16)
    spans = last(31, 130, 17)
    assert torch.equal(attend_captured(attention_kernel, batch, spans, 0), attend(attention_kernel, batch, spans))


def test_a_captured_plan_checks_drafted_tokens(monkeypatch):
    small_tiles(monkeypatch)
    lengths = [9, 34, 66]
    check_attention(attention_kernel, ragged_kv(lengths, Heads(4, 2, 16, 16)), last(*lengths, queries=4), room=1)


GROUPS = (PrefixGroup((0, 2, 3, 5), 40), PrefixGroup((1, 4), 72))


def batch_with_groups(dtype: torch.dtype, heads: Heads) -> tuple[RaggedKv, list[tuple[int, int, int]]]:
    lengths = [49, 81, 90, 64, 110, 75, 30]
    batch = ragged_kv(lengths, heads, dtype)
    for group in GROUPS:
        share_prefix(batch, group.members, group.num_tokens)
    return batch, last(*lengths)


@BOTH
@pytest.mark.parametrize("room", [None, 2], ids=["eager", "captured"])
@pytest.mark.parametrize("heads", [Heads(4, 2, 16, 8), Heads(22, 1, 16, 8)], ids=["groups of 2", "multi-query"])
def test_members_of_a_group_see_the_shared_beginning_and_their_own_rest(heads, room, dtype, monkeypatch):
    small_tiles(monkeypatch)
    batch, spans = batch_with_groups(dtype, heads)
    check_attention(attention_kernel, batch, spans, GROUPS, room=room)


def test_a_group_reads_only_its_first_members_blocks_for_what_it_shares(monkeypatch):
    """The table of another member may name other blocks there: nothing looks."""
    small_tiles(monkeypatch)
    batch, spans = batch_with_groups(FLOAT, Heads(4, 2, 16, 8))
    shared = attend(attention_kernel, batch, spans, GROUPS)
    batch.sequences[2].blocks[:5] = [len(batch.key_cache) - 1] * 5
    assert torch.equal(attend(attention_kernel, batch, spans, GROUPS), shared)


def test_decodes_with_groups_share_a_step_with_prompts(monkeypatch):
    small_tiles(monkeypatch)
    batch, spans = batch_with_groups(BF16, Heads(4, 2, 16, 8))
    spans[6] = (6, 2, 30)
    check_attention(attention_kernel, batch, spans, GROUPS)


GROUP_FAULTS = {
    "the rows of the group before": ("p_members + i_sequence + o_rows // GROUP", "p_members + o_rows // GROUP"),
    "a missing mask of the last shared key": (
        "m_seen = m_keys[None, :] & (o_keys[None, :] <= positions[:, None])",
        "m_seen = (o_keys[None, :] <= positions[:, None])",
    ),
    "the group's part left out": ("group_count + tl.load(p_merge + 4)", "tl.load(p_merge + 4)"),
    "the chunks of a neighbour": ("group_first + o_chunks * group_stride", "group_first + o_chunks * num_rows"),
    "an item that no program takes": ("tl.load(p_count).to(tl.int64)", "tl.load(p_count).to(tl.int64) - 1"),
}


@pytest.mark.parametrize("fault", GROUP_FAULTS.values(), ids=GROUP_FAULTS)
def test_a_fault_of_groups_or_of_captured_plans_is_caught(fault, tmp_path, monkeypatch):
    """The same step as of the test above, where the kernel itself passes."""
    small_tiles(monkeypatch)
    batch, spans = batch_with_groups(FLOAT, Heads(4, 2, 16, 8))
    faulty = planted(attention_kernel, fault, tmp_path)
    with pytest.raises(AssertionError):
        check_attention(faulty, batch, spans, GROUPS, room=2)


FAULTS = {
    "a missing causal mask": ("& (o_keys[None, :] <= positions[:, None])", ""),
    "a missing mask of the last key": ("(o_keys >= first_key) & (o_keys < last_key)", "(o_keys >= first_key)"),
    "a window that is one short": ("positions[:, None] - WINDOW", "positions[:, None] - WINDOW + 1"),
    "an unmasked load of the values": (
        "p_values + o_cache[:, None] + o_dim[None, :], mask=m_cache, other=0.0",
        "p_values + o_cache[:, None] + o_dim[None, :], mask=m_cache",
    ),
    "swapped strides of the cache": (
        "i_blocks * stride_block + (o_keys % BLOCK_SIZE) * (KV_HEADS * HEAD_DIM)",
        "i_blocks * (KV_HEADS * HEAD_DIM) + (o_keys % BLOCK_SIZE) * stride_block",
    ),
    "the blocks of the sequence before": (
        "p_table + i_sequence * stride_table",
        "p_table + tl.maximum(i_sequence - 1, 0) * stride_table",
    ),
    "a head of the neighbour": ("+ i_head * HEAD_DIM\n", "+ (KV_HEADS - 1 - i_head) * HEAD_DIM\n"),
    "a chunk left out of the merge": ("m_chunks = o_chunks < num_partials", "m_chunks = o_chunks < num_partials - 1"),
    "the largest score of the first chunk": (
        "b_keep = tl.exp2(b_largest - b_shift)\n        b_weights",
        "b_keep = b_total * 0 + 1\n        b_weights",
    ),
}


def check_many_kinds(kernel) -> None:
    """A decode, a few queries, and a decode whose window begins in its first chunk, merged in three steps."""
    batch = ragged_kv([17, 40, 130], Heads(4, 2, 16, 16, sliding_window=120))
    check_attention(kernel, batch, [(0, 16, 17), (1, 36, 40), (2, 129, 130)])


def test_the_kernel_into_which_faults_are_planted_passes(monkeypatch):
    small_tiles(monkeypatch)
    check_many_kinds(attention_kernel)


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_caught(fault, tmp_path, monkeypatch):
    small_tiles(monkeypatch)
    faulty = planted(attention_kernel, fault, tmp_path)
    with pytest.raises(AssertionError):
        check_many_kinds(faulty)
