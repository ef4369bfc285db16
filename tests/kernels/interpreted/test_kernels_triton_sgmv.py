"""Shrink and expand under Triton's interpreter."""

import pytest
import torch

from kernels import tiles
from kernels.sgmv import LoraSlice, plan_sgmv, triton_tables, triton_vector
from kernels.sgmv import triton_kernel as sgmv_kernel
from kernels.testing import NAN
from tests.kernels.interpreted.checks import add_lora, check_sgmv, draw, lora_slices, planted

FLOAT, BF16 = torch.float32, torch.bfloat16
FORMS = pytest.mark.parametrize("is_vector", [1000, 0], ids=["vectors", "matrices"])
BOTH = pytest.mark.parametrize("dtype", [FLOAT, BF16])
MIXED = (8, 16, 5, 64, 24, 1)  # true ranks of six slots, in memory of 64


@pytest.fixture(autouse=True)
def form(request, monkeypatch):
    """Of the products: by FORMS, else the shipped table's."""
    if "is_vector" in request.fixturenames:
        table = {**tiles._table("default"), "sgmv_form": [{"rows_of_slot": request.getfixturevalue("is_vector")}]}
        monkeypatch.setattr(tiles, "_table", lambda _: table)


@pytest.fixture
def small_parts(monkeypatch):
    """160 numbers are added up in four parts of several steps, 96 columns made by two programs."""
    shrink = {"block_m": 16, "block_k": 32, "split": 4, "num_warps": 4, "num_stages": 2}
    expand = {"block_n": 64, "num_warps": 4, "pdl": 0}
    table = {**tiles._table("default"), "sgmv_shrink": [shrink], "sgmv_expand": [expand]}
    monkeypatch.setattr(tiles, "_table", lambda _: table)


POPULARITIES = {
    "one": [3],
    "base only": [-1, -1],
    "identical": [1] * 17,
    "distinct": [0, 1, 2, 3, 4, 5],
    "uniform": [(7 * row) % 6 for row in range(13)],
    "zipf with base rows": [(0, 0, 0, -1, 1, 1, -1, 4)[row % 8] for row in range(16)],
}


@pytest.mark.usefixtures("small_parts")
@FORMS
@BOTH
@pytest.mark.parametrize("slots", POPULARITIES.values(), ids=POPULARITIES)
def test_each_row_gets_its_own_adapter_and_base_rows_stay_bit_by_bit(slots, is_vector, dtype):
    slices = lora_slices([MIXED], 160, [96], dtype, used=set(slots))
    check_sgmv(sgmv_kernel, slots, slices, dtype)


@FORMS
@BOTH
def test_packed_slices_have_their_own_widths_ranks_and_gaps(is_vector, dtype):
    ranks = [(8, 16, 0, 4), (0, 16, 0, 4), (8, 3, 0, 128)]
    slots = [0, 1, -1, 3, 2, 1, 0, 0]
    check_sgmv(sgmv_kernel, slots, lora_slices(ranks, 128, [64, 16, 48], dtype, used={0, 1, 2, 3}), dtype)


@FORMS
@BOTH
@pytest.mark.parametrize(("num_in", "num_out"), [(97, 41), (576, 1), (300, 130)])
def test_odd_sizes_are_masked(num_in, num_out, is_vector, dtype):
    slots = [0, -1, 1, 1]
    check_sgmv(sgmv_kernel, slots, lora_slices([(8, 3)], num_in, [num_out], dtype, used={0, 1}), dtype)


def test_more_rows_than_a_decode_take_larger_segments():
    slots = [0] * 300 + [-1] * 5 + [1] * 300  # > 512 rows: the tiles of prompts
    check_sgmv(sgmv_kernel, slots, lora_slices([(8, 16)], 32, [16], FLOAT, used={0, 1}), FLOAT)


