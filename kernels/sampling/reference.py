"""Plain torch, a row at a time, sorted."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kernels.sampling import Edits, SamplingRows


def edit_logits(logits: Tensor, edits: Edits) -> None:
    kept = edits.rows >= 0
    places = edits.rows[kept], edits.tokens[kept]
    biased = logits[places] + edits.biases[kept]
    repetition = edits.repetitions[kept]
    logits[places] = torch.where(biased > 0, biased / repetition, biased * repetition) - edits.minus[kept]


def highest(logits: Tensor, out: Tensor) -> None:
    known = torch.where(logits.isnan(), -math.inf, logits)
    out.copy_(known.argmax(dim=-1))


def sample(logits: Tensor, rows: SamplingRows) -> Tensor:
    known = torch.where(logits.isnan(), -math.inf, logits)
    columns = (rows.temperatures, rows.top_ks, rows.top_ps, rows.min_ps, rows.numbers)
    settings = zip(*(column.tolist() for column in columns), strict=True)
    return torch.tensor(
        [_token(row, *setting) for row, setting in zip(known, settings, strict=True)], device=logits.device
    )


def _token(row: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, number: float) -> int:
    best = int((row == row.max()).nonzero()[0])
    if temperature <= 0 or not math.isfinite(row[best]):
        return best
    scaled = row / temperature
    order = scaled.sort(descending=True, stable=True).indices
    if top_k > 0:
        order = order[:top_k]
    if min_p > 0:
        order = order[scaled[order] >= scaled[best] + torch.tensor(min_p).log()]
    weights = (scaled[order] - scaled[best]).double().exp()
    if top_p < 1:
        sums = weights.cumsum(0)
        count = int((sums < top_p * sums[-1]).sum()) + 1
        order, weights = order[:count], weights[:count]
    ids = order.sort()
    sums = weights[ids.indices].cumsum(0)
    passed = (sums > number * sums[-1]).nonzero()
    return int(ids.values[passed[0] if len(passed) else -1])
