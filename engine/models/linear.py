"""The decoder's linears: a base weight of one or several fused modules, and the adapters on top of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from engine.models.lora_slots import LoraSlots
from kernels.linear import LinearWeight, linear, linear_parts, parts_of
from kernels.quantised_linear import QuantisedWeight, quantised_linear
from kernels.sgmv import LoraSlice, Low, SgmvPlan, expand, shrink


@dataclass(frozen=True)
class LoraStep:
    """What a layer is told of a step's rows. Their adapters: the slots and which rows use which; plan None = no row has
    one. ``most_ranks``: the step is captured, for any adapters up to that rank, those on experts only if it
    ``has_experts``. ``num_tokens``: as of a Batch."""

    slots: LoraSlots
    plan: SgmvPlan | None
    most_ranks: int = 0
    num_tokens: Tensor | None = None
    has_experts: bool = False

    def slices(self, layer: int, modules: tuple[str, ...]) -> list[LoraSlice]:
        if self.plan is None:
            return []
        if self.most_ranks:
            return self.slots.captured_slices(layer, modules, self.most_ranks)
        return self.slots.slices(layer, modules)

    def expert_slices(self, layer: int, modules: tuple[str, ...]) -> list[LoraSlice]:
        """As ``slices``, of modules that each expert has."""
        if self.plan is None:
            return []
        if not self.slots.is_static:
            return self.slots.slices(layer, modules)
        if self.has_experts or (not self.most_ranks and self.slots.have_experts(self.plan.rows_of_slot)):
            return self.slots.captured_slices(layer, modules, self.slots.experts.max_lora_rank)
        return []


class Linear:
    """One or several modules with the same input, fused into one product, and their adapters. With ``scales`` their
    weights are of 8 bits; adapters see the input as it is in either case."""

    def __init__(
        self,
        layer: int,
        modules: tuple[str, ...],
        weights: list[Tensor],
        biases: list[Tensor],
        scales: Sequence[Tensor] = (),
    ) -> None:
        self.layer = layer
        self.modules = modules
        bias = torch.cat(biases) if biases else None
        self.weight: LinearWeight | QuantisedWeight
        self._multiply: Callable[[Tensor], Tensor]
        if scales:
            self.weight = QuantisedWeight(torch.cat(weights), torch.cat(list(scales)), bias)
            self._multiply = partial(quantised_linear, weight=self.weight)
        else:
            self.weight = LinearWeight(torch.cat(weights), bias)
            self._multiply = partial(linear, weight=self.weight)
        self.num_calls = 0

    def __call__(self, x: Tensor, lora: LoraStep) -> Tensor:
        """x [T, in] → [T, out of all modules]."""
        y, low = self.apart(x, lora)
        if low is not None:
            expand(y, low)
        return y

    def onto(self, residual: Tensor, x: Tensor, lora: LoraStep) -> Tensor:
        """What ``residual`` [T, out] lacks then: [T, out], or, where that is faster, parts [P, T, out] for its norm to
        add up; adapters have then added theirs to ``residual`` itself."""
        if not isinstance(self.weight, LinearWeight) or (num_parts := parts_of(x, self.weight)) == 1:
            return self(x, lora)
        self.num_calls += 1
        low = self._low(x, lora)
        if low is not None:
            expand(residual, low)
        return linear_parts(x, self.weight, num_parts)

    def apart(self, x: Tensor, lora: LoraStep) -> tuple[Tensor, Low | None]:
        """The base product [T, out], and what the adapters add to it, for who adds that on his way."""
        self.num_calls += 1
        y = self._multiply(x)
        return y, self._low(x, lora)

    def _low(self, x: Tensor, lora: LoraStep) -> Low | None:
        slices = lora.slices(self.layer, self.modules)
        return shrink(x, slices, lora.plan) if lora.plan is not None and slices else None
