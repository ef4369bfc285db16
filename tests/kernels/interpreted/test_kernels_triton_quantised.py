"""Products with weights of 8 bits under Triton's interpreter."""

import pytest
import torch

from kernels import tiles
from kernels.quantised_linear import QuantisedWeight, reference, triton_widen
from kernels.quantised_linear import triton_kernel as quantised_kernel
from kernels.testing import assert_matches_reference
from tests.kernels.interpreted.checks import draw, planted, sliced

FLOAT, BF16 = torch.float32, torch.bfloat16
KINDS = pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn], ids=["int8", "fp8"])
BLOCKED = pytest.mark.parametrize("is_blocked", [False, True], ids=["channels", "blocks"])


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    """So that small products have parts, and steps that wait for their products."""
    row = {"block_m": 32, "block_n": 64, "block_k": 32, "programs": 64, "pdl": 0}
    table = {**tiles._table("default"), "quantised_linear": [{**row, "num_warps": 4, "num_stages": 2}]}
    monkeypatch.setattr(tiles, "_table", lambda _: table)


def weight_of(size_out: int, size_in: int, kind: torch.dtype, *, is_blocked: bool, bias: bool) -> QuantisedWeight:
    numbers = draw(size_out, size_in) * (40 if kind == torch.int8 else 60)
    blocks = (-(-size_out // 128), -(-size_in // 128)) if is_blocked else (size_out,)
    scales = draw(*blocks, seed=1).abs() / (40 * size_in**0.5) + 1e-4
    return QuantisedWeight(numbers.clamp(-127, 127).to(kind), scales, draw(size_out, seed=2) if bias else None)


def check(kernel, num_rows: int, weight: QuantisedWeight, dtype: torch.dtype) -> None:
    x = sliced(num_rows, weight.data.shape[1], dtype=dtype)
    bias = None if weight.bias is None else weight.bias.to(dtype)
    out = kernel.quantised_linear(x, QuantisedWeight(weight.data, weight.scales, bias))
    expected = x.double() @ reference.dequantised(weight).double().T
    assert_matches_reference(out, expected if bias is None else expected + bias.double())


@KINDS
@BLOCKED
@pytest.mark.parametrize("dtype", [FLOAT, BF16])
@pytest.mark.parametrize(
    ("num_rows", "size_out", "size_in"), [(1, 40, 97), (17, 150, 300), (70, 64, 128), (3, 40, 256)]
)
def test_it_equals_the_product_with_the_weight_multiplied_out(num_rows, size_out, size_in, dtype, is_blocked, kind):
    weight = weight_of(size_out, size_in, kind, is_blocked=is_blocked, bias=num_rows == 17)
    check(quantised_kernel, num_rows, weight, dtype)


@KINDS
def test_steps_that_need_not_wait_for_their_products_give_the_same_bits(kind, monkeypatch):
    weight, x = weight_of(40, 300, kind, is_blocked=False, bias=False), draw(3, 300, dtype=BF16)
    expected = quantised_kernel.quantised_linear(x, weight)
    table = tiles._table("default")
    row = {**table["quantised_linear"][0], "block_n": 32}
    monkeypatch.setattr(tiles, "_table", lambda _: {**table, "quantised_linear": [row]})

    assert torch.equal(quantised_kernel.quantised_linear(x, weight), expected)


FAULTS = {
    "a channel's scale of its neighbour": ("p_scales + o_out, mask", "p_scales + o_out // 2, mask"),
    "a block's scale of its neighbour": ("+ first // SCALED", "+ first // SCALED // 2"),
    "a missing mask of the columns": (
        "mask=m_rows[:, None] & m_in[None, :], other=0.0",
        "mask=m_rows[:, None], other=0.0",
    ),
    "a row left out": ("m_rows = i_rows < num_rows", "m_rows = i_rows < num_rows - 1"),
    "a part left out": ("tl.static_range(NUM_PARTS)", "tl.static_range(NUM_PARTS - 1)"),
    "a part of other rows": ("(i_part * num_rows + i_row)", "(i_part * num_rows)"),
    "a sum let go while it is waited for": ("tl.where(num_rows > 0, b_sum", "tl.where(num_rows > 3, b_sum"),
    "no bias": ("b_sum += tl.load(p_bias", "b_sum += 0.0 * tl.load(p_bias"),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_caught(fault, tmp_path):
    faulty = planted(quantised_kernel, fault, tmp_path)
    weights = [weight_of(40, 300, torch.int8, is_blocked=is_blocked, bias=True) for is_blocked in (False, True)]
    with pytest.raises(AssertionError):
        check_all(faulty, weights)


def check_all(kernel, weights: list[QuantisedWeight]) -> None:
    for weight in weights:
        check(kernel, 3, weight, FLOAT)


def check_widened(widen, weight: QuantisedWeight, first: int, num_rows: int, dtype: torch.dtype) -> None:
    """Bit by bit; behind the weight's last number stands NaN."""
    count = weight.data.numel()
    memory = torch.full((count + 4096,), 0x7F, dtype=torch.uint8)  # NaN of fp8, 127 of int8
    memory[:count] = weight.data.view(torch.uint8).flatten()
    data = memory[:count].view(weight.data.dtype).view(weight.data.shape)
    expected = reference.dequantised(weight)[first : first + num_rows].to(dtype)
    assert torch.equal(widen.widened(QuantisedWeight(data, weight.scales), first, num_rows, dtype), expected)


@KINDS
@BLOCKED
@pytest.mark.parametrize("dtype", [FLOAT, BF16])
@pytest.mark.parametrize(
    ("size_out", "size_in", "first", "num_rows"), [(40, 97, 0, 40), (150, 300, 128, 22), (300, 256, 128, 128)]
)
def test_numbers_are_multiplied_out_to_the_bit(size_out, size_in, first, num_rows, dtype, is_blocked, kind):
    weight = weight_of(size_out, size_in, kind, is_blocked=is_blocked, bias=False)
    check_widened(triton_widen, weight, first, num_rows, dtype)


@BLOCKED
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("wide_bytes", [1 << 20, 128 * 300 * 4], ids=["at once", "in parts"])
def test_a_product_with_parts_multiplied_out_equals_the_whole(wide_bytes, bias, is_blocked, monkeypatch):
    monkeypatch.setattr(triton_widen, "WIDE_BYTES", wide_bytes)
    check(triton_widen, 17, weight_of(300, 300, torch.int8, is_blocked=is_blocked, bias=bias), FLOAT)


WIDE_FAULTS = {
    "a channel's scale of the part's first rows": ("p_scales + first_row + i_rows", "p_scales + i_rows"),
    "a block's scale of its neighbour": ("+ first_in // SCALED", "+ first_in // SCALED // 2"),
    "columns left out": ("(o_in < SIZE_IN)", "(o_in < SIZE_IN - 1)"),
    "rows of another part": ("((first_row + i_rows) * SIZE_IN)", "(i_rows * SIZE_IN)"),
    "a row left out": ("m_rows = i_rows < num_rows", "m_rows = i_rows < num_rows - 1"),
}


@pytest.mark.parametrize("fault", WIDE_FAULTS.values(), ids=WIDE_FAULTS)
def test_a_fault_planted_where_numbers_are_multiplied_out_is_caught(fault, tmp_path):
    faulty = planted(triton_widen, fault, tmp_path)
    weights = [weight_of(300, 300, torch.int8, is_blocked=is_blocked, bias=False) for is_blocked in (False, True)]
    with pytest.raises(AssertionError):
        check_all_widened(faulty, weights)


def check_all_widened(widen, weights: list[QuantisedWeight]) -> None:
    for weight in weights:
        check_widened(widen, weight, 128, 172, FLOAT)