@pytest.mark.usefixtures("small_parts")
@FORMS
def test_permuted_rows_give_permuted_bits(is_vector):
    slots = [0, 3, -1, 1, 1, 4, 0, 2]
    slices = lora_slices([MIXED], 160, [96], BF16, used=set(slots))
    x, y = draw(8, 160, dtype=BF16), draw(8, 96, dtype=BF16, seed=1)
    order = [5, 2, 7, 0, 1, 6, 4, 3]
    moved = y[order]
    add_lora(sgmv_kernel, moved, x[order], slices, plan_sgmv([slots[row] for row in order], x.device))
    add_lora(sgmv_kernel, y, x, slices, plan_sgmv(slots, x.device))
    assert torch.equal(moved, y[order])


@FORMS
def test_a_slot_that_was_loaded_again_is_read_at_its_new_rank(is_vector):
    slices = lora_slices([(16, 8)], 64, [32], FLOAT, used={0})
    check_sgmv(sgmv_kernel, [0, 0], slices, FLOAT)
    _load_again(slices[0])
    check_sgmv(sgmv_kernel, [0, 0], [_load_again(slices[0])], FLOAT)


def _load_again(part: LoraSlice) -> LoraSlice:
    """Slot 0 in the same memory with rank 4; what follows is NaN."""
    for memory, seed in ((part.a, 5), (part.b, 6)):
        memory[0, :4] = draw(4, memory.shape[2], seed=seed)
        memory[0, 4:] = NAN
    return LoraSlice(part.a, part.b, (4, *part.lora_ranks[1:]), part.start)


@FORMS
def test_ranks_that_stand_on_the_device_are_read_there(is_vector):
    slices = lora_slices([(16, 8)], 64, [32], FLOAT, used={0, 1})
    table = torch.tensor(slices[0].lora_ranks, dtype=torch.int32)
    check_sgmv(sgmv_kernel, [0, 1], [LoraSlice(slices[0].a, slices[0].b, (16, 8), 0, table)], FLOAT)


FAULTS = {
    "partials that nobody wrote": (
        "m_low = m_rows[:, None] & (o_ranks < tl.cdiv(lora_rank, 8) * 8)[None, :]",
        "m_low = m_rows[:, None] & m_ranks[None, :]",
    ),
    "sums past the rank": (
        "m_low = m_rows[:, None] & (tl.arange(0, BLOCK_R) < tl.cdiv(lora_rank, 8) * 8)[None, :]",
        "m_low = m_rows[:, None] & (tl.arange(0, BLOCK_R) < BLOCK_R)[None, :]",
    ),
    "a missing mask of the rows": (
        "m_own = m_rows[:, None] & (o_out < size_out)[None, :]",
        "m_own = (tl.arange(0, BLOCK_M) < num_own + 1)[:, None] & (o_out < size_out)[None, :]",
    ),
    "an unmasked load of x": (
        "p_x + (i_rows * stride_x)[:, None] + o_in[None, :], mask=m_rows[:, None] & m_in[None, :], other=0.0",
        "p_x + (i_rows * stride_x)[:, None] + o_in[None, :], mask=m_rows[:, None] & m_in[None, :]",
    ),
    "swapped strides of the slots": (
        "o_a = (i_slot * num_ranks + o_ranks) * SIZE_IN",
        "o_a = (o_ranks * num_ranks + i_slot) * SIZE_IN",
    ),
    "the slot of the segment before": (
        "segment_at(p_segments, i_segment)\n    p_slice =",
        "segment_at(p_segments, i_segment)\n"
        "    _, _, i_slot = segment_at(p_segments, tl.maximum(i_segment - 1, 0))\n    p_slice =",
    ),
}


def check_many_kinds(kernel) -> None:
    """As many slots as ranks: the strides of a slot and of a rank, swapped, name memory of the tensor all the same."""
    slots = [0, 1, 3, -1, 3, 2, 4]
    slices = lora_slices([(8, 16, 5, 12, 11, *[16] * 11)], 100, [40], FLOAT, used=set(slots))
    check_sgmv(kernel, slots, slices, FLOAT)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("is_vector", [0])
