"""silu_mul that adds what adapters add to gate and up on its way, under Triton's interpreter."""

import pytest
import torch

from kernels import tiles
from kernels.silu_mul import triton_low
from tests.kernels.interpreted.checks import check_silu_low, lora_slices, planted

FLOAT, BF16 = torch.float32, torch.bfloat16
BOTH = pytest.mark.parametrize("dtype", [FLOAT, BF16])
FORMS = pytest.mark.parametrize("form", [1000, 0], ids=["vectors", "matrices"], indirect=True)
MIXED = (8, 16, 5, 40, 0, 1)  # ranks of six slots in gate's memory; up has them the other way round
SLOTS = [0, 3, -1, 1, 1, 4, -1, 2]


@pytest.fixture(autouse=True)
def form(request, monkeypatch):
    """Small tiles, so that a row's columns are made by two programs and its low ranks added up from parts."""
    table = {
        **tiles._table("default"),
        "sgmv_form": [{"rows_of_slot": getattr(request, "param", 1000)}],
        "sgmv_shrink": [{"block_m": 16, "block_k": 32, "split": 4, "num_warps": 4, "num_stages": 2}],
        "sgmv_vector": [{"block_k": 32, "shrink_warps": 2, "block_n": 64, "expand_warps": 2, "pdl": 0}],
        "silu_low_vector": [{"block_n": 64, "num_warps": 2}],
        "silu_low_matrix": [{"block_n": 64, "num_warps": 4}],
    }
    monkeypatch.setattr(tiles, "_table", lambda _: table)


@FORMS
@BOTH
@pytest.mark.parametrize("size", [96, 70])
def test_gate_and_up_get_their_own_adapters_and_base_rows_their_bits_alone(form, size, dtype):
    slices = lora_slices([MIXED, MIXED[::-1]], 97, [size, size], dtype, used=set(SLOTS))
    check_silu_low(triton_low, SLOTS, slices, dtype)


@FORMS
@pytest.mark.parametrize("number", [0, 1], ids=["gate", "up"])
def test_adapters_of_one_half_leave_the_other(form, number):
    slices = lora_slices([MIXED, MIXED], 64, [80, 80], BF16, used=set(SLOTS))
    check_silu_low(triton_low, SLOTS, slices[number : number + 1], BF16)


@pytest.mark.parametrize("room", [3, 64], ids=["each row by itself", "segments"])
@pytest.mark.parametrize("slots", [SLOTS, [1] * 17, [-1, -1], []], ids=["mixed", "one", "base only", "nobody"])
def test_a_captured_plan_computes_all_of_its_rows(slots, room):
    slices = lora_slices([MIXED, MIXED[::-1]], 64, [80, 80], BF16, used=set(slots))
    check_silu_low(triton_low, slots, slices, BF16, room=room)


FAULTS = {
    "up's adapter for gate": ("i_low = (GATE * SPLIT + o_splits).to", "i_low = (UP * SPLIT + o_splits).to"),
    "rows without a slot left out": (
        "    if num_own == 0:\n        if PDL:",
        "    if (num_own == 0) | (i_slot < 0):\n        if PDL:",
    ),
    "the rank of the slot after": (
        "rank_of(slice_at(p_slices, SLICE), tl.maximum(i_slot, 0))",
        "rank_of(slice_at(p_slices, SLICE), tl.maximum(i_slot + 1, 0) % 6)",
    ),
    "gate for up": ("b_up = tl.load(p_row + SIZE, mask", "b_up = tl.load(p_row, mask"),
}
SEGMENT_FAULTS = {
    "up's adapter for gate": ("SIZE, GATE, SPLIT, BLOCK_R", "SIZE, UP, SPLIT, BLOCK_R"),
    "gate for up": ("p_from + SIZE, p_gate_up", "p_from, p_gate_up"),
    "sums past the rank": ("< tl.cdiv(lora_rank, 8) * 8)[None, :]", "< BLOCK_R)[None, :]"),
}


def check(kernel) -> None:
    check_silu_low(kernel, SLOTS, lora_slices([MIXED, MIXED[::-1]], 64, [70, 70], FLOAT, used=set(SLOTS)), FLOAT)


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_caught(fault, tmp_path):
    with pytest.raises(AssertionError):
        check(planted(triton_low, fault, tmp_path))


@pytest.mark.parametrize("form", [0], indirect=True)
@pytest.mark.parametrize("fault", SEGMENT_FAULTS.values(), ids=SEGMENT_FAULTS)
def test_a_fault_of_the_segments_is_caught(form, fault, tmp_path):
    with pytest.raises(AssertionError):
        check(planted(triton_low, fault, tmp_path))
