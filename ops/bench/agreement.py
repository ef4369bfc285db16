"""Whether an engine in bf16 says what its fp32 reference says (design.md §6), as far as noise lets that be told."""

from dataclasses import asdict, dataclass

import torch
from torch import Tensor

MOST_DIFFERENCE = 0.3  # mean |Δ| of log-probabilities
LEAST_ARGMAX = 0.95
NOISE = 3.0  # mean differences: 1.7 standard deviations of what lies between two logits that each are off by so much
LEAST_TOLD_APART = 0.5  # of the positions: an engine that is all noise is not right either


@dataclass(frozen=True, slots=True)
class Agreement:
    """``argmax``: the part that agrees of the positions whose two best reference logits lie further apart than the
    noise of their step; ``raw_argmax`` of all, near ties of random weights among them."""

    mean_difference: float
    argmax: float
    raw_argmax: float
    num_positions: int
    num_left_out: int

    def check(self) -> dict[str, float]:
        """Its figures. Raises AssertionError where the engine is not what its reference is."""
        assert self.mean_difference < MOST_DIFFERENCE, f"the mean difference is over {MOST_DIFFERENCE}: {self}"
        least = self.num_positions * LEAST_TOLD_APART
        assert self.num_positions - self.num_left_out >= least, f"too few positions can be told apart: {self}"
        assert self.argmax >= LEAST_ARGMAX, f"the argmax agrees in less than {LEAST_ARGMAX}: {self}"
        return asdict(self)


def agreement(drawn: Tensor, differences: Tensor, expected: Tensor) -> Agreement:
    """drawn [S, R] token ids of S steps of R rows, differences [S, R]: mean |Δ| of each one's best log-probabilities,
    expected [S, R, V]: the reference's."""
    best = expected.topk(2, dim=-1)
    noise = NOISE * differences.mean(dim=1, keepdim=True)
    counts = best.values[..., 0] - best.values[..., 1] > noise
    same = drawn == best.indices[..., 0]
    return Agreement(
        mean_difference=float(differences.mean()),
        argmax=float(same[counts].float().mean()) if counts.any() else 0.0,
        raw_argmax=float(same.float().mean()),
        num_positions=same.numel(),
        num_left_out=int((~counts).sum()),
    )


def mean_differences(ids: Tensor, found: Tensor, expected: Tensor) -> Tensor:
    """Best tokens ``ids`` [S, R, K] and their log-probabilities ``found`` against expected [S, R, V] → [S, R]."""
    return (found - expected.gather(-1, ids)).abs().mean(-1)


def stacked(rows: list[list[Tensor]]) -> Tensor:
    """What was said row by row, [R][S] tensors, as [S, R, …]."""
    return torch.stack([torch.stack(row) for row in rows], dim=1)
