"""What adapters add on its way into rope and the cache, under Triton's interpreter."""

import itertools

import pytest
import torch

from kernels import tiles
from kernels.qk_rope_kv import HeadNorms, qk_rope_kv
from kernels.qk_rope_kv import reference as qk_rope_kv_reference
from kernels.qk_rope_kv import triton_kernel as qk_rope_kv_kernel
from kernels.qk_rope_kv import triton_low as qk_rope_kv_low
from kernels.rope import rope_table
from kernels.sgmv import plan_sgmv
from kernels.sgmv import triton_kernel as sgmv_kernel
from kernels.testing import NAN, Heads, assert_matches_reference, lora_delta
from tests.kernels.interpreted.checks import captured_sgmv, draw, lora_slices, planted, sliced

FLOAT, BF16 = torch.float32, torch.bfloat16
BOTH = pytest.mark.parametrize("dtype", [FLOAT, BF16])
MIXED = (8, 16, 5, 40, 0, 1)  # ranks of six slots
OTHER = (16, 0, 3, 16, 24, 8)
SLOTS = [0, 3, -1, 1, 1, 4, -1, 2]
FEW = [0, -1, 1, 5, 0]  # with at most 16 ranks of any of queries, keys and values
SIZE_IN = 97
ORDER = [5, 2, 7, 0, 1, 6, 4, 3]


@pytest.fixture(autouse=True)
def rows(monkeypatch):
    """Each row by itself, its low ranks added up from parts; what adapters add goes in on its way."""
    table = {
        **tiles._table("default"),
        "sgmv_form": [{"rows_of_slot": 1000}],
        "sgmv_vector": [{"block_k": 64, "shrink_warps": 2, "block_n": 64, "expand_warps": 2, "pdl": 0}],
        "qk_rope_kv": [{"heads": 8, "num_warps": 2}],
        "rope_low": [{"fused": 1}],
    }
    monkeypatch.setattr(tiles, "_table", lambda _: table)
    return table


def shrunk(x, slices, slots, room=None):
    """With ``room`` through a captured plan."""
    given, plan = (slices, plan_sgmv(slots, x.device)) if room is None else captured_sgmv(slots, slices, room)
    return sgmv_kernel.shrink(x, given, plan)


def with_deltas(y, x, slices, slots):
    """y in fp64 and what each row's adapter adds to it."""
    expected = y.double()
    for part, (row, slot) in itertools.product(slices, enumerate(slots)):
        if slot >= 0 and part.lora_ranks[slot]:
            delta = lora_delta(x[row], part.a[slot], part.b[slot], part.lora_ranks[slot])
            expected[row, part.start : part.start + part.b.shape[2]] += delta
    return expected


def same_bits(one, other) -> bool:
    """Unlike torch.equal, which takes a zero for its negative."""
    kind = {2: torch.int16, 4: torch.int32}[one.element_size()]
    return torch.equal(one.contiguous().view(kind), other.contiguous().view(kind))


def idle_rows(slots, slices, num_rows) -> list[int]:
    return [
        row
        for row in range(num_rows)
        if row >= len(slots) or slots[row] < 0 or not any(part.lora_ranks[slots[row]] for part in slices)
    ]


def heads_memory(num_tokens, heads, dtype):
    """Everything but heads and adapters, as keywords; every third token fills up the step, and angles of other
    positions are NaN. The caches, of which block 0 is in front of them, stand last."""
    head_dim, shape = heads.head_dim, (num_tokens + 3, heads.block_size, heads.num_kv_heads, heads.head_dim)
    positions = torch.randperm(num_tokens * 5, generator=torch.Generator().manual_seed(0))[:num_tokens]
    table = rope_table(1e4 ** (-torch.arange(0, head_dim, 2) / head_dim), num_tokens * 5)
    table[torch.ones(len(table), dtype=torch.bool).index_fill(0, positions, False)] = NAN
    places = torch.arange(num_tokens) * 3
    places[2::3] = -1
    return positions, table, places, [draw(*shape, dtype=dtype, seed=seed) for seed in (2, 3)]


