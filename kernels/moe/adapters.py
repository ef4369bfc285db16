"""Adapters on experts: each pair of a step by its token's slot and its expert, number slot · E + expert."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from torch import Tensor

from kernels.moe.plan import ExpertPlan
from kernels.sgmv import LoraSlice, Segments, SgmvPlan, expand, plan_sgmv, sgmv, shrink_segments
from kernels.timing import timed


class PairAdapters(Protocol):
    """``slices`` hold all experts of a slot one behind the other, [S · E, R, size]. Both ops are ``sgmv`` of rows in
    the order of the plan: y [T·K, columns] grows in place, by what x gives."""

    def add_of_tokens(self, y: Tensor, x: Tensor, slices: Sequence[LoraSlice]) -> None:
        """x [T, in]: each pair's row is its token's."""
        ...

    def add_of_pairs(self, y: Tensor, x: Tensor, slices: Sequence[LoraSlice]) -> None:
        """x [T·K, in] in the order of the plan."""
        ...


@dataclass(frozen=True, slots=True)
class CutPairs:
    """On a GPU. Both segments are of one table: rows are tokens, or places in the order of the plan."""

    of_tokens: Segments
    of_places: Segments

    def add_of_tokens(self, y: Tensor, x: Tensor, slices: Sequence[LoraSlice]) -> None:
        self._add(y, x, slices, self.of_tokens)

    def add_of_pairs(self, y: Tensor, x: Tensor, slices: Sequence[LoraSlice]) -> None:
        self._add(y, x, slices, self.of_places)

    def _add(self, y: Tensor, x: Tensor, slices: Sequence[LoraSlice], rows: Segments) -> None:
        most = max((max(part.lora_ranks) for part in slices), default=0)
        if most:
            expand(y, replace(shrink_segments(x, slices, rows, most), segments=self.of_places))


@dataclass(frozen=True, slots=True)
class NumberedPairs:
    """On a CPU."""

    tokens: Tensor
    lora: SgmvPlan

    def add_of_tokens(self, y: Tensor, x: Tensor, slices: Sequence[LoraSlice]) -> None:
        sgmv(y, x[self.tokens], slices, self.lora)

    def add_of_pairs(self, y: Tensor, x: Tensor, slices: Sequence[LoraSlice]) -> None:
        sgmv(y, x, slices, self.lora)


@timed("lora")
def adapters_of_pairs(plan: ExpertPlan, lora: SgmvPlan, num_slots: int) -> PairAdapters:
    """``lora``: of the step's T tokens; slots from ``num_slots`` on have no experts. Nothing waits for a GPU."""
    if plan.tiled is not None:
        from kernels.moe import triton_pairs

        return CutPairs(*triton_pairs.cut_pairs(plan, lora.row_slots(), num_slots))
    tokens = plan.pairs // plan.top_k
    own, num_experts = lora.row_slots()[tokens].numpy(), len(plan.counts)
    numbers = own.astype(np.int64) * num_experts + np.arange(num_experts).repeat(plan.counts.numpy())
    has_one = (own >= 0) & (own < num_slots)
    return NumberedPairs(tokens, plan_sgmv(np.where(has_one, numbers, -1).tolist(), lora.device))
