"""Device memory for adapters, and the way into it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.errors import InvalidAdapter
from engine.memory import lazy_zeros
from engine.models.config import EXPERT, ModelConfig, expert_sizes, module_sizes
from engine.models.lora_transfer import (
    PackedAdapter,
    Place,
    Ranks,
    Transfer,
    on_its_way,
    pack,
    ranks_of,
    room,
    split,
)
from engine.weights.adapter import AdapterWeights, LoraPair
from kernels.sgmv import RANK_MULTIPLE, LoraSlice

_MAX_VIEWS = 256  # lists of views that are kept


@dataclass(frozen=True, slots=True)
class ExpertSlots:
    """The first ``number`` slots may hold pairs of experts, each up to ``max_lora_rank``."""

    number: int
    max_lora_rank: int


NO_EXPERTS = ExpertSlots(0, 0)


class LoraSlots:
    """Device memory for adapters: ``num_slots`` of them, each up to ``max_lora_rank``.

    Per layer and module A [S, R, in] and B [S, R, out] (rank-major: a slot of rank 4 touches 4 rows of memory),
    the scale folded into B. A free slot and the ranks past a slot's own are all zero. A module's memory is allocated
    when the first adapter with that module arrives; ``is_static`` (by default on a GPU, where graphs remember
    addresses): all of it at once, with a table of the true ranks beside it, in which one more slot, number
    ``num_slots``, stays empty.

    A module of E experts stands there as if each slot were E of them: A [S · E, R, in], expert e of slot s in
    number s · E + e. Of static slots those of ``experts`` have them, by default none; of others all.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_slots: int,
        max_lora_rank: int,
        like: Tensor,
        is_static: bool | None = None,
        experts: ExpertSlots = NO_EXPERTS,
    ) -> None:
        self.num_slots = num_slots
        self.max_lora_rank = max_lora_rank
        self.is_static = like.device.type == "cuda" if is_static is None else is_static
        self.experts = experts if self.is_static else ExpertSlots(num_slots, max_lora_rank)
        self._config = config
        self._plain_sizes, self._expert_sizes = module_sizes(config), expert_sizes(config)
        self._sizes = self._plain_sizes | self._expert_sizes
        self._num_layers = config.num_layers
        self._num_experts = config.moe.num_experts if config.moe else 0
        self._expert_layers = config.moe.layers if config.moe else ()
        self._like = like  # dtype and device
        self._pairs: dict[Place, tuple[Tensor, Tensor]] = {}
        self._lora_ranks: dict[Place, list[int]] = {}
        self._slices: dict[tuple[int, tuple[str, ...]], list[LoraSlice]] = {}
        self._slot_ranks = [0] * num_slots  # the largest of each, those on experts aside
        self._slot_bytes = [0] * num_slots
        self._has_experts = [False] * num_slots
        self._slot_places: list[Ranks] = [()] * num_slots
        self._kept_views: dict[tuple[int, Ranks], list[Tensor]] = {}
        self._transfer: Transfer | None = None
        if self.is_static and num_slots:
            self._reserve()

    def prepare(self, weights: AdapterWeights) -> AdapterWeights | PackedAdapter:
        """What ``load_slot`` takes fastest, from any thread. Weights that do not fit come back as they are."""
        if self._transfer is None:
            return weights
        try:
            self._check_all(weights)
        except InvalidAdapter:
            return weights
        return pack(weights, self._num_experts, self._like)

    def load_slot(self, slot: int, weights: AdapterWeights | PackedAdapter) -> None:
        """Copies an adapter into ``slot``, which is cleared before. Raises InvalidAdapter for a pair that fits nowhere;
        the slot is empty then."""
        self.clear_slot(slot)
        if not isinstance(weights, PackedAdapter):
            self._check_all(weights)
        assert slot < self.experts.number or not weights.has_experts, f"slot {slot} has no room for experts"
        if isinstance(weights, PackedAdapter):
            self._load_packed(slot, weights)
            return
        for place, pair in weights.pairs.items():
            self._load_pair(slot, place, pair)
        self._set_ranks(slot, ranks_of(weights, self._num_experts))

    def clear_slot(self, slot: int) -> None:
        """Zeroes everything of ``slot``."""
        assert 0 <= slot < self.num_slots, slot
        held = self._slot_places[slot]
        if held:
            torch._foreach_zero_(self._views(slot, held))  # pyright: ignore[reportPrivateImportUsage]
            self._set_ranks(slot, tuple((place, (0,) * len(own)) for place, own in held))

    def rehearse(self) -> None:
        """Takes the way of an adapter once, so that the first one meets nothing that is still to be loaded."""
        module, (num_in, num_out) = next(iter(self._plain_sizes.items()))
        pair = LoraPair(torch.zeros(1, num_in), torch.zeros(num_out, 1), 1.0)
        self.load_slot(0, self.prepare(AdapterWeights({(0, module): pair}, 0)))
        self.clear_slot(0)

    def lora_rank(self, slot: int) -> int:
        """The largest of the slot's ranks, those on experts aside."""
        return self._slot_ranks[slot]

    def have_experts(self, slots: Iterable[int]) -> bool:
        """Whether an adapter in one of them has pairs of experts."""
        most = self.experts.number
        return any(self._has_experts[slot] for slot in slots if slot < most)

    def num_bytes(self, slot: int) -> int:
        """What the adapter in the slot takes."""
        return self._slot_bytes[slot]

    def slices(self, layer: int, modules: tuple[str, ...]) -> list[LoraSlice]:
        """The modules of one fused linear that any adapter has, with the columns where each begins."""
        found = self._slices.get((layer, modules))
        if found is None:
            found = self._slices[layer, modules] = self._make_slices(layer, modules)
        return found

    def captured_slices(self, layer: int, modules: tuple[str, ...], most_ranks: int) -> list[LoraSlice]:
        """All modules of one fused linear, for a launch that serves whatever is in the slots when it is replayed, up to
        ``most_ranks``: the true ranks are read from the table."""
        found, start = [], 0
        for module in modules:
            place = layer, module
            if place in self._pairs:
                ranks = (most_ranks,) * (self.num_slots * self._num_members(module) + 1)
                found.append(LoraSlice(*self._pairs[place], ranks, start, self._table_row(place)))
            start += self._sizes[module][1] if module in self._sizes else 0
        return found

    def _reserve(self) -> None:
        plain = [(layer, module) for layer in range(self._num_layers) for module in self._plain_sizes]
        of_experts = [(layer, module) for layer in self._expert_layers for module in self._expert_sizes]
        if not self.experts.number:
            of_experts = []
        device = self._like.device
        of_members = RankTable(of_experts, self.experts.number, self._num_experts, device)
        self._tables = RankTable(plain, self.num_slots + 1, 1, device), of_members
        for place in plain + of_experts:
            self._pair(place)
        self._transfer = Transfer(transfer_elements(self._config, self.max_lora_rank, self.experts), self._like)

    def _table_row(self, place: Place) -> Tensor | None:
        return self._tables[place[1].startswith(EXPERT)].row(place) if self.is_static else None

    def _make_slices(self, layer: int, modules: tuple[str, ...]) -> list[LoraSlice]:
        found, start = [], 0
        for module in modules:
            lora_ranks = self._lora_ranks.get((layer, module), [])
            if any(lora_ranks):
                place = layer, module
                found.append(LoraSlice(*self._pairs[place], tuple(lora_ranks), start, self._table_row(place)))
            start += self._sizes[module][1]
        return found

    def _check_all(self, weights: AdapterWeights) -> None:
        for (layer, module), pair in weights.pairs.items():
            self._check(layer, module, pair)

    def _check(self, layer: int, module: str, pair: LoraPair) -> None:
        name, member = split(module)
        is_expert = name.startswith(EXPERT)
        layers = self._expert_layers if is_expert else range(self._num_layers)
        if layer not in layers or name not in self._sizes or member >= self._num_members(name):
            raise InvalidAdapter(f"the model has no {module} in layer {layer}")
        if is_expert and not self.experts.number:
            raise InvalidAdapter(f"layer {layer} {module}: no slot has room for experts (--expert-adapter-slots)")
        num_in, num_out = self._sizes[name]
        lora_rank, most = pair.a.shape[0], self.experts.max_lora_rank if is_expert else self.max_lora_rank
        if pair.a.shape != (lora_rank, num_in) or pair.b.shape != (num_out, lora_rank):
            shapes = f"A {tuple(pair.a.shape)} and B {tuple(pair.b.shape)}"
            raise InvalidAdapter(f"layer {layer} {module}: {shapes} do not fit")
        if not 0 < lora_rank <= most:
            raise InvalidAdapter(f"layer {layer} {module}: rank {lora_rank}, allowed are 1 to {most}")

    def _load_pair(self, slot: int, place: Place, pair: LoraPair) -> None:
        name, member = split(place[1])
        whole, number = (place[0], name), slot * self._num_members(name) + member
        a, b = self._pair(whole)
        lora_rank = pair.a.shape[0]
        a[number, :lora_rank].copy_(pair.a)
        b[number, :lora_rank].copy_((pair.b.float() * pair.scale).T)

    def _num_members(self, module: str) -> int:
        """How many of it a slot has."""
        return self._num_experts if module.startswith(EXPERT) else 1

    def _load_packed(self, slot: int, packed: PackedAdapter) -> None:
        assert self._transfer is not None, "packed for other slots"
        self._transfer.place(packed, self._views(slot, packed.ranks))
        self._set_ranks(slot, packed.ranks)

    def _set_ranks(self, slot: int, ranks: Ranks) -> None:
        """What the slot has, or no longer has where they are 0."""
        for (layer, name), own in ranks:
            first = slot * len(own)
            self._lora_ranks[layer, name][first : first + len(own)] = own
        self._slot_places[slot] = held = tuple((place, own) for place, own in ranks if any(own))
        self._slot_ranks[slot] = max((max(own) for (_, name), own in held if not name.startswith(EXPERT)), default=0)
        self._has_experts[slot] = any(name.startswith(EXPERT) for (_, name), _ in held)
        self._slot_bytes[slot] = self._like.itemsize * sum(sum(own) * sum(self._sizes[name]) for (_, name), own in held)
        self._slices.clear()
        if self.is_static:
            self._tell(slot, ranks)

    def _tell(self, slot: int, ranks: Ranks) -> None:
        """The tables that captured steps read."""
        for table in self._tables:
            if any(place in table.rows for place, _ in ranks):
                table.set(slot, self._lora_ranks)

    def _views(self, slot: int, ranks: Ranks) -> list[Tensor]:
        """A and B of each place in the slot, as far as these ranks reach; remembered, for making them takes longer than
        moving an adapter."""
        found = self._kept_views.get((slot, ranks))
        if found is None:
            if len(self._kept_views) >= _MAX_VIEWS:
                self._kept_views.clear()
            found = [
                tensor[slot * len(own) : (slot + 1) * len(own), : max(own)]
                for place, own in ranks
                for tensor in self._pair(place)
            ]
            self._kept_views[slot, ranks] = found
        return found

    def _pair(self, place: Place) -> tuple[Tensor, Tensor]:
        if place not in self._pairs:
            is_expert = place[1].startswith(EXPERT)
            most = self.experts.max_lora_rank if is_expert else self.max_lora_rank
            num_ranks = -(-most // RANK_MULTIPLE) * RANK_MULTIPLE
            number = (self.experts.number if is_expert else self.num_slots) * self._num_members(place[1])
            a, b = (lazy_zeros((number, num_ranks, size), self._like) for size in self._sizes[place[1]])
            self._pairs[place] = a, b
            self._lora_ranks[place] = [0] * number
        return self._pairs[place]


class RankTable:
    """The true ranks of some places' members in static slots, [places, slots · members] int32 on the device."""

    def __init__(self, places: Sequence[Place], num_slots: int, num_members: int, device: torch.device) -> None:
        self.rows = {place: row for row, place in enumerate(places)}
        self._num_members = num_members
        self._table = torch.zeros(len(places), num_slots * num_members, dtype=torch.int32, device=device)

    def row(self, place: Place) -> Tensor:
        return self._table[self.rows[place]]

    def set(self, slot: int, lora_ranks: Mapping[Place, Sequence[int]]) -> None:
        """Those of a slot, of all places."""
        members = slice(slot * self._num_members, (slot + 1) * self._num_members)
        own = torch.tensor([lora_ranks[place][members] for place in self.rows], dtype=torch.int32)
        self._table[:, members].copy_(on_its_way(own, self._table.device))


def transfer_elements(config: ModelConfig, max_lora_rank: int, experts: ExpertSlots) -> int:
    """Of the buffer in which adapters arrive: one without experts whole, one with them in pieces, none of which is
    larger than a module of all experts."""
    sizes = [size for sizes in module_sizes(config).values() for size in sizes]
    whole = config.num_layers * sum(room((max_lora_rank, size)) for size in sizes)
    if not (config.moe and experts.number):
        return whole
    widest = max(size for sizes in expert_sizes(config).values() for size in sizes)
    return max(whole, room((config.moe.num_experts, experts.max_lora_rank, widest)))