def check_heads(
    kernel, heads, dtype, slots=SLOTS, *, norms=False, parts=slice(0, 3), room=None, is_expand=False
) -> None:
    """With ``is_expand`` the result must have the bits of expand and of the kernel without adapters."""
    head_dim, num_kv_heads = heads.head_dim, heads.num_kv_heads
    num_tokens, num_all = len(slots) + (room or 0), heads.num_heads + 2 * num_kv_heads
    sizes = [heads.num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim]
    slices = lora_slices([MIXED, OTHER, MIXED[::-1]], SIZE_IN, sizes, dtype, used=set(slots))[parts]
    x, y = sliced(num_tokens, SIZE_IN, dtype=dtype), sliced(num_tokens, num_all * head_dim, dtype=dtype, seed=9)
    y[1::4] = y[2::4] = -0.0  # of the base too, stored or not
    positions, table, places, memory = heads_memory(num_tokens, heads, dtype)
    weights = HeadNorms(draw(head_dim, dtype=dtype, seed=5), draw(head_dim, dtype=dtype, seed=6), 1e-5)
    low = shrunk(x, slices, slots, room)
    caches, alone = ([blocks.clone()[1:] for blocks in memory] for _ in range(2))
    out = kernel.qk_rope_kv(
        y.unflatten(1, (num_all, head_dim)), positions, table, *caches, places, weights if norms else None, low
    )
    expected, wide = [blocks[1:].double() for blocks in memory], with_deltas(y, x, slices, slots)
    double = HeadNorms(weights.query.double(), weights.key.double(), 1e-5)
    wide = wide.unflatten(1, (num_all, head_dim))
    queries = qk_rope_kv_reference.qk_rope_kv(
        wide[:, :-num_kv_heads], wide[:, -num_kv_heads:], positions, table.double(), *expected, places,
        double if norms else None,
    )  # fmt: skip
    for actual, wanted in zip((out, *caches), (queries, *expected), strict=True):
        assert_matches_reference(actual, wanted)
    if is_expand:
        sgmv_kernel.expand(y, low)
    own = y.unflatten(1, (num_all, head_dim))
    before = qk_rope_kv_kernel.qk_rope_kv(
        own[:, :-num_kv_heads], own[:, -num_kv_heads:], positions, table, *alone, places, weights if norms else None
    )
    same = list(range(num_tokens)) if is_expand else idle_rows(slots, slices, num_tokens)
    stored = [place for row, place in enumerate(places.tolist()) if row in same and place >= 0]
    assert same_bits(out[same], before[same])
    for cache, wanted in zip(caches, alone, strict=True):
        assert same_bits(cache.flatten(0, 1)[stored], wanted.flatten(0, 1)[stored])


@pytest.mark.parametrize(
    ("heads", "norms", "dtype"),
    [
        (Heads(4, 4, 8), False, FLOAT),
        (Heads(9, 3, 16), True, FLOAT),
        (Heads(5, 1, 24), True, BF16),
        (Heads(2, 2, 80), False, BF16),
    ],
    ids=["multi-head", "groups of 3", "multi-query 24", "head size 80"],
)
def test_heads_get_each_tokens_own_adapter_and_base_tokens_their_bits_alone(heads, norms, dtype):
    check_heads(qk_rope_kv_low, heads, dtype, norms=norms)


@pytest.mark.parametrize("parts", [slice(0, 1), slice(1, 2), slice(0, 3, 2)], ids=str)
def test_queries_keys_or_values_that_no_adapter_has_stay(parts):
    check_heads(qk_rope_kv_low, Heads(5, 3, 8), BF16, parts=parts)


@pytest.mark.parametrize("slots", [SLOTS, [-1, -1], []], ids=["mixed", "base only", "nobody"])
def test_heads_of_a_captured_plan_are_all_computed(slots):
    check_heads(qk_rope_kv_low, Heads(5, 3, 8), BF16, slots, norms=True, room=2)


@BOTH
def test_heads_have_the_bits_of_a_launch_that_adds_and_one_that_turns(dtype):
    """Where all ranks are added in one go."""
    check_heads(qk_rope_kv_low, Heads(9, 3, 8), dtype, FEW, norms=True, is_expand=True)


