"""What a bench is to decide is right, before it is timed: each trial's kernel under Triton's interpreter."""

import importlib

import pytest
import torch

from kernels import quantised_linear, tiles
from kernels.paged_attention import triton_kernel as attention_kernel
from kernels.quantised_linear import QuantisedWeight, reference
from kernels.quantised_linear import triton_kernel as quantised_kernel
from kernels.sgmv import triton_kernel as sgmv_kernel
from kernels.sgmv import triton_vector
from kernels.testing import Heads, assert_matches_reference, ragged_kv
from ops.bench.gpu.changes import copy_of, edited
from ops.bench.gpu.trials import trials
from tests.kernels.interpreted.checks import check_attention, check_sgmv, draw, lora_slices, sliced, small_tiles


def check_of_attention(kernel) -> None:
    batch = ragged_kv([70, 90, 9], Heads(8, 2, 16, 16), torch.float32)
    check_attention(kernel, batch, [(0, 69, 70), (1, 20, 90), (2, 5, 9)])


def check_of_quantised_linear(kernel) -> None:
    data, scales = (draw(40, 300) * 40).clamp(-127, 127).to(torch.int8), draw(40, seed=1).abs() / 700
    x = sliced(5, 300, dtype=torch.bfloat16)
    weight = QuantisedWeight(data, scales)
    assert_matches_reference(kernel.quantised_linear(x, weight), x.double() @ reference.dequantised(weight).double().T)


def check_of_vectors(kernel) -> None:
    slots = [0, 1, 2, -1]
    slices = lora_slices([(64, 5, 40)], 100, [70], torch.float32, used=set(slots))
    with pytest.MonkeyPatch.context() as patch:
        table = {**tiles._table("default"), "sgmv_form": [{"rows_of_slot": 9}]}
        patch.setattr(tiles, "_table", lambda _: table)
        patch.setattr(sgmv_kernel, "triton_vector", kernel)
        check_sgmv(sgmv_kernel, slots, slices, torch.float32)


CHECKS = {
    attention_kernel.__name__: check_of_attention,
    quantised_kernel.__name__: check_of_quantised_linear,
    triton_vector.__name__: check_of_vectors,
}


@pytest.mark.parametrize("edits", dict.fromkeys(edits for _, edits, *_ in trials()), ids=lambda edits: edits[0][1][:30])
def test_a_trial_computes_what_its_kernel_does(edits, monkeypatch):
    small_tiles(monkeypatch)
    for name in {module for module, _, _ in edits}:
        CHECKS[name](copy_of(importlib.import_module(name), edits))


def test_a_trial_stands_where_its_kernel_is_looked_for_and_goes_again():
    edit = (quantised_kernel.__name__, '"""See the package; worth it for few rows."""', '"""Another one."""')

    with edited([edit]):
        assert quantised_linear.triton_kernel.quantised_linear.__doc__ == "Another one."

    assert quantised_linear.triton_kernel is quantised_kernel


@pytest.mark.parametrize("text", ["of no kernel", "tl.load"], ids=["nowhere", "in several places"])
def test_a_text_that_does_not_stand_once_is_refused(text):
    with pytest.raises(LookupError, match=r"times in kernels\.quantised_linear\.triton_kernel"):
        copy_of(quantised_kernel, [(quantised_kernel.__name__, text, "")])
