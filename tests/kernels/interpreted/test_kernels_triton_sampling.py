"""Sampling under Triton's interpreter, against a reference that sorts."""

import pytest
import torch

from kernels import tiles
from kernels.sampling import Edits, SamplingRows, reference
from kernels.sampling import triton_kernel as sampling_kernel
from tests.kernels.interpreted.checks import planted

INF, NAN = float("inf"), float("nan")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    table = {**tiles._table("default"), "sample": [{"block": 256, "num_warps": 4}]}
    table |= {"highest": [{"block": 64, "at_once": 2, "num_warps": 4}]}
    monkeypatch.setattr(tiles, "_table", lambda _: table)


def rows_of(*rows: tuple[float, int, float, float, float]) -> SamplingRows:
    """temperature, top_k, top_p, min_p, number of each."""
    kinds = (torch.float32, torch.int32, torch.float32, torch.float32, torch.float32)
    return SamplingRows(
        *(torch.tensor(column, dtype=kind) for column, kind in zip(zip(*rows, strict=True), kinds, strict=True))
    )


def logits_of(num_rows: int, size: int = 400, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, size, generator=torch.Generator().manual_seed(seed)) * 2


def check(kernel, logits: torch.Tensor, rows: SamplingRows) -> None:
    wide = torch.full((len(logits), logits.shape[1] + 5), NAN)
    wide[:, : logits.shape[1]] = logits
    found = kernel.sample(wide[:, : logits.shape[1]], rows).tolist()
    assert found == reference.sample(logits, rows).tolist()


SETTINGS = {
    "greedy": (0.0, 0, 1.0, 0.0),
    "plain": (1.0, 0, 1.0, 0.0),
    "cold": (0.3, 0, 1.0, 0.0),
    "top-k": (1.5, 20, 1.0, 0.0),
    "top-1": (1.0, 1, 1.0, 0.0),
    "top-p": (1.0, 0, 0.8, 0.0),
    "a narrow top-p": (1.0, 0, 0.01, 0.0),
    "min-p": (1.0, 0, 1.0, 0.05),
    "all": (0.9, 50, 0.9, 0.02),
    "a top-k of all": (1.0, 400, 0.95, 0.0),
}


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_a_row_is_drawn_as_by_sorting(setting):
    numbers = [0.001, 0.2, 0.5, 0.83, 0.999]
    check(sampling_kernel, logits_of(5), rows_of(*((*setting, number) for number in numbers)))


def check_highest(kernel, logits: torch.Tensor) -> None:
    """With NaN behind each row, and a row's answer set apart from its neighbours'."""
    wide = torch.full((len(logits), logits.shape[1] + 5), NAN, dtype=logits.dtype)
    wide[:, : logits.shape[1]] = logits
    found, wanted = torch.full((len(logits),), -7), torch.full((len(logits),), -7)
    kernel.highest(wide[:, : logits.shape[1]], found)
    reference.highest(logits, wanted)
    assert found.tolist() == wanted.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1, 63, 128, 129, 400])
def test_the_highest_is_that_of_the_reference(size, dtype):
    check_highest(sampling_kernel, logits_of(7, size).to(dtype))


def test_the_highest_is_the_lowest_id_of_equal_ones_and_never_nan():
    logits = torch.full((6, 300), -INF)
    logits[1, [70, 200, 299]] = 3.0
    logits[2, 5], logits[2, 6] = NAN, -9.0
    logits[3] = NAN
    logits[4, [17, 255]] = INF
    logits[5, 100], logits[5, 101] = -0.0, 0.0
    check_highest(sampling_kernel, logits)


def test_the_highest_by_the_last_of_equal_ones_is_caught(tmp_path):
    faulty = planted(sampling_kernel, ("tl.where(b_logits > b_best", "tl.where(b_logits >= b_best"), tmp_path)
    with pytest.raises(AssertionError):
        check_highest(faulty, torch.zeros(2, 300))


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_equal_logits_go_by_their_ids(setting):
    logits = logits_of(4).round()
    check(sampling_kernel, logits, rows_of(*((*setting, number) for number in (0.01, 0.41, 0.77, 0.98))))