def test_the_kernel_into_which_faults_are_planted_passes(is_vector):
    check_many_kinds(sgmv_kernel)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("is_vector", [0])
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_caught(fault, is_vector, tmp_path):
    faulty = planted(sgmv_kernel, fault, tmp_path)
    with pytest.raises(AssertionError):
        check_many_kinds(faulty)


VECTOR_FAULTS = {
    "a tile of ranks left out": ("i_ranks = i_part // SPLIT * RANKS", "i_ranks = i_part // SPLIT * 0"),
    "a missing mask of the first ranks": (
        "tile_of_b(p_slice, p_y, i_slot, lora_rank, o_out,",
        "tile_of_b(p_slice, p_y, i_slot, RANKS, o_out,",
    ),
    "a missing mask of the last ranks": (
        "(i_ranks + RANKS + o_ranks < lora_rank)[:, None]",
        "(o_ranks < RANKS)[:, None]",
    ),
    "a split too many": ("m_low = o_splits < SPLIT", "m_low = o_splits < SPLIT + 1"),
    "swapped strides of the slots": ("(i_slot * num_ranks + o_ranks) * SIZE_IN", "(i_slot + o_ranks) * SIZE_IN"),
}


def check_vectors(monkeypatch) -> None:
    row = {"block_k": 256, "shrink_warps": 4, "block_n": 64, "expand_warps": 4, "pdl": 0}
    table = {**tiles._table("default"), "sgmv_vector": [row], "sgmv_form": [{"rows_of_slot": 9}]}
    monkeypatch.setattr(tiles, "_table", lambda _: table)
    slots = [0, 1, 3, -1, 3, 2, 4, 5]
    slices = lora_slices([(*MIXED[:5], 40)], 600, [70], FLOAT, used=set(slots))
    check_sgmv(sgmv_kernel, slots, slices, FLOAT)


def test_the_vector_form_into_which_faults_are_planted_passes(monkeypatch):
    check_vectors(monkeypatch)


@pytest.mark.parametrize("fault", VECTOR_FAULTS.values(), ids=VECTOR_FAULTS)
def test_a_fault_of_the_vector_form_is_caught(fault, tmp_path, monkeypatch):
    monkeypatch.setattr(sgmv_kernel, "triton_vector", planted(triton_vector, fault, tmp_path))
    with pytest.raises(AssertionError):
        check_vectors(monkeypatch)


@pytest.mark.usefixtures("small_parts")
@BOTH
@pytest.mark.parametrize("slots", POPULARITIES.values(), ids=POPULARITIES)
@pytest.mark.parametrize("room", [5, 64], ids=["each row by itself", "segments"])
def test_a_captured_plan_serves_any_mix_of_adapters(slots, room, dtype):
    slices = lora_slices([MIXED, MIXED[::-1]], 160, [96, 16], dtype, used=set(slots))
    check_sgmv(sgmv_kernel, slots, slices, dtype, room=room)


def test_a_stale_rank_of_a_slot_is_caught(tmp_path, monkeypatch):
    """Ranks remembered by their number, not by what they are, would outlive the slot's adapter."""
    slices = lora_slices([(16, 8)], 64, [32], FLOAT, used={0})
    faulty = planted(
        triton_tables,
        ("part.lora_ranks, part.a.device)", "_FIRST.setdefault(0, part.lora_ranks), part.a.device)"),
        tmp_path,
    )
    faulty._FIRST = {}
    monkeypatch.setattr(sgmv_kernel, "slice_table", faulty.slice_table)
    check_sgmv(sgmv_kernel, [0, 0], slices, FLOAT)
    with pytest.raises(AssertionError):
        check_sgmv(sgmv_kernel, [0, 0], [_load_again(slices[0])], FLOAT)
