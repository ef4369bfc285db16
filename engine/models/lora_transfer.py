"""An adapter on its way into slots: packed in host memory, and moved to a GPU in pieces of one buffer."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.models.config import EXPERT
from engine.weights.adapter import AdapterWeights, LoraPair

Place = tuple[int, str]  # layer and module; that of one expert: experts.3.gate_proj, that of all: experts.gate_proj
Ranks = tuple[tuple[Place, tuple[int, ...]], ...]  # of whole places: of each expert, or of the one module
_ALIGNED = 8  # elements: vectors of 16 bytes


@dataclass(frozen=True)
class PackedAdapter:
    """An adapter as one pinned buffer, in the order of ``ranks``: A [members, r, in] and B [members, r, out] of each
    place, r the largest of its ranks, zeros past a member's own, the scale in B, in the dtype of the slots."""

    ranks: Ranks
    flat: Tensor

    @property
    def num_bytes(self) -> int:
        return self.flat.nbytes

    @property
    def has_experts(self) -> bool:
        return any(name.startswith(EXPERT) for (_, name), _ in self.ranks)


def pack(weights: AdapterWeights, num_experts: int, like: Tensor) -> PackedAdapter:
    """For slots of ``like``'s dtype and device. The weights fit them."""
    ranks = ranks_of(weights, num_experts)
    shapes = [shape for place, own in ranks for shape in _shapes(weights, place, own)]
    flat = torch.empty(sum(map(room, shapes)), dtype=like.dtype, pin_memory=like.device.type == "cuda")
    parts = iter(_unpacked(flat, shapes))
    for place, own in ranks:
        _fill(next(parts), next(parts), weights, place, own)
    return PackedAdapter(ranks, flat)


def ranks_of(weights: AdapterWeights, num_experts: int) -> Ranks:
    """By whole place, in their order."""
    found: dict[Place, list[int]] = {}
    for (layer, module), pair in weights.pairs.items():
        name, member = split(module)
        own = found.setdefault((layer, name), [0] * (num_experts if name.startswith(EXPERT) else 1))
        own[member] = pair.a.shape[0]
    return tuple((place, tuple(found[place])) for place in sorted(found))


def split(module: str) -> tuple[str, int]:
    """experts.3.gate_proj → experts.gate_proj, 3; another module and 0; "" for what only looks like an expert's."""
    if not module.startswith(EXPERT):
        return module, 0
    member, _, name = module.removeprefix(EXPERT).partition(".")
    return (EXPERT + name, int(member)) if member.isdecimal() else ("", 0)


def _of_member(name: str, member: int) -> str:
    """The way back."""
    return f"{EXPERT}{member}.{name.removeprefix(EXPERT)}" if name.startswith(EXPERT) else name


def _pairs(weights: AdapterWeights, place: Place, own: Sequence[int]) -> Iterator[tuple[int, LoraPair]]:
    """Member and pair."""
    layer, name = place
    for member, lora_rank in enumerate(own):
        if lora_rank:
            yield member, weights.pairs[layer, _of_member(name, member)]


def _shapes(weights: AdapterWeights, place: Place, own: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    _, pair = next(_pairs(weights, place, own))
    return (len(own), max(own), pair.a.shape[1]), (len(own), max(own), pair.b.shape[0])


def _fill(a: Tensor, b: Tensor, weights: AdapterWeights, place: Place, own: Sequence[int]) -> None:
    if min(own) < max(own):
        a.zero_()
        b.zero_()
    for member, pair in _pairs(weights, place, own):
        a[member, : own[member]].copy_(pair.a)
        b[member, : own[member]].copy_((pair.b.float() * pair.scale).T)


def room(shape: Sequence[int]) -> int:
    """Elements that a tensor of this shape takes in a packed adapter."""
    return -(-math.prod(shape) // _ALIGNED) * _ALIGNED


def _unpacked(flat: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """The tensors of these shapes that stand in ``flat`` one behind the other, each at a multiple of 16 bytes."""
    pieces = flat[: sum(map(room, shapes))].split([room(shape) for shape in shapes])
    return [piece[: math.prod(shape)].view(*shape) for piece, shape in zip(pieces, shapes, strict=True)]


@dataclass(frozen=True, slots=True)
class _Piece:
    """What the buffer holds at a time: elements of a packed adapter, and for which of the targets they are."""

    source: slice
    targets: slice
    arrived: list[Tensor]


class Transfer:
    """The way of a packed adapter to a GPU: copies on a stream of its own into a buffer, beside the steps, and from
    there to its places between two steps. Nothing waits on the host. An adapter that is larger than the buffer goes in
    pieces; no target is."""

    def __init__(self, max_elements: int, like: Tensor) -> None:
        self._buffer = torch.empty(max_elements, dtype=like.dtype, device=like.device)
        self._is_cuda = like.device.type == "cuda"
        self._pieces: tuple[Ranks, list[_Piece]] = ((), [])  # of the last adapter's kind
        if self._is_cuda:
            self._stream = torch.cuda.Stream(like.device)
            self._arrived, self._placed = torch.cuda.Event(), torch.cuda.Event()

    def place(self, packed: PackedAdapter, targets: list[Tensor]) -> None:
        """The packed tensors into ``targets``, which have their order."""
        if self._pieces[0] != packed.ranks:
            self._pieces = packed.ranks, list(self._cut([target.shape for target in targets]))
        for piece in self._pieces[1]:
            self._bring(packed.flat[piece.source])
            torch._foreach_copy_(targets[piece.targets], piece.arrived)  # pyright: ignore[reportPrivateImportUsage]
            if self._is_cuda:
                self._placed.record()

    def _bring(self, source: Tensor) -> None:
        arrived = self._buffer[: len(source)]
        if not self._is_cuda:
            arrived.copy_(source)
            return
        current = torch.cuda.current_stream()
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._placed)
            arrived.copy_(source, non_blocking=True)
            self._arrived.record()
        current.wait_event(self._arrived)

    def _cut(self, shapes: Sequence[Sequence[int]]) -> Iterator[_Piece]:
        first, start, size = 0, 0, 0
        for number, shape in enumerate(shapes):
            own = room(shape)
            assert own <= len(self._buffer), (shape, len(self._buffer))
            if size + own > len(self._buffer):
                yield self._piece(slice(first, number), start, shapes)
                first, start, size = number, start + size, 0
            size += own
        yield self._piece(slice(first, len(shapes)), start, shapes)

    def _piece(self, targets: slice, start: int, shapes: Sequence[Sequence[int]]) -> _Piece:
        own = shapes[targets]
        return _Piece(slice(start, start + sum(map(room, own))), targets, _unpacked(self._buffer, own))


def on_its_way(host: Tensor, device: torch.device) -> Tensor:
    """A copy on the device that nobody waits for."""
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
