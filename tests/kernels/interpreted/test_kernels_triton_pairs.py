"""Adapters on experts under Triton's interpreter: which pair has which, and what that adds, in float64."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from kernels.moe import triton_pairs, triton_plan
from kernels.moe.adapters import CutPairs, adapters_of_pairs
from kernels.moe.plan import ExpertPlan
from kernels.sgmv import LoraSlice, plan_sgmv
from kernels.sgmv.captured import SEGMENT_ROWS, SPARSE_ROWS
from kernels.testing import NAN, assert_matches_reference, lora_delta, lora_memory
from tests.kernels.interpreted.checks import draw, planted, sliced

EXPERTS, TOP_K, SLOTS = 6, 2, 3  # slot 2 has no experts' adapter, slot 3 no room for one
IN, INNER = 40, 24
SMALL, LARGE = 13, SPARSE_ROWS + 7  # tokens of a step whose rows go one by one, and in segments


@dataclass
class Step:
    """Tokens, their slots and experts; behind the first ``num_tokens`` stands what fills the step up."""

    slots: list[int]
    num_tokens: int
    topk_ids: Tensor

    def plan(self) -> ExpertPlan:
        count = torch.tensor([self.num_tokens], dtype=torch.int32)
        return triton_plan.plan_experts(self.topk_ids, EXPERTS, None, count)

    def numbers(self, pairs: Tensor) -> list[int]:
        """By the rule in one line: slot · E + expert, -1 without an adapter."""
        own = [(self.slots[pair // TOP_K], int(self.topk_ids.flatten()[pair])) for pair in pairs.tolist()]
        return [slot * EXPERTS + expert if 0 <= slot < SLOTS else -1 for slot, expert in own]


def step(num_rows: int, seed: int = 0) -> Step:
    """Chunks of some rows of one slot, so that an expert's pairs have runs."""
    chunks = torch.randint(-1, SLOTS + 1, (num_rows,), generator=torch.Generator().manual_seed(seed))
    slots = chunks[torch.arange(num_rows) // 9].tolist() if num_rows > SPARSE_ROWS else chunks.tolist()
    ids = draw(num_rows, EXPERTS, seed=seed).topk(TOP_K).indices.int().contiguous()
    return Step(slots, num_rows - 2, ids)


def of_one(num_rows: int) -> Step:
    """Runs longer than a segment."""
    return replace(step(num_rows), slots=[1] * num_rows)


def memory(size_in: int, sizes_out: list[int], dtype: torch.dtype = torch.float32) -> list[LoraSlice]:
    """Ranks of all kinds; NaN in what no adapter has."""
    ranks = [(0, 3, 8, 11, 16)[number % 5] if number < 2 * EXPERTS else 0 for number in range(SLOTS * EXPERTS)]
    found, start = [], 0
    for seed, size_out in enumerate(sizes_out):
        own = ranks[seed:] + ranks[:seed] if seed else ranks
        a, b = lora_memory([*own, 16], size_in, size_out, dtype, seed)
        a, b = a[:-1].contiguous(), b[:-1].contiguous()
        for number, rank in enumerate(own):
            a[number, rank:], b[number, rank:] = NAN, NAN
        found.append(LoraSlice(a, b, (16,) * len(own), start, torch.tensor(own, dtype=torch.int32)))
        start += size_out
    return found


def expected(y: Tensor, rows: Tensor, numbers: list[int], slices: list[LoraSlice]) -> Tensor:
    exact = y.double()
    for place, number in enumerate(numbers):
        for part in slices:
            assert part.rank_table is not None
            rank = int(part.rank_table[number]) if number >= 0 else 0
            if rank:
                columns = slice(part.start, part.start + part.b.shape[2])
                exact[place, columns] += lora_delta(rows[place], part.a[number], part.b[number], rank)
    return exact


def cut(kernel, one: Step) -> CutPairs:
    slots = plan_sgmv(one.slots, torch.device("cpu")).row_slots()
    return CutPairs(*kernel.cut_pairs(one.plan(), slots, SLOTS))


def check_segments(kernel, one: Step) -> None:
    pairs = one.plan().pairs[: one.num_tokens * TOP_K]
    numbers, found = one.numbers(pairs), cut(kernel, one)
    most = SEGMENT_ROWS if len(one.slots) > SPARSE_ROWS else 1
    rows, places = found.of_tokens, found.of_places
    assert rows.table is places.table
    assert rows.most_rows == most
    seen = [-1] * len(numbers)
    for first, count, number, _ in rows.table.tolist():
        assert count <= most
        for place in range(first, first + count):
            assert seen[place] == -1, "a place in two segments"
            seen[place] = number
    assert seen == numbers
    real = [place for place, number in enumerate(numbers) if number >= 0]
    assert [int(rows.rows[place]) for place in real] == (pairs[real] // TOP_K).tolist()
    assert [int(places.rows[place]) for place in real] == real


@pytest.mark.parametrize("num_rows", [SMALL, LARGE])
def test_each_pair_with_an_adapter_is_in_one_segment_of_its_own(num_rows):
    for seed in range(3):
        check_segments(triton_pairs, step(num_rows, seed))
    check_segments(triton_pairs, replace(step(num_rows), num_tokens=0))
    check_segments(triton_pairs, of_one(num_rows))


FAULTS = {
    "one pair too few": ("o_places < num_real)", "o_places < num_real - 1)"),
    "a slot without room for experts": ("& (b_slots < NUM_SLOTS)", ""),
    "another token's slot": ("b_pairs // TOP_K", "b_pairs // (TOP_K + 1)"),
    "experts by place": ("p_ids + b_pairs", "p_ids + o_places"),
    "segments across windows": ("| (o_places % MOST_ROWS == 0)", ""),
    "one number whatever the run": ("(b_numbers != b_before) |", ""),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_planted_into_the_cut_is_caught(fault, tmp_path):
    faulty = planted(triton_pairs, fault, tmp_path)
    with pytest.raises((AssertionError, IndexError)):
        _check_all_segments(faulty)


def _check_all_segments(kernel) -> None:
    for num_rows in (SMALL, LARGE):
        check_segments(kernel, step(num_rows))
        check_segments(kernel, of_one(num_rows))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("num_rows", [SMALL, LARGE])
def test_pairs_get_what_their_adapters_add_and_others_not_a_bit(num_rows, dtype):
    one = step(num_rows)
    plan = one.plan()
    real = one.num_tokens * TOP_K
    pairs = plan.pairs[:real].long()
    numbers = one.numbers(pairs)
    adapters = adapters_of_pairs(plan, plan_sgmv(one.slots, torch.device("cpu")), SLOTS)
    x = sliced(num_rows, IN, dtype=dtype)
    x[one.num_tokens :] = NAN
    y, inner = (draw(len(plan.pairs), size, dtype=dtype, seed=size) for size in (2 * INNER, INNER))
    gate_up, down = memory(IN, [INNER, INNER], dtype), memory(INNER, [IN], dtype)
    z = draw(len(plan.pairs), IN, dtype=dtype, seed=3)
    before, z_before = y.clone(), z.clone()

    adapters.add_of_tokens(y, x, gate_up)
    adapters.add_of_pairs(z, inner, down)

    assert_matches_reference(y[:real], expected(before[:real], x[pairs // TOP_K], numbers, gate_up))
    assert_matches_reference(z[:real], expected(z_before[:real], inner[:real], numbers, down))
    base = [place for place, number in enumerate(numbers) if number < 0] + list(range(real, len(plan.pairs)))
    assert len(base) > 2 * TOP_K
    assert torch.equal(y[base], before[base])
    assert torch.equal(z[base], z_before[base])


def test_a_row_gets_the_same_bits_beside_others():
    one = step(LARGE)
    alone = replace(one, slots=[slot if row < 9 else -1 for row, slot in enumerate([1] * 9 + one.slots[9:])])
    one = replace(one, slots=[1] * 9 + one.slots[9:])
    x, gate_up = draw(LARGE, IN), memory(IN, [INNER, INNER])
    found = []
    for each in (one, alone):
        plan = each.plan()
        y = torch.zeros(len(plan.pairs), 2 * INNER)
        adapters_of_pairs(plan, plan_sgmv(each.slots, torch.device("cpu")), SLOTS).add_of_tokens(y, x, gate_up)
        found.append(y[(plan.pairs < 9 * TOP_K) & (torch.arange(len(y)) < each.num_tokens * TOP_K)])
    assert found[0].any()
    assert torch.equal(*found)


def test_a_step_beyond_what_one_launch_may_have_goes_in_pieces(monkeypatch):
    from kernels.sgmv import triton_kernel

    one, x, gate_up = step(LARGE), draw(LARGE, IN), memory(IN, [INNER])
    plan = one.plan()
    adapters = adapters_of_pairs(plan, plan_sgmv(one.slots, torch.device("cpu")), SLOTS)
    whole, cut_up = torch.zeros(len(plan.pairs), INNER), torch.zeros(len(plan.pairs), INNER)
    adapters.add_of_tokens(whole, x, gate_up)
    monkeypatch.setattr(triton_kernel, "_MOST_PROGRAMS", 64)

    adapters.add_of_tokens(cut_up, x, gate_up)

    assert torch.equal(whole, cut_up)
