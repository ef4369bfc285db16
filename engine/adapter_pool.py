"""Which adapter sits in which slot, and which host copies are kept. Decides only; the engine moves the weights."""

from collections import OrderedDict
from collections.abc import Container, Iterator
from itertools import chain, filterfalse
from typing import Protocol

from msgspec import Struct

from engine.wire.adapters import Tier

# Moving weights into a slot holds up everybody's tokens: a storm of adapters comes in turns. Both are counted: bytes
# for what the device takes (84 MB to a GPU: 2.1 ms, beside steps of 5), adapters for what the host does, a tensor at a
# time. The first of a step goes whatever its size: one can't be cut.
MAX_LOADS_PER_STEP = 4
MAX_LOAD_BYTES_PER_STEP = 128 << 20


class HostWeights(Protocol):
    """An adapter's weights in host memory; opaque here."""

    @property
    def num_bytes(self) -> int: ...

    @property
    def has_experts(self) -> bool: ...


class SlotLoad(Struct, frozen=True):
    """``weights`` go into ``slot`` before the next step; ``replaces``: another's may still be in it."""

    slot: int
    key: str
    weights: HostWeights
    replaces: bool


class HostTier:
    """Host copies, least recently used out first, bounded in bytes; the newest is kept whatever its size, and so are
    those that can't be had again (``keep``) until they are dropped."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._copies: OrderedDict[str, HostWeights] = OrderedDict()
        self._kept: set[str] = set()

    def __len__(self) -> int:
        return len(self._copies)

    def __contains__(self, key: str) -> bool:
        return key in self._copies

    def put(self, key: str, weights: HostWeights) -> None:
        self.drop(key)
        self._copies[key] = weights
        self.num_bytes += weights.num_bytes
        if self.num_bytes > self.max_bytes:
            self._evict()

    def get(self, key: str) -> HostWeights | None:
        weights = self._copies.get(key)
        if weights is not None:
            self._copies.move_to_end(key)
        return weights

    def size(self, key: str) -> int:
        """Bytes of a copy that is there."""
        return self._copies[key].num_bytes

    def has_experts(self, key: str) -> bool:
        """Whether a copy that is there has pairs of single experts."""
        return self._copies[key].has_experts

    def keep(self, key: str) -> None:
        """No eviction takes this copy: nobody could bring it again."""
        if key in self._copies:
            self._kept.add(key)

    def drop(self, key: str) -> None:
        self._kept.discard(key)
        weights = self._copies.pop(key, None)
        if weights is not None:
            self.num_bytes -= weights.num_bytes

    def __iter__(self) -> Iterator[str]:
        return iter(self._copies)

    def check_invariants(self) -> None:
        assert self.num_bytes == sum(weights.num_bytes for weights in self._copies.values())
        assert self._kept <= self._copies.keys()
        assert self.num_bytes <= self.max_bytes or len(self._copies) - len(self._kept) <= 1

    def _evict(self) -> None:
        for key in [key for key in self._copies if key not in self._kept][:-1]:
            self.drop(key)
            if self.num_bytes <= self.max_bytes:
                return


class _Slot:
    __slots__ = ("doomed", "generation", "key", "pins")

    def __init__(self) -> None:
        self.key = ""  # '' = zeroed, or about to be
        self.generation = 0  # grows whenever the content changes
        self.pins = 0  # running sequences that use it
        self.doomed = False  # to be cleared with the last pin


class AdapterPool:
    """The slot table. A slot is *free* (nobody's), *pinned* (running sequences use it) or *idle* (kept for reuse,
    least recently used out first). ``take_loads`` names what the engine has to do before the next step runs; until
    then a newly acquired slot's content isn't there. ``take_clear`` names a freed slot that still has its content.

    Adapters with experts go into the first ``num_expert_slots`` only (None: into any), others there only when no other
    slot is free or idle. With none at all every adapter is a plain one, and whoever loads it refuses it."""

    def __init__(self, num_slots: int, host: HostTier, num_expert_slots: int | None = None) -> None:
        self.host = host
        self._num_expert_slots = num_slots if num_expert_slots is None else num_expert_slots
        self._slots = [_Slot() for _ in range(num_slots)]
        self._slot_of: dict[str, int] = {}
        self._free = list(range(num_slots - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._loads: list[SlotLoad] = []
        self._clears: OrderedDict[int, None] = OrderedDict()  # freed, not yet zeroed; oldest first
        self._retired: set[str] = set()

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    @property
    def num_resident(self) -> int:
        return len(self._slot_of)

    @property
    def has_clears(self) -> bool:
        return bool(self._clears)

    def is_resident(self, key: str) -> bool:
        """In host memory, or in a slot that isn't about to be cleared: nothing needs to be fetched."""
        index = self._slot_of.get(key)
        return (index is not None and not self._slots[index].doomed) or key in self.host

    def residency(self, keys: list[str] | None = None) -> dict[str, list[Tier]]:
        """Of these keys (None: of all) those that are in a slot or in host memory, with their tiers."""
        found: dict[str, list[Tier]] = {}
        for key in {*self._slot_of, *self.host} if keys is None else keys:
            tiers: list[Tier] = ["device"] if key in self._slot_of else []
            if key in self.host:
                tiers.append("cpu")
            if tiers:
                found[key] = tiers
        return found

    def has_room(self, key: str) -> bool:
        """``acquire`` would find a slot, and the step may still wait for the load."""
        return key in self._slot_of or (self._best(key) is not None and self._may_load(key))

    def acquire(self, key: str) -> tuple[int, int]:
        """Pins a slot that holds (or will hold, before the step runs) ``key``: (slot, generation). The caller has
        asked ``is_resident`` and ``has_room``."""
        index = self._slot_of.get(key)
        if index is None:
            index = self._place(key)
        self._idle.pop(index, None)
        slot = self._slots[index]
        slot.doomed = False  # a key that was forgotten and came back
        slot.pins += 1
        return index, slot.generation

    def release(self, index: int, generation: int) -> None:
        """Gives up one pin."""
        slot = self._slots[index]
        assert slot.generation == generation, f"slot {index} is of generation {slot.generation}, not {generation}"
        assert slot.pins > 0, f"slot {index} is released more often than pinned"
        slot.pins -= 1
        if slot.pins == 0:
            self._rest(index)

    def generation(self, index: int) -> int:
        return self._slots[index].generation

    def forget(self, key: str) -> None:
        """Drops a key from host memory now, and from its slot as soon as no running sequence uses it."""
        self.host.drop(key)
        index = self._slot_of.get(key)
        if index is None:
            return
        self._slots[index].doomed = True
        if self._slots[index].pins == 0:
            del self._idle[index]
            self._clear(index)

    def retire(self, key: str) -> None:
        """Deleted: nobody could bring it again, so it is kept for those who use it, and forgotten with the last."""
        self._retired.add(key)
        self.host.keep(key)

    def drop_retired(self, waiting: Container[str]) -> None:
        """Forgets the retired that no running sequence uses and that are not among those waited for."""
        for key in [key for key in self._retired if key not in waiting and not self._is_pinned(key)]:
            self._retired.discard(key)
            self.forget(key)

    def take_loads(self) -> list[SlotLoad]:
        loads, self._loads = self._loads, []
        return loads

    def take_clear(self) -> int:
        """A slot to be zeroed, -1: none. One at a time, as loads: a tenant may delete all of its adapters at once."""
        return self._clears.popitem(last=False)[0] if self._clears else -1

    def check_invariants(self, pins: dict[int, int]) -> None:
        """``pins``: slot → number of running sequences that use it."""
        for index, slot in enumerate(self._slots):
            assert slot.pins == pins.get(index, 0), f"slot {index}: {slot.pins} pins, {pins.get(index, 0)} users"
            states = (slot.pins > 0, index in self._idle, index in self._free)
            assert sum(states) == 1, f"slot {index}: pinned, idle, free = {states}"
            assert (slot.key == "") == (index in self._free), f"slot {index} holds {slot.key!r}"
            assert not slot.key or self._slot_of[slot.key] == index
            if slot.key in self.host and self._num_expert_slots and self.host.has_experts(slot.key):
                assert self._has_experts_room(index), f"slot {index} has no room for the experts of {slot.key!r}"
        assert len(self._slot_of) == self.num_slots - self.num_free
        self.host.check_invariants()

    def _is_pinned(self, key: str) -> bool:
        index = self._slot_of.get(key)
        return index is not None and self._slots[index].pins > 0

    def _may_load(self, key: str) -> bool:
        """In this step, beside what it loads already."""
        if not self._loads:
            return True
        num_bytes = sum(load.weights.num_bytes for load in self._loads) + self.host.size(key)
        return len(self._loads) < MAX_LOADS_PER_STEP and num_bytes <= MAX_LOAD_BYTES_PER_STEP

    def _place(self, key: str) -> int:
        weights = self.host.get(key)
        assert weights is not None, "an adapter without a host copy can't be loaded"
        index = self._best(key)
        assert index is not None, "no slot has room"
        if index in self._idle:
            del self._idle[index]
        else:
            self._free.remove(index)
        slot = self._slots[index]
        replaces = bool(slot.key) or index in self._clears
        self._clears.pop(index, None)
        if slot.key:
            del self._slot_of[slot.key]
        slot.key, slot.doomed = key, False
        slot.generation += 1
        self._slot_of[key] = index
        self._loads.append(SlotLoad(index, key, weights, replaces))
        return index

    def _best(self, key: str) -> int | None:
        """The slot for a key whose copy is there: a free one, or else that which is idle longest."""
        found = chain(reversed(self._free), self._idle)
        if self._num_expert_slots in {0, self.num_slots}:
            return next(found, None)
        slots = list(found)
        of_experts = next(filter(self._has_experts_room, slots), None)
        if self.host.has_experts(key):
            return of_experts
        return next(filterfalse(self._has_experts_room, slots), of_experts)

    def _has_experts_room(self, index: int) -> bool:
        return index < self._num_expert_slots

    def _rest(self, index: int) -> None:
        if self._slots[index].doomed:
            self._clear(index)
        else:
            self._idle[index] = None

    def _clear(self, index: int) -> None:
        slot = self._slots[index]
        del self._slot_of[slot.key]
        slot.key, slot.doomed = "", False
        slot.generation += 1
        self._free.append(index)
        self._clears[index] = None
