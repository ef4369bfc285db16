"""Segmented gather matrix-vector product: each row's own LoRA (Chen et al., Punica, arXiv 2310.18547)."""

from collections.abc import Sequence

from torch import Tensor

from kernels.sgmv import reference
from kernels.sgmv.low import LoraSlice, Low, PartialLow, TiledLow
from kernels.sgmv.plan import RANK_MULTIPLE, Segments, SgmvPlan, plan_sgmv
from kernels.timing import timed

__all__ = [
    "RANK_MULTIPLE",
    "LoraSlice",
    "Low",
    "PartialLow",
    "Segments",
    "SgmvPlan",
    "TiledLow",
    "expand",
    "plan_sgmv",
    "sgmv",
    "shrink",
    "shrink_segments",
]


@timed("lora")
def sgmv(y: Tensor, x: Tensor, slices: Sequence[LoraSlice], plan: SgmvPlan) -> None:
    """Adds x[t] · a[s]ᵀ (shrink) · b[s] (expand) to y[t, start : start + out] for each row t and its slot s, in place.

    x [T, in], y [T, columns]. Rows without a slot and slices that a slot lacks stay bit by bit as they are; memory
    of other slots is not read. Both products are fp32, the sum is rounded to y's dtype once. On a CPU a row's
    bits depend on that row and its slot only.
    """
    low = shrink(x, slices, plan)
    if low is not None:
        expand(y, low)


@timed("lora")
def shrink(x: Tensor, slices: Sequence[LoraSlice], plan: SgmvPlan) -> Low | None:
    """x · aᵀ of ``sgmv``, for ``expand`` or ``silu_mul`` to add; None where no row has anything to add. On a
    GPU it had better be the launch just before, so that what adds begins while this runs."""
    assert x.shape[0] == plan.num_rows, (x.shape, plan.num_rows)
    for part in slices:
        assert part.a.shape[:2] == part.b.shape[:2], (part.a.shape, part.b.shape)
        assert part.a.shape[1] % RANK_MULTIPLE == 0, part.a.shape
        assert part.a.shape[2] == x.shape[1], (part.a.shape, x.shape)
    if x.is_cuda:
        from kernels.sgmv import triton_kernel

        return triton_kernel.shrink(x, slices, plan)
    return reference.shrink(x, slices, plan)


@timed("lora")
def shrink_segments(x: Tensor, slices: Sequence[LoraSlice], segments: Segments, lora_rank: int) -> PartialLow:
    """``shrink`` on a GPU of rows that a launch cuts into segments: ``segments.rows`` are rows of x [any, in], and one
    may be there often. No rank in use is above ``lora_rank``; every slice has a ``rank_table``. Whose result it adds to
    other rows gives the low ranks other ``segments`` of the same table."""
    from kernels.sgmv import triton_kernel

    return triton_kernel.shrink_segments(x, slices, segments, lora_rank)


@timed("lora")
def expand(y: Tensor, low: Low) -> None:
    """Adds low · b of ``sgmv`` to y, in place."""
    slices = [part for part, _, _ in low.products] if isinstance(low, TiledLow) else low.slices
    for part in slices:
        assert part.start + part.b.shape[2] <= y.shape[1], (part.start, part.b.shape, y.shape)
    if isinstance(low, PartialLow):
        from kernels.sgmv import triton_kernel

        assert y.shape[0] == len(low.segments.rows), (y.shape, len(low.segments.rows))
        triton_kernel.expand(y, low)
        return
    reference.expand(y, low)
