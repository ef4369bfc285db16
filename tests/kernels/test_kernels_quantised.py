"""kernels/quantised_linear and kernels/sampling on a CPU."""

import math

import pytest
import torch

from kernels.quantised_linear import QuantisedWeight, quantised_linear
from kernels.sampling import Edits, SamplingRows, edit_logits, sample


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("is_blocked", [False, True], ids=["channels", "blocks"])
def test_each_weight_has_the_scale_of_its_channel_or_block(is_blocked):
    data = torch.ones(200, 300, dtype=torch.int8)
    scales = torch.arange(6.0).view(2, 3) if is_blocked else torch.arange(200.0)

    out = quantised_linear(torch.eye(300)[[0, 150, 299]], QuantisedWeight(data, scales))

    expected = torch.arange(200.0).expand(3, -1)
    if is_blocked:
        expected = torch.tensor([0.0, 1.0, 2.0])[:, None] + 3.0 * (torch.arange(200) >= 128)
    assert torch.equal(out, expected)


def test_rows_are_equal_for_any_number_of_rows():
    weight = QuantisedWeight((random(50, 96) * 30).to(torch.int8), random(50).abs(), random(50, seed=1))
    x = random(40, 96, seed=2)

    assert all(torch.equal(quantised_linear(x[:n], weight), quantised_linear(x, weight)[:n]) for n in (1, 2, 3, 7, 13))


def drawn(logits: list[float], setting: tuple[float, int, float, float], number: float) -> int:
    columns = (*setting, number)
    kinds = (torch.float32, torch.int32, torch.float32, torch.float32, torch.float32)
    rows = SamplingRows(*(torch.tensor([one], dtype=kind) for one, kind in zip(columns, kinds, strict=True)))
    return int(sample(torch.tensor([logits]), rows))


HALVES = [math.log(p) for p in (0.1, 0.4, 0.2, 0.3)]


@pytest.mark.parametrize(
    ("setting", "tokens"),
    [
        ((0.0, 0, 1.0, 0.0), [1, 1, 1, 1]),
        ((1.0, 0, 1.0, 0.0), [0, 1, 2, 3]),
        ((1.0, 2, 1.0, 0.0), [1, 1, 3, 3]),
        ((1.0, 0, 0.5, 0.0), [1, 1, 3, 3]),
        ((1.0, 0, 0.39, 0.0), [1, 1, 1, 1]),
        ((1.0, 0, 1.0, 0.5), [1, 1, 2, 3]),
    ],
    ids=["greedy", "plain", "top-k", "top-p", "a narrow top-p", "min-p"],
)
def test_a_draw_falls_where_its_number_says(setting, tokens):
    assert [drawn(HALVES, setting, number) for number in (0.05, 0.4, 0.65, 0.95)] == tokens


def test_edits_apply_bias_then_repetition_then_minus():
    logits = torch.tensor([[1.0, -1.0, 3.0]])
    numbers = ([0, 0, -1], [0, 1, 2], [1.0, -1.0, 5.0], [2.0, 2.0, 2.0], [0.25, 0.5, 1.0])

    edit_logits(logits, Edits(*(torch.tensor(column) for column in numbers)))

    assert logits.tolist() == [[0.75, -4.5, 3.0]]
