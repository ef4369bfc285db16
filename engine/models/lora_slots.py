"""Device memory for adapters, and the way into it."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.errors import InvalidAdapter
from engine.memory import lazy_zeros
from engine.models.config import EXPERT, ModelConfig, expert_sizes, module_sizes
from engine.weights.adapter import AdapterWeights, LoraPair
from kernels.sgmv import RANK_MULTIPLE, LoraSlice

Place = tuple[int, str]  # layer and module; that of one expert: experts.3.gate_proj, that of all: experts.gate_proj
Ranks = tuple[tuple[Place, int], ...]
_MAX_VIEWS = 256  # lists of views that are kept
_ALIGNED = 8  # elements: vectors of 16 bytes


@dataclass(frozen=True)
class PackedAdapter:
    """An adapter as one pinned buffer, in the order of ``ranks``: A [r, in] and B [r, out] of each place, the scale in
    B, in the dtype of the slots."""

    ranks: Ranks
    flat: Tensor

    @property
    def num_bytes(self) -> int:
        return self.flat.nbytes


class LoraSlots:
    """Device memory for adapters: ``num_slots`` of them, each up to ``max_lora_rank``.

    Per layer and module A [S, R, in] and B [S, R, out] (rank-major: a slot of rank 4 touches 4 rows of memory),
    the scale folded into B. A free slot and the ranks past a slot's own are all zero. A module's memory is allocated
    when the first adapter with that module arrives; ``is_static`` (by default on a GPU, where graphs remember
    addresses): all of it at once, with a table of the true ranks beside it, in which one more slot, number
    ``num_slots``, stays empty.

    A module of E experts stands there as if each slot were E of them: A [S · E, R, in], expert e of slot s in
    number s · E + e. Static slots have none.
    """

    def __init__(
        self, config: ModelConfig, num_slots: int, max_lora_rank: int, like: Tensor, is_static: bool | None = None
    ) -> None:
        self.num_slots = num_slots
        self.max_lora_rank = max_lora_rank
        self.is_static = like.device.type == "cuda" if is_static is None else is_static
        self._plain_sizes = module_sizes(config)
        self._sizes = self._plain_sizes | expert_sizes(config)
        self._num_layers = config.num_layers
        self._num_experts = config.moe.num_experts if config.moe else 0
        self._expert_layers = config.moe.layers if config.moe else ()
        self._like = like  # dtype and device
        self._pairs: dict[Place, tuple[Tensor, Tensor]] = {}
        self._lora_ranks: dict[Place, list[int]] = {}
        self._slices: dict[tuple[int, tuple[str, ...]], list[LoraSlice]] = {}
        self._slot_ranks = [0] * num_slots  # the largest of each
        self._slot_bytes = [0] * num_slots
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
        return pack(weights, self._like)

    def load_slot(self, slot: int, weights: AdapterWeights | PackedAdapter) -> None:
        """Copies an adapter into ``slot``, which is cleared before. Raises InvalidAdapter for a pair that fits nowhere;
        the slot is empty then."""
        self.clear_slot(slot)
        if isinstance(weights, PackedAdapter):
            self._load_packed(slot, weights)
            return
        self._check_all(weights)
        for place, pair in weights.pairs.items():
            self._load_pair(slot, place, pair)
        self._set_ranks(slot, {place: pair.a.shape[0] for place, pair in weights.pairs.items()})

    def clear_slot(self, slot: int) -> None:
        """Zeroes everything of ``slot``."""
        assert 0 <= slot < self.num_slots, slot
        if self._slot_ranks[slot]:
            held = tuple(self._held(slot))
            torch._foreach_zero_(self._views(slot, held))  # pyright: ignore[reportPrivateImportUsage]
            self._set_ranks(slot, dict.fromkeys(dict(held), 0))

    def rehearse(self) -> None:
        """Takes the way of an adapter once, so that the first one meets nothing that is still to be loaded."""
        module, (num_in, num_out) = next(iter(self._plain_sizes.items()))
        pair = LoraPair(torch.zeros(1, num_in), torch.zeros(num_out, 1), 1.0)
        self.load_slot(0, self.prepare(AdapterWeights({(0, module): pair}, 0)))
        self.clear_slot(0)

    def lora_rank(self, slot: int) -> int:
        """The largest of the slot's ranks."""
        return self._slot_ranks[slot]

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
                ranks = (most_ranks,) * (self.num_slots + 1)
                found.append(LoraSlice(*self._pairs[place], ranks, start, self._table_row(place)))
            start += self._sizes[module][1] if module in self._sizes else 0
        return found

    def _reserve(self) -> None:
        places = [(layer, module) for layer in range(self._num_layers) for module in self._plain_sizes]
        self._rows = {place: row for row, place in enumerate(places)}
        self._table = torch.zeros(len(places), self.num_slots + 1, dtype=torch.int32, device=self._like.device)
        for place in places:
            self._pair(place)
        sizes = sum(sum(size) for size in self._plain_sizes.values())
        most = self._num_layers * sizes * self.max_lora_rank + 2 * _ALIGNED * len(places)
        self._transfer = Transfer(most, self._like)

    def _table_row(self, place: Place) -> Tensor | None:
        return self._table[self._rows[place]] if self.is_static else None

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
        name, member = _split(module)
        layers = self._expert_layers if name.startswith(EXPERT) else range(self._num_layers)
        held = self._plain_sizes if self.is_static else self._sizes
        if layer not in layers or name not in held or member >= self._num_members(name):
            raise InvalidAdapter(f"the model has no {module} in layer {layer}")
        num_in, num_out = self._sizes[name]
        lora_rank = pair.a.shape[0]
        if pair.a.shape != (lora_rank, num_in) or pair.b.shape != (num_out, lora_rank):
            shapes = f"A {tuple(pair.a.shape)} and B {tuple(pair.b.shape)}"
            raise InvalidAdapter(f"layer {layer} {module}: {shapes} do not fit")
        if not 0 < lora_rank <= self.max_lora_rank:
            raise InvalidAdapter(f"layer {layer} {module}: rank {lora_rank}, allowed are 1 to {self.max_lora_rank}")

    def _load_pair(self, slot: int, place: Place, pair: LoraPair) -> None:
        whole, number = self._number(slot, place)
        a, b = self._pair(whole)
        lora_rank = pair.a.shape[0]
        a[number, :lora_rank].copy_(pair.a)
        b[number, :lora_rank].copy_((pair.b.float() * pair.scale).T)

    def _num_members(self, module: str) -> int:
        """How many of it a slot has."""
        return self._num_experts if module.startswith(EXPERT) else 1

    def _number(self, slot: int, place: Place) -> tuple[Place, int]:
        """Where memory has a module of a slot, or of one of its experts."""
        name, member = _split(place[1])
        return (place[0], name), slot * self._num_members(name) + member

    def _held(self, slot: int) -> Iterator[tuple[Place, int]]:
        """What the slot has, and its rank there."""
        for (layer, name), ranks in self._lora_ranks.items():
            members = self._num_members(name)
            for member, lora_rank in enumerate(ranks[slot * members : (slot + 1) * members]):
                if lora_rank:
                    yield (layer, _of_member(name, member)), lora_rank

    def _load_packed(self, slot: int, packed: PackedAdapter) -> None:
        assert self._transfer is not None, "packed for other slots"
        self._transfer.place(packed, self._views(slot, packed.ranks))
        self._set_ranks(slot, dict(packed.ranks))

    def _set_ranks(self, slot: int, lora_ranks: Mapping[Place, int]) -> None:
        for place, lora_rank in lora_ranks.items():
            whole, number = self._number(slot, place)
            self._lora_ranks[whole][number] = lora_rank
        self._slot_ranks[slot] = max(lora_ranks.values(), default=0)
        self._slot_bytes[slot] = self._like.itemsize * sum(
            lora_rank * sum(self._sizes[_split(place[1])[0]]) for place, lora_rank in lora_ranks.items()
        )
        self._slices.clear()
        if self.is_static:
            column = torch.tensor([self._lora_ranks[place][slot] for place in self._rows], dtype=torch.int32)
            self._table[:, slot].copy_(on_its_way(column, self._table.device))

    def _views(self, slot: int, lora_ranks: Ranks) -> list[Tensor]:
        """A and B of each place in the slot, as far as these ranks reach; remembered, for making them takes longer than
        moving an adapter."""
        found = self._kept_views.get((slot, lora_ranks))
        if found is None:
            if len(self._kept_views) >= _MAX_VIEWS:
                self._kept_views.clear()
            places = [(*self._number(slot, place), lora_rank) for place, lora_rank in lora_ranks]
            found = [tensor[number, :rank] for whole, number, rank in places for tensor in self._pairs[whole]]
            self._kept_views[slot, lora_ranks] = found
        return found

    def _pair(self, place: Place) -> tuple[Tensor, Tensor]:
        if place not in self._pairs:
            num_ranks = -(-self.max_lora_rank // RANK_MULTIPLE) * RANK_MULTIPLE
            number = self.num_slots * self._num_members(place[1])
            a, b = (lazy_zeros((number, num_ranks, size), self._like) for size in self._sizes[place[1]])
            self._pairs[place] = a, b
            self._lora_ranks[place] = [0] * number
        return self._pairs[place]


class Transfer:
    """The way of a packed adapter to a GPU: one copy on a stream of its own into a buffer, beside the steps, and from
    there to its places between two steps. Nothing waits on the host."""

    def __init__(self, max_elements: int, like: Tensor) -> None:
        self._buffer = torch.empty(max_elements, dtype=like.dtype, device=like.device)
        self._is_cuda = like.device.type == "cuda"
        self._parts: tuple[Ranks, list[Tensor]] = ((), [])  # of the last adapter's kind
        if self._is_cuda:
            self._stream = torch.cuda.Stream(like.device)
            self._arrived, self._placed = torch.cuda.Event(), torch.cuda.Event()

    def place(self, packed: PackedAdapter, targets: list[Tensor]) -> None:
        """The packed tensors into ``targets``, which have their order."""
        arrived = self._buffer[: len(packed.flat)]
        if self._is_cuda:
            current = torch.cuda.current_stream()
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(self._placed)
                arrived.copy_(packed.flat, non_blocking=True)
                self._arrived.record()
            current.wait_event(self._arrived)
        else:
            arrived.copy_(packed.flat)
        if self._parts[0] != packed.ranks:
            self._parts = packed.ranks, _unpacked(arrived, [target.shape for target in targets])
        torch._foreach_copy_(targets, self._parts[1])  # pyright: ignore[reportPrivateImportUsage]
        if self._is_cuda:
            self._placed.record()


def _split(module: str) -> tuple[str, int]:
    """experts.3.gate_proj → experts.gate_proj, 3; another module and 0; "" for what only looks like an expert's."""
    if not module.startswith(EXPERT):
        return module, 0
    member, _, name = module.removeprefix(EXPERT).partition(".")
    return (EXPERT + name, int(member)) if member.isdecimal() else ("", 0)


def _of_member(name: str, member: int) -> str:
    """The way back."""
    return f"{EXPERT}{member}.{name.removeprefix(EXPERT)}" if name.startswith(EXPERT) else name


def pack(weights: AdapterWeights, like: Tensor) -> PackedAdapter:
    """For slots of ``like``'s dtype and device. The weights fit them."""
    order = sorted(weights.pairs)
    shapes = [shape for place in order for shape in _shapes(weights.pairs[place])]
    size = sum(_room(shape) for shape in shapes)
    flat = torch.empty(size, dtype=like.dtype, pin_memory=like.device.type == "cuda")
    parts = iter(_unpacked(flat, shapes))
    for place in order:
        pair = weights.pairs[place]
        next(parts).copy_(pair.a)
        next(parts).copy_((pair.b.float() * pair.scale).T)
    return PackedAdapter(tuple((place, weights.pairs[place].a.shape[0]) for place in order), flat)


def _shapes(pair: LoraPair) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(pair.a.shape), tuple(pair.b.shape[::-1])


def _room(shape: Sequence[int]) -> int:
    return -(-math.prod(shape) // _ALIGNED) * _ALIGNED


def _unpacked(flat: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """The tensors of these shapes that stand in ``flat`` one behind the other, each at a multiple of 16 bytes."""
    pieces = flat[: sum(map(_room, shapes))].split([_room(shape) for shape in shapes])
    return [piece[: math.prod(shape)].view(*shape) for piece, shape in zip(pieces, shapes, strict=True)]


def on_its_way(host: Tensor, device: torch.device) -> Tensor:
    """A copy on the device that nobody waits for."""
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
