"""Logits → tokens on their device, without a word to the host. A row's result depends on that row alone."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.sampling import reference
from kernels.timing import timed

__all__ = ["Edits", "SamplingRows", "edit_logits", "highest", "sample"]


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """How each of R rows is drawn; all [R] on the logits' device.

    ``temperatures`` fp32, 0 or less = greedy; ``top_ks`` int32, 0 or less = all; ``top_ps`` fp32, 1 = all; ``min_ps``
    fp32, 0 = all. ``numbers`` fp32 in [0, 1): where in its distribution a row is drawn. The caller takes a row's from
    a counter-based generator keyed by the row's seed and position, so that no batch mate has a say.
    """

    temperatures: Tensor
    top_ks: Tensor
    top_ps: Tensor
    min_ps: Tensor
    numbers: Tensor


@dataclass(frozen=True, slots=True)
class Edits:
    """Changes of single logits before a draw: E of them, no (row, token) twice, all [E].

    ``rows`` and ``tokens`` int64 (a row of -1: none), ``biases`` fp32 (-inf forbids the token), ``repetitions`` fp32
    (1 = none; divides a positive logit, multiplies a negative one), ``minus`` fp32 (frequency · count + presence).
    They apply in this order.
    """

    rows: Tensor
    tokens: Tensor
    biases: Tensor
    repetitions: Tensor
    minus: Tensor


@timed("sampling")
def edit_logits(logits: Tensor, edits: Edits) -> None:
    """logits [R, V] fp32, in place."""
    assert logits.dtype == torch.float32, logits.dtype
    if logits.is_cuda:
        from kernels.sampling import triton_kernel

        triton_kernel.edit_logits(logits, edits)
        return
    reference.edit_logits(logits, edits)


@timed("sampling")
def highest(logits: Tensor, out: Tensor | None = None) -> Tensor:
    """logits [R, V] of any float dtype → tokens [R] int64, into ``out`` if given: the lowest id of the highest logit;
    NaN is no logit at all."""
    assert logits.stride(1) == 1, logits.stride()
    found = torch.empty(len(logits), dtype=torch.int64, device=logits.device) if out is None else out
    assert found.shape == logits.shape[:1], (found.shape, logits.shape)
    assert found.is_contiguous(), found.stride()
    if logits.is_cuda:
        from kernels.sampling import triton_kernel

        triton_kernel.highest(logits, found)
    else:
        reference.highest(logits, found)
    return found


@timed("sampling")
def sample(logits: Tensor, rows: SamplingRows) -> Tensor:
    """logits [R, V] fp32 → tokens [R] int64. NaN is the lowest logit of all.

    Greedy rows take the lowest id of the highest logit. Others: logits / temperature; of these the ``top_k`` highest
    (equal ones by id) that are at least ``min_p`` as likely as the best; of these the fewest, best first (equal ones
    by id), whose share of the probability reaches ``top_p``; of these, in the order of their ids, the first at which
    the running sum of weights passes ``number`` · total. A row without a finite best is drawn greedily.
    """
    assert logits.dtype == torch.float32, logits.dtype
    assert logits.stride(1) == 1, logits.stride()
    assert rows.numbers.shape == logits.shape[:1], (rows.numbers.shape, logits.shape)
    if logits.is_cuda:
        from kernels.sampling import triton_kernel

        return triton_kernel.sample(logits, rows)
    return reference.sample(logits, rows)
