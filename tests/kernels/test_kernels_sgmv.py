"""kernels/sgmv: each row gets its own adapter's delta, exactly as alone, and nothing else happens to it."""

import random

import pytest
import torch

from kernels.sgmv import LoraSlice, plan_sgmv, sgmv
from kernels.testing import NAN, assert_matches_reference, lora_delta, lora_memory

DTYPES = [torch.float32, torch.bfloat16]
SIZES = [(32, 16), (32, 64), (64, 32), (576, 192), (576, 1536), (1536, 576)]
LORA_RANKS = (4, 8, 1, 16, 3, 64)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True, params=[1, 2], ids=["1-thread", "2-threads"])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def rows_of(count: int, size: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def apply(y: torch.Tensor, x: torch.Tensor, slices: list[LoraSlice], slots: list[int]) -> torch.Tensor:
    y = y.clone()
    sgmv(y, x, slices, plan_sgmv(slots, CPU))
    return y


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_each_row_gets_its_own_adapters_delta(sizes, dtype):
    a, b = lora_memory(LORA_RANKS, *sizes, dtype)
    x, y = rows_of(60, sizes[0], dtype), rows_of(60, sizes[1], dtype, seed=1)
    slots = random.Random(0).choices(range(-1, len(LORA_RANKS)), k=60)

    out = apply(y, x, [LoraSlice(a, b, LORA_RANKS)], slots)

    for row, slot in enumerate(slots):
        delta = 0 if slot < 0 else lora_delta(x[row], a[slot], b[slot], LORA_RANKS[slot])
        assert_matches_reference(out[row], y[row].double() + delta)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_row_has_the_bits_of_its_solo_run_in_any_batch(sizes, dtype):
    a, b = lora_memory(LORA_RANKS, *sizes, dtype)
    slices = [LoraSlice(a, b, LORA_RANKS)]
    x, y = rows_of(300, sizes[0], dtype), rows_of(300, sizes[1], dtype, seed=1)
    rng = random.Random(2)
    slot_of = rng.choices(range(-1, len(LORA_RANKS)), k=300)
    alone = torch.cat([apply(y[i : i + 1], x[i : i + 1], slices, [slot]) for i, slot in enumerate(slot_of)])

    for count in (2, 3, 5, 8, 31, 64, 300):
        chosen = rng.sample(range(300), count)
        together = apply(y[chosen], x[chosen], slices, [slot_of[i] for i in chosen])
        assert torch.equal(together, alone[chosen]), count


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_long_run_of_one_adapter_has_the_bits_of_single_rows(sizes):
    a, b = lora_memory(LORA_RANKS, *sizes)
    slices = [LoraSlice(a, b, LORA_RANKS)]
    x, y = rows_of(70, sizes[0], torch.float32), rows_of(70, sizes[1], torch.float32, seed=1)

    for slot in (0, 2, 5):
        alone = torch.cat([apply(y[i : i + 1], x[i : i + 1], slices, [slot]) for i in range(70)])
        for count in (4, 16, 17, 31, 64, 69):
            assert torch.equal(apply(y[:count], x[:count], slices, [slot] * count), alone[:count]), (slot, count)


@pytest.mark.parametrize("slots", [[0, 1], [0, 1, 4], [0, 0, 1, 1, 1, 4], [4, 1, 0]], ids=str)
def test_neighbouring_rows_of_other_adapters_do_not_mix(slots: list[int]):
    """Slots of equal rounded rank share a product, each with rows that fill up its tile."""
    a, b = lora_memory(LORA_RANKS, 32, 64)
    slices = [LoraSlice(a, b, LORA_RANKS)]
    x, y = rows_of(len(slots), 32, torch.float32), rows_of(len(slots), 64, torch.float32, seed=1)

    together = apply(y, x, slices, slots)

    alone = [apply(y[i : i + 1], x[i : i + 1], slices, [slot]) for i, slot in enumerate(slots)]
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_base_rows_are_left_alone_bit_by_bit(dtype):
    a, b = lora_memory(LORA_RANKS, 32, 64, dtype)
    x, y = rows_of(9, 32, dtype), rows_of(9, 64, dtype, seed=1)
    y[0, 0] = -0.0
    x[0] = NAN
    slots = [-1, 0, -1, 3, 3, -1, 5, 1, -1]

    out = apply(y, x, [LoraSlice(a, b, LORA_RANKS)], slots)

    base = [row for row, slot in enumerate(slots) if slot < 0]
    whole = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(out[base].view(whole), y[base].view(whole))


def test_slots_that_no_row_uses_are_not_read():
    a, b = lora_memory(LORA_RANKS, 32, 64)
    x, y = rows_of(7, 32, torch.float32), rows_of(7, 64, torch.float32, seed=1)
    slots = [1, -1, 1, 4, 4, 4, 4]
    clean = apply(y, x, [LoraSlice(a, b, LORA_RANKS)], slots)
    for unused in (0, 2, 3, 5):
        a[unused], b[unused] = NAN, NAN

    assert torch.equal(apply(y, x, [LoraSlice(a, b, LORA_RANKS)], slots), clean)


def test_a_slot_without_the_module_adds_nothing():
    lora_ranks = (4, 0, 8)
    a, b = lora_memory(lora_ranks, 32, 64)
    a[1], b[1] = NAN, NAN
    x, y = rows_of(6, 32, torch.float32), rows_of(6, 64, torch.float32, seed=1)

    out = apply(y, x, [LoraSlice(a, b, lora_ranks)], [0, 1, 2, 1, 1, -1])

    assert torch.equal(out[[1, 3, 4, 5]], y[[1, 3, 4, 5]])
    assert not torch.equal(out[[0, 2]], y[[0, 2]])


def test_slices_of_a_packed_projection_touch_their_own_columns():
    """q has rank 4, k is missing, v has rank 8 in the one slot; the other slot has k only."""
    q, k, v = ((4, 0), (0, 2), (8, 0))
    pairs = [lora_memory(ranks, 32, size, seed=i) for i, (ranks, size) in enumerate(((q, 32), (k, 16), (v, 16)))]
    slices = [LoraSlice(*pairs[0], q, 0), LoraSlice(*pairs[1], k, 32), LoraSlice(*pairs[2], v, 48)]
    x, y = rows_of(2, 32, torch.float32), rows_of(2, 64, torch.float32, seed=1)

    out = apply(y, x, slices, [0, 1])

    assert torch.equal(out[0, 32:48], y[0, 32:48])
    assert torch.equal(out[1, :32], y[1, :32])
    assert torch.equal(out[1, 48:], y[1, 48:])
    assert_matches_reference(out[0, :32], y[0, :32] + lora_delta(x[0], pairs[0][0][0], pairs[0][1][0], 4))
    assert_matches_reference(out[0, 48:], y[0, 48:] + lora_delta(x[0], pairs[2][0][0], pairs[2][1][0], 8))
    assert_matches_reference(out[1, 32:48], y[1, 32:48] + lora_delta(x[1], pairs[1][0][1], pairs[1][1][1], 2))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_rank_gives_the_same_bits_whatever_the_memory_is_sized_for(dtype):
    a, b = lora_memory((4,), 32, 64, dtype)
    wide_a, wide_b = (torch.zeros(3, 64, part.shape[2], dtype=dtype) for part in (a, b))
    wide_a[2, :4], wide_b[2, :4] = a[0, :4], b[0, :4]
    x, y = rows_of(5, 32, dtype), rows_of(5, 64, dtype, seed=1)

    small = apply(y, x, [LoraSlice(a, b, (4,))], [0] * 5)

    assert torch.equal(apply(y, x, [LoraSlice(wide_a, wide_b, (0, 0, 4))], [2] * 5), small)
