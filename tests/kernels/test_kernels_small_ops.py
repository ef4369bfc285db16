"""kernels/rms_norm, rope, store_kv and the three of them in one."""

import pytest
import torch

from kernels.qk_rope_kv import HeadNorms, qk_rope_kv
from kernels.rms_norm import rms_norm
from kernels.rope import rope, rope_table
from kernels.sgmv import LoraSlice, plan_sgmv, sgmv, shrink
from kernels.store_kv import store_kv
from kernels.testing import NAN, assert_matches_reference

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True, params=[1, 2], ids=["1-thread", "2-threads"])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_divides_by_the_root_mean_square(dtype):
    x, weight = random(7, 32, dtype=dtype), random(32, seed=1, dtype=dtype)

    out = rms_norm(x, weight, 1e-5)

    wide = x.double()
    assert_matches_reference(out, wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [32, 576])
def test_rms_norm_rows_are_equal_for_any_number_of_rows(size: int, dtype):
    x, weight = random(304, size, dtype=dtype), random(size, seed=1, dtype=dtype)
    whole = rms_norm(x, weight, 1e-5)

    assert all(torch.equal(rms_norm(x[3 : 3 + n], weight, 1e-5), whole[3 : 3 + n]) for n in range(1, 301))


def table_of(head_dim: int, num_positions: int = 600) -> torch.Tensor:
    return rope_table(1.0 / 10_000.0 ** (torch.arange(0, head_dim, 2) / head_dim), num_positions)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rope_turns_each_pair_by_position_times_frequency(dtype):
    heads, positions = random(5, 6, 8, dtype=dtype), torch.tensor([0, 1, 7, 7, 599])

    out = rope(heads, positions, table_of(8))

    angles = positions.double()[:, None] / 10_000.0 ** (torch.arange(0, 8, 2).double() / 8)
    turned = torch.view_as_complex(torch.stack((heads[..., :4], heads[..., 4:]), -1).double().contiguous())
    turned = turned * torch.polar(torch.ones_like(angles), angles)[:, None]
    expected = torch.cat((turned.real, turned.imag), -1)
    torch.testing.assert_close(out.double(), expected, rtol=1e-2, atol=2e-2 if dtype == torch.bfloat16 else 1e-4)


def test_rope_leaves_position_0_and_its_input_alone():
    heads = random(3, 2, 8)
    before = heads.clone()

    assert torch.equal(rope(heads, torch.zeros(3, dtype=torch.int64), table_of(8)), heads)
    rope(heads, torch.tensor([4, 5, 6]), table_of(8))
    assert torch.equal(heads, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rope_rows_are_equal_for_any_number_of_rows(dtype):
    heads, table = random(304, 12, 64, dtype=dtype), table_of(64)
    positions = torch.arange(304)
    whole = rope(heads, positions, table)

    for count in range(1, 301):
        some = slice(3, 3 + count)
        assert torch.equal(rope(heads[some], positions[some], table), whole[some])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_store_kv_writes_the_named_slots_and_nothing_else(dtype):
    keys, values = random(3, 2, 8, dtype=dtype), random(3, 2, 8, seed=1, dtype=dtype)
    caches = [torch.full((5, 4, 2, 8), NAN, dtype=dtype) for _ in range(2)]

    store_kv(keys, values, *caches, torch.tensor([13, 2, 19]))

    for new, cache in zip((keys, values), caches, strict=True):
        flat = cache.view(20, 2, 8)
        assert torch.equal(flat[[13, 2, 19]], new)
        assert flat[[slot for slot in range(20) if slot not in (13, 2, 19)]].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_norms", [False, True], ids=["plain", "norms"])
def test_qk_rope_kv_is_norm_rope_and_store_to_the_last_bit(with_norms, dtype):
    packed = random(5, 8, 8, dtype=dtype)
    heads, values = packed[:, :6], packed[:, 6:]
    norms = HeadNorms(random(8, seed=2, dtype=dtype), random(8, seed=3, dtype=dtype), 1e-6)
    positions, slots = torch.tensor([0, 1, 7, 7, 599]), torch.tensor([13, 2, 19, 0, 5])
    caches, wanted = (
        (torch.full((5, 4, 2, 8), NAN, dtype=dtype), torch.full((5, 4, 2, 8), NAN, dtype=dtype)) for _ in range(2)
    )

    queries = qk_rope_kv(packed, positions, table_of(8), caches, slots, norms if with_norms else None)

    if with_norms:
        parts = zip(heads.split((4, 2), dim=1), (norms.query, norms.key), strict=True)
        heads = torch.cat([rms_norm(part.flatten(0, 1), weight, 1e-6).view_as(part) for part, weight in parts], 1)
    turned = rope(heads, positions, table_of(8))
    store_kv(turned[:, 4:], values, *wanted, slots)
    assert torch.equal(queries, turned[:, :4])
    assert all(torch.equal(*pair) for pair in zip(_zeroed(caches), _zeroed(wanted), strict=True))


def _zeroed(caches: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    return [cache.nan_to_num(nan=99.0) for cache in caches]


def test_qk_rope_kv_stores_nothing_for_the_rows_that_fill_up_a_step():
    heads = random(3, 4, 8)
    caches = torch.full((2, 4, 1, 8), NAN), torch.full((2, 4, 1, 8), NAN)

    queries = qk_rope_kv(heads, torch.tensor([4, 0, 0]), table_of(8), caches, torch.tensor([6, -1, -1]))

    assert queries.isfinite().all()
    assert torch.equal(caches[1].view(8, 8)[6], heads[0, 3])
    assert all(cache.view(8, 8)[[slot for slot in range(8) if slot != 6]].isnan().all() for cache in caches)


def adapters(*sizes: int, dtype: torch.dtype) -> list[LoraSlice]:
    """Of two slots, for inputs of 12; each slice of another width behind the one before."""
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    return [
        LoraSlice(random(2, 8, 12, seed=start, dtype=dtype), random(2, 8, size, seed=size, dtype=dtype), (8, 8), start)
        for size, start in zip(sizes, starts, strict=True)
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_adapters_of_heads_are_added_before_they_are_turned_to_the_last_bit(dtype):
    x, plan, slices = (
        random(3, 12, dtype=dtype),
        plan_sgmv([1, -1, 0], torch.device("cpu")),
        adapters(32, 16, 16, dtype=dtype),
    )
    y, positions, slots = random(3, 64, seed=1, dtype=dtype), torch.tensor([4, 0, 7]), torch.tensor([6, 1, 3])
    norms = HeadNorms(random(8, seed=2, dtype=dtype), random(8, seed=3, dtype=dtype), 1e-6)
    caches, wanted = ((torch.zeros(2, 4, 2, 8, dtype=dtype), torch.zeros(2, 4, 2, 8, dtype=dtype)) for _ in range(2))
    other = y.clone()

    out = qk_rope_kv(y.unflatten(1, (8, 8)), positions, table_of(8), caches, slots, norms, shrink(x, slices, plan))

    sgmv(other, x, slices, plan)
    assert torch.equal(out, qk_rope_kv(other.unflatten(1, (8, 8)), positions, table_of(8), wanted, slots, norms))
    assert all(torch.equal(*pair) for pair in zip(caches, wanted, strict=True))
