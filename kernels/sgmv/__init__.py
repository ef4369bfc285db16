"""Segmented gather matrix-vector product: each row's own LoRA (Chen et al., Punica, arXiv 2310.18547)."""

from collections.abc import Sequence

from torch import Tensor

from kernels.sgmv import reference
from kernels.sgmv.low import LoraSlice, Low, PartialLow, TiledLow
from kernels.sgmv.plan import RANK_MULTIPLE, SgmvPlan, plan_sgmv
from kernels.tiles import tiles
from kernels.timing import timed

__all__ = [
    "RANK_MULTIPLE",
    "LoraSlice",
    "Low",
    "PartialLow",
    "SgmvPlan",
    "TiledLow",
    "expand",
    "is_beside",
    "plan_sgmv",
    "sgmv",
    "shrink",
]


@timed("lora")
def sgmv(y: Tensor, x: Tensor, slices: Sequence[LoraSlice], plan: SgmvPlan) -> None:
    """Adds x[t] · a[s]ᵀ (shrink) · b[s] (expand) to y[t, start : start + out] for each row t and its slot s, in place.

    x [T, in], y [T, columns]. Rows without a slot and slices that a slot lacks stay bit by bit as they are; memory
    of other slots is not read. Both products are fp32, the sum is rounded to y's dtype once. On a CPU a row's
    bits depend on that row and its slot only. The same as ``shrink`` and ``expand``, on a GPU closer together.
    """
    _check_input(x, slices, plan)
    _check_output(y, slices, plan.num_rows)
    if x.is_cuda:
        from kernels.sgmv import triton_kernel

        triton_kernel.sgmv(y, x, slices, plan)
        return
    low = reference.shrink(x, slices, plan)
    if low is not None:
        reference.expand(y, low)


@timed("lora")
def shrink(x: Tensor, slices: Sequence[LoraSlice], plan: SgmvPlan) -> Low | None:
    """x · aᵀ of ``sgmv``, for ``expand`` or ``silu_mul`` to add; None where no row has anything to add. It may run
    beside what computes y (kernels/lane.py)."""
    _check_input(x, slices, plan)
    if x.is_cuda:
        from kernels.sgmv import triton_kernel

        return triton_kernel.shrink(x, slices, plan)
    return reference.shrink(x, slices, plan)


@timed("lora")
def expand(y: Tensor, low: Low) -> None:
    """Adds low · b of ``sgmv`` to y, in place."""
    if isinstance(low, PartialLow):
        from kernels.sgmv import triton_kernel

        _check_output(y, low.slices, len(low.segments.rows))
        triton_kernel.expand(y, low)
        return
    reference.expand(y, low)


def is_beside(plan: SgmvPlan) -> bool:
    """Whether shrink pays in a lane of its own, beside the product that it does not need; by the tables."""
    return bool(tiles("sgmv_lane", plan.device, tokens=plan.num_rows)["beside"])


def _check_input(x: Tensor, slices: Sequence[LoraSlice], plan: SgmvPlan) -> None:
    assert x.shape[0] == plan.num_rows, (x.shape, plan.num_rows)
    for part in slices:
        assert part.a.shape[:2] == part.b.shape[:2], (part.a.shape, part.b.shape)
        assert part.a.shape[1] % RANK_MULTIPLE == 0, part.a.shape
        assert part.a.shape[2] == x.shape[1], (part.a.shape, x.shape)


def _check_output(y: Tensor, slices: Sequence[LoraSlice], num_rows: int) -> None:
    assert y.shape[0] == num_rows, (y.shape, num_rows)
    for part in slices:
        assert part.start + part.b.shape[2] <= y.shape[1], (part.start, part.b.shape, y.shape)
