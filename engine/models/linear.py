"""The decoder's linears: a base weight of one or several fused modules, and the adapters on top of it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.errors import InvalidAdapter
from engine.memory import lazy_zeros
from engine.models.config import ModelConfig, module_sizes
from engine.weights.adapter import AdapterWeights, LoraPair
from kernels.linear import LinearWeight, linear
from kernels.sgmv import RANK_MULTIPLE, LoraSlice, SgmvPlan, sgmv


class LoraSlots:
    """Device memory for adapters: ``num_slots`` of them, each up to ``max_lora_rank``.

    Per layer and module A [S, R, in] and B [S, R, out] (rank-major: a slot of rank 4 touches 4 rows of memory),
    the scale folded into B. A module's memory is allocated when the first adapter with that module arrives. A free
    slot and the ranks past a slot's own are all zero.
    """

    def __init__(self, config: ModelConfig, num_slots: int, max_lora_rank: int, like: Tensor) -> None:
        self.num_slots = num_slots
        self.max_lora_rank = max_lora_rank
        self._sizes = module_sizes(config)
        self._num_layers = config.num_layers
        self._like = like  # dtype and device
        self._pairs: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}
        self._lora_ranks: dict[tuple[int, str], list[int]] = {}
        self._slices: dict[tuple[int, tuple[str, ...]], list[LoraSlice]] = {}

    def load_slot(self, slot: int, weights: AdapterWeights) -> None:
        """Copies an adapter into ``slot``, which is cleared before. Raises InvalidAdapter for a pair that fits nowhere;
        the slot is empty then."""
        self.clear_slot(slot)
        for (layer, module), pair in weights.pairs.items():
            self._check(layer, module, pair)
        for (layer, module), pair in weights.pairs.items():
            self._load_pair(slot, layer, module, pair)

    def clear_slot(self, slot: int) -> None:
        """Zeroes everything of ``slot``."""
        assert 0 <= slot < self.num_slots, slot
        for key, lora_ranks in self._lora_ranks.items():
            if lora_ranks[slot]:
                for tensor in self._pairs[key]:
                    tensor[slot, : lora_ranks[slot]].zero_()
                lora_ranks[slot] = 0
        self._slices.clear()

    def slices(self, layer: int, modules: tuple[str, ...]) -> list[LoraSlice]:
        """The modules of one fused linear that any adapter has, with the columns where each begins."""
        found = self._slices.get((layer, modules))
        if found is None:
            found = self._slices[layer, modules] = self._make_slices(layer, modules)
        return found

    def _make_slices(self, layer: int, modules: tuple[str, ...]) -> list[LoraSlice]:
        found, start = [], 0
        for module in modules:
            lora_ranks = self._lora_ranks.get((layer, module), [])
            if any(lora_ranks):
                found.append(LoraSlice(*self._pairs[layer, module], tuple(lora_ranks), start))
            start += self._sizes[module][1]
        return found

    def _check(self, layer: int, module: str, pair: LoraPair) -> None:
        if not 0 <= layer < self._num_layers or module not in self._sizes:
            raise InvalidAdapter(f"the model has no {module} in layer {layer}")
        num_in, num_out = self._sizes[module]
        lora_rank = pair.a.shape[0]
        if pair.a.shape != (lora_rank, num_in) or pair.b.shape != (num_out, lora_rank):
            shapes = f"A {tuple(pair.a.shape)} and B {tuple(pair.b.shape)}"
            raise InvalidAdapter(f"layer {layer} {module}: {shapes} do not fit")
        if not 0 < lora_rank <= self.max_lora_rank:
            raise InvalidAdapter(f"layer {layer} {module}: rank {lora_rank}, allowed are 1 to {self.max_lora_rank}")

    def _load_pair(self, slot: int, layer: int, module: str, pair: LoraPair) -> None:
        a, b = self._pair(layer, module)
        lora_rank = pair.a.shape[0]
        a[slot, :lora_rank].copy_(pair.a)
        b[slot, :lora_rank].copy_((pair.b.float() * pair.scale).T)
        self._lora_ranks[layer, module][slot] = lora_rank

    def _pair(self, layer: int, module: str) -> tuple[Tensor, Tensor]:
        if (layer, module) not in self._pairs:
            num_ranks = -(-self.max_lora_rank // RANK_MULTIPLE) * RANK_MULTIPLE
            a, b = (lazy_zeros((self.num_slots, num_ranks, size), self._like) for size in self._sizes[module])
            self._pairs[layer, module] = a, b
            self._lora_ranks[layer, module] = [0] * self.num_slots
        return self._pairs[layer, module]


@dataclass(frozen=True)
class LoraStep:
    """The adapters of one step: the slots and which rows use which; plan None = no row has one."""

    slots: LoraSlots
    plan: SgmvPlan | None


class Linear:
    """One or several modules with the same input, fused into one product, and their adapters."""

    def __init__(self, layer: int, modules: tuple[str, ...], weights: list[Tensor], biases: list[Tensor]) -> None:
        self.layer = layer
        self.modules = modules
        self.weight = LinearWeight(torch.cat(weights), torch.cat(biases) if biases else None)
        self.num_calls = 0

    def __call__(self, x: Tensor, lora: LoraStep) -> Tensor:
        """x [T, in] → [T, out of all modules]."""
        self.num_calls += 1
        y = linear(x, self.weight)
        if lora.plan is not None:
            slices = lora.slots.slices(self.layer, self.modules)
            if slices:
                sgmv(y, x, slices, lora.plan)
        return y