def test_permuted_tokens_give_permuted_bits():
    heads = Heads(9, 3, 16)
    slices = lora_slices([MIXED, OTHER, MIXED], SIZE_IN, [144, 48, 48], BF16, used=set(SLOTS))
    x, y = draw(8, SIZE_IN, dtype=BF16), draw(8, 15, 16, dtype=BF16, seed=1)
    positions, table, places, memory = heads_memory(8, heads, BF16)
    found = []
    for order in (list(range(8)), ORDER):
        caches = [blocks.clone() for blocks in memory]
        low = shrunk(x[order], slices, [SLOTS[row] for row in order])
        out = qk_rope_kv_low.qk_rope_kv(y[order], positions[order], table, *caches, places[order], None, low)
        found.append((out, caches))
    (out, caches), (again, others) = found
    assert torch.equal(again, out[ORDER])
    assert all(torch.equal(*pair) for pair in zip(caches, others, strict=True))


@pytest.mark.parametrize(("rank", "is_added_on_its_way"), [(16, True), (24, False)])
def test_the_tables_say_who_adds_to_heads(rank, is_added_on_its_way, rows):
    rows["rope_low"] = [{"up_to_rank": 16, "up_to_tokens": 8, "fused": 1}, {"fused": 0}]
    slices = lora_slices([(rank,)], SIZE_IN, [32], FLOAT, used={0})
    x, y = draw(2, SIZE_IN), draw(2, 64, seed=1)
    expected, before = with_deltas(y, x, slices, [0, 0])[:, :32].unflatten(1, (4, 8)), y.clone()
    caches, where = (torch.zeros(1, 4, 2, 8), torch.zeros(1, 4, 2, 8)), torch.tensor([3, 1])
    table = torch.tensor([1.0, 0.0])[:, None].expand(1, 2, 8).contiguous()  # nothing is turned
    low = shrunk(x, slices, [0, 0])
    out = qk_rope_kv(y.unflatten(1, (8, 8)), torch.zeros(2, dtype=torch.int64), table, caches, where, None, low)
    assert_matches_reference(out, expected)
    assert torch.equal(y, before) is is_added_on_its_way


FAULTS = {
    "a split too few": ("m_low = o_splits < SPLIT", "m_low = o_splits < SPLIT - 1"),
    "the keys' adapter for values": ("tl.where(is_value, VALUE, KEY)", "tl.where(is_value, KEY, KEY)"),
    "the queries' low ranks": ("(tl.maximum(i_slice, 0) * SPLIT + o_splits)", "(o_splits + 0 * i_slice)"),
    "swapped halves": ("d_first, d_second = ", "d_second, d_first = "),
    "a zero added": ("m_delta = mask & (lora_rank > 0)", "m_delta = mask"),
    "nothing rounded": ("(b_half + b_delta).to(KIND).to(tl.float32)", "b_half + b_delta.to(KIND)"),
    "a token in the place of another": ("i_token = tl.load(p_rows + i_place).to(tl.int64)", "i_token = i_place"),
    "values normalised and turned": ("    if is_value:\n", "    if is_value & (HEAD_DIM < 0):\n"),
    "keys with the queries' norm": ("p_query_norm if is_query else p_key_norm", "p_query_norm"),
    "values behind the queries": ("tl.where(is_value, NUM_HEADS + KV_HEADS, NUM_HEADS)", "NUM_HEADS"),
    "padding in a norm": ("m_delta = mask & (lora_rank > 0)", "m_delta = (mask | True) & (lora_rank > 0)"),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_is_caught(fault, tmp_path):
    faulty = planted(qk_rope_kv_low, fault, tmp_path)
    with pytest.raises(AssertionError):
        check_heads(faulty, Heads(5, 3, 24), BF16, FEW, norms=True, is_expand=True)


def test_the_kernel_into_which_faults_are_planted_passes():
    check_heads(qk_rope_kv_low, Heads(5, 3, 24), BF16, FEW, norms=True, is_expand=True)
