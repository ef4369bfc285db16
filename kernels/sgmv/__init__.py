"""Segmented gather matrix-vector product: each row's own LoRA (Chen et al., Punica, arXiv 2310.18547)."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kernels.sgmv import reference
from kernels.sgmv.plan import RANK_MULTIPLE, SgmvPlan, plan_sgmv
from kernels.timing import timed

__all__ = ["RANK_MULTIPLE", "LoraSlice", "SgmvPlan", "plan_sgmv", "sgmv"]


@dataclass(frozen=True)
class LoraSlice:
    """One module of a packed projection: its columns begin at ``start`` of the output.

    a [S, R, in] and b [S, R, out] hold a slot's pair in their first ``lora_ranks[slot]`` ranks and zeros in the
    rest; the scale is in b. A rank of 0 says that the slot does not have this module. R is a multiple of
    RANK_MULTIPLE. ``rank_table`` is lora_ranks as int32 [S] on the device, for who keeps one up to date there (a
    captured graph reads it at replay); without it the kernels make their own.
    """

    a: Tensor
    b: Tensor
    lora_ranks: tuple[int, ...]
    start: int = 0
    rank_table: Tensor | None = None


@timed("lora")
def sgmv(y: Tensor, x: Tensor, slices: Sequence[LoraSlice], plan: SgmvPlan) -> None:
    """Adds x[t] · a[s]ᵀ (shrink) · b[s] (expand) to y[t, start : start + out] for each row t and its slot s, in place.

    x [T, in], y [T, columns]. Rows without a slot and slices that a slot lacks stay bit by bit as they are; memory
    of other slots is not read. Both products are fp32, the sum is rounded to y's dtype once. On a CPU a row's
    bits depend on that row and its slot only.
    """
    assert x.shape[0] == y.shape[0] == plan.num_rows, (x.shape, y.shape, plan.num_rows)
    for part in slices:
        assert part.a.shape[:2] == part.b.shape[:2], (part.a.shape, part.b.shape)
        assert part.a.shape[1] % RANK_MULTIPLE == 0, part.a.shape
        assert part.a.shape[2] == x.shape[1], (part.a.shape, x.shape)
        assert part.start + part.b.shape[2] <= y.shape[1], (part.start, part.b.shape, y.shape)
    if x.is_cuda:
        from kernels.sgmv import triton_kernel

        triton_kernel.sgmv(y, x, slices, plan)
        return
    reference.sgmv(y, x, slices, plan)