def test_rows_with_no_number_infinite_and_forbidden_logits():
    logits = logits_of(6, 300)
    logits[0, 50:] = -INF
    logits[1] = -INF
    logits[2, 7] = INF
    logits[3, ::2] = NAN
    logits[4] = NAN
    logits[5, :298] = -INF
    check(sampling_kernel, logits, rows_of(*[(1.0, 60, 0.9, 0.0, 0.6)] * 6))
    check(sampling_kernel, logits, rows_of(*[(0.0, 0, 1.0, 0.0, 0.6)] * 6))


def test_a_row_has_its_token_alone_and_among_others():
    logits = logits_of(5)
    rows = rows_of(*((1.0, 30, 0.9, 0.0, number) for number in (0.1, 0.3, 0.5, 0.7, 0.9)))
    whole = sampling_kernel.sample(logits, rows)
    alone = SamplingRows(*(getattr(rows, name)[3:4] for name in SamplingRows.__slots__))
    assert sampling_kernel.sample(logits[3:4], alone).item() == whole[3]


def edits_of(num: int, num_rows: int, size: int) -> Edits:
    draw = torch.Generator().manual_seed(3)
    places = torch.randperm(num_rows * size, generator=draw)[:num]
    rows = places // size
    rows[::7] = -1
    biases, repetitions, minus = (torch.rand(num, generator=draw) for _ in range(3))
    biases[3] = -INF
    return Edits(rows, places % size, biases - 0.5, repetitions + 0.7, minus)


def test_edits_change_their_logits_and_no_other():
    logits, edits = logits_of(4, 90), edits_of(200, 4, 90)
    expected = logits.clone()
    reference.edit_logits(expected, edits)
    sampling_kernel.edit_logits(logits, edits)
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(logits.isinf(), expected.isinf())


FAULTS = {
    "ties that are not counted": ("num_equal += tl.sum(b_equal, 0)", "num_equal += 0"),
    "a step left out": ("third_step = second_step + (1 <<", "third_step = second_step + 0 * (1 <<"),
    "no top-p": ("if top_p < 1.0:", "if top_p < -1.0:"),
    "no min-p": ("if min_p > 0.0:", "if min_p > 2.0:"),
    "the highest id of the best": (
        "tl.min(tl.where(b_best == best, b_ids, size), 0)",
        "tl.max(tl.where(b_best == best, b_ids, 0), 0)",
    ),
    "a temperature forgotten": ("best = best / temperature", "best = best / 1.0"),
    "a block's sum forgotten": ("total += tl.sum(b_weights, 0)", "total += 0.0"),
}


def check_many_kinds(kernel) -> None:
    rows = rows_of(
        (0.0, 0, 1.0, 0.0, 0.5),
        (2.0, 40, 1.0, 0.0, 0.99),
        (1.0, 0, 0.5, 0.0, 0.999),
        (3.0, 0, 1.0, 0.3, 0.98),
        (0.7, 77, 0.9, 0.0, 0.97),
        (2.0, 0, 1.0, 0.0, 0.6),
    )
    check(kernel, logits_of(6).round(), rows)


def test_the_kernel_into_which_faults_are_planted_passes():
    check_many_kinds(sampling_kernel)


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_caught(fault, tmp_path):
    faulty = planted(sampling_kernel, fault, tmp_path)
    with pytest.raises(AssertionError):
        check_many_kinds(faulty)


def test_an_edit_of_a_missing_row_is_caught(tmp_path):
    faulty = planted(sampling_kernel, ("mask = mask & (i_rows >= 0)", "i_rows = tl.maximum(i_rows, 0)"), tmp_path)
    logits, edits = logits_of(4, 90), edits_of(200, 4, 90)
    expected = logits.clone()
    reference.edit_logits(expected, edits)
    faulty.edit_logits(logits, edits)
    assert not torch.equal(logits.nan_to_num(), expected.nan_to_num())
    assert not torch.allclose(logits, expected, rtol=1e-6, atol=1e-6)
