"""kernels/linear: what it computes, and that a row's bits depend on nothing but the row."""

import pytest
import torch

from kernels.linear import LinearWeight, linear, linear_parts, onednn, reference
from kernels.linear.exactness import cancelling
from kernels.testing import assert_matches_reference

TINY = [(32, 64), (32, 32), (32, 128), (64, 32), (32, 300)]
SMOLLM2 = [(576, 960), (576, 576), (576, 3072), (1536, 576), (576, 192)]
HEAD = (576, 49152)
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True, params=[1, 2], ids=["1-thread", "2-threads"])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def unequal_counts(compute, rows: torch.Tensor, counts) -> list[int]:
    """The numbers of rows with which ``compute`` gives some row other bits than with all of them."""
    whole = compute(rows)
    first = 3  # so that a row's place differs too
    return [count for count in counts if not torch.equal(compute(rows[first : first + count]), whole[first:][:count])]


@pytest.mark.parametrize("sizes", TINY + SMOLLM2, ids=str)
def test_fp32_rows_are_equal_for_any_number_of_rows(sizes):
    weight = LinearWeight(random(sizes[1], sizes[0], seed=1))
    counts = range(1, 301) if sizes in TINY else [*range(1, 41), *range(47, 301, 23), 300]

    assert unequal_counts(lambda x: linear(x, weight), random(304, sizes[0]), counts) == []


@pytest.mark.parametrize("sizes", TINY + SMOLLM2, ids=str)
def test_padded_torch_rows_are_equal_for_any_number_of_rows(sizes):
    """The way that machines take whose oneDNN isn't exact."""
    weight = random(sizes[1], sizes[0], seed=1)
    counts = range(1, 301) if sizes in TINY else [*range(1, 41), *range(47, 301, 23), 300]

    assert unequal_counts(lambda x: reference.linear(x, weight, None), random(304, sizes[0]), counts) == []


@pytest.mark.parametrize("sizes", [*TINY, (576, 192), (1536, 576)], ids=str)
def test_bf16_rows_are_equal_for_any_number_of_rows(sizes):
    weight = LinearWeight(random(sizes[1], sizes[0], seed=1, dtype=torch.bfloat16))
    counts = range(1, 301) if sizes in TINY else [*range(1, 14), 33, 100]
    rows = random(304 if sizes in TINY else 104, sizes[0], dtype=torch.bfloat16)

    assert unequal_counts(lambda x: linear(x, weight), rows, counts) == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [*TINY, *SMOLLM2, (33, 50)], ids=str)
def test_sums_of_which_only_rounding_is_left_are_equal_for_any_number_of_rows(sizes, dtype):
    """Rounded to bf16, other sums look the same in whatever order they were added."""
    rows, weight = cancelling(*sizes, dtype)
    counts = [*range(1, 20), 31, 33, 48, 100]

    assert unequal_counts(lambda x: linear(x, LinearWeight(weight)), rows.repeat(2, 1), counts) == []


def test_rows_of_the_large_head_are_equal():
    weight = LinearWeight(random(HEAD[1], HEAD[0], seed=1))

    assert unequal_counts(lambda x: linear(x, weight), random(20, HEAD[0]), [1, 2, 3, 5, 8, 13, 16]) == []


def test_unpadded_torch_rows_are_not_equal():
    """Why all this is there; when it fails, torch has become exact and the padding can go."""
    weight = random(64, 32, seed=1)

    assert unequal_counts(lambda x: torch.nn.functional.linear(x, weight), random(304, 32), range(1, 12)) != []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
def test_it_is_the_product_and_the_bias(dtype, with_bias: bool):
    weight, x = random(48, 40, seed=1, dtype=dtype) / 40**0.5, random(7, 40, dtype=dtype)
    bias = random(48, seed=2, dtype=dtype) if with_bias else None

    y = linear(x, LinearWeight(weight, bias))

    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert y.dtype == dtype
    assert_matches_reference(y, expected)


def test_one_thread_and_several_give_the_same_bits(threads):
    weight, x = random(960, 576, seed=1), random(9, 576)
    here = linear(x, LinearWeight(weight))

    torch.set_num_threads(3 - threads)

    assert torch.equal(here, linear(x, LinearWeight(weight)))


@pytest.mark.skipif(not onednn.is_available(), reason="torch without oneDNN")
def test_packing_keeps_the_weight_bit_by_bit():
    weight = random(300, 32)

    assert torch.equal(LinearWeight(weight).weight, weight)


@pytest.mark.parametrize("num_parts", [1, 2, 4])
def test_the_parts_of_a_product_add_up_to_it(num_parts):
    x, weight = random(5, 256), LinearWeight(random(24, 256, seed=1) / 16)

    parts = linear_parts(x, weight, num_parts)

    assert parts.shape == (num_parts, 5, 24)
    assert parts.dtype == torch.float32
    torch.testing.assert_close(parts.sum(0), linear(x, weight))
