"""The comparison of an engine in bf16 with its reference lets noise pass, and no fault."""

import pytest
import torch
from torch import Tensor

from ops.bench.agreement import agreement, mean_differences, stacked

STEPS, ROWS, VOCABULARY, BEST = 12, 8, 4000, 20


def reference() -> Tensor:
    return torch.randn(STEPS, ROWS, VOCABULARY, generator=torch.Generator().manual_seed(3)).log_softmax(-1)


def told(logprobs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What an engine with these log-probabilities says: tokens, and its best ones."""
    best = logprobs.topk(BEST, dim=-1)
    return logprobs.argmax(-1), best.indices, best.values


def compared(logprobs: Tensor, expected: Tensor):
    drawn, ids, found = told(logprobs)
    return agreement(drawn, mean_differences(ids, found, expected), expected)


def noisy(expected: Tensor, size: float) -> Tensor:
    noise = torch.randn(expected.shape, generator=torch.Generator().manual_seed(4)) * size
    return (expected + noise).log_softmax(-1)


def test_the_noise_of_bf16_passes_though_near_ties_of_random_weights_fall_otherwise():
    found = compared(noisy(reference(), 0.05), reference())

    assert found.raw_argmax < 0.95
    assert found.check()["argmax"] >= 0.95
    assert 0 < found.num_left_out < found.num_positions / 2


def test_one_row_in_eight_with_a_fault_is_seen():
    """As a wrong slot or block is: that row's logits are another model's."""
    faulty = noisy(reference(), 0.02)
    faulty[:, 5] = faulty[:, 5].roll(1, dims=-1)

    with pytest.raises(AssertionError, match="mean difference"):
        compared(faulty, reference()).check()


def test_tokens_that_are_not_the_best_of_their_own_logits_are_seen():
    """As a sampler that takes its neighbour's row is: the logits are right."""
    expected = reference()
    drawn, ids, found = told(noisy(expected, 0.02))
    drawn[:, 0] = drawn[:, 1]

    with pytest.raises(AssertionError, match="argmax"):
        agreement(drawn, mean_differences(ids, found, expected), expected).check()


def test_an_engine_that_is_all_noise_does_not_pass_by_leaving_everything_out():
    with pytest.raises(AssertionError, match=r"told apart|argmax"):
        compared(noisy(reference(), 0.3), reference()).check()


def test_rows_of_steps_become_steps_of_rows():
    rows = [[torch.tensor([row, step]) for step in range(3)] for row in range(2)]

    assert stacked(rows).shape == (3, 2, 2)
    assert stacked(rows)[2, 1].tolist() == [1, 2]
