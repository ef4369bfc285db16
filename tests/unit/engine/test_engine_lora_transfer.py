"""engine/models/lora_transfer: adapters on experts on their way into slots of a GPU, on a CPU."""

import pytest
import torch

from engine.errors import InvalidAdapter
from engine.models.lora_slots import ExpertSlots, LoraSlots
from engine.models.lora_transfer import PackedAdapter
from tests.tiny_moe import EXPERTS, MOE, expert_adapter, moe_adapters
from tests.tiny_steps import adapter_weights

MODEL = MOE["qwen2_moe"]
LIKE = torch.zeros(1)
SOME = {"first": "b", "then": "d", "last": "c"}  # of ranks and modules of all kinds


def static_slots(experts: ExpertSlots | None = None) -> LoraSlots:
    return LoraSlots(MODEL, 3, 16, LIKE, True, experts or ExpertSlots(2, 16))


def held(slots: LoraSlots, number: int) -> dict:
    """What a slot has of A and B, by place, where that is not nothing."""
    found = {}
    for place, pair in slots._pairs.items():
        members = slots._num_members(place[1])
        own = [part[number * members : (number + 1) * members] for part in pair]
        if any(part.any() for part in own):
            found[place] = [part.tolist() for part in own]
    return found


@pytest.mark.parametrize("room", [1, 3])
def test_an_adapter_larger_than_the_buffer_arrives_in_pieces_as_it_would_at_once(room: int):
    adapters = {key: adapter_weights(adapter) for key, adapter in moe_adapters(MODEL).items()}
    plain, slots = LoraSlots(MODEL, 3, 16, LIKE, is_static=False), static_slots()
    transfer = slots._transfer
    assert transfer is not None
    transfer._buffer = transfer._buffer[: EXPERTS * 16 * MODEL.hidden_size * room]

    for key in SOME.values():
        packed = slots.prepare(adapters[key])
        assert isinstance(packed, PackedAdapter)
        assert packed.has_experts
        plain.load_slot(1, adapters[key])
        slots.load_slot(1, packed)

        assert held(slots, 1) == held(plain, 1), key
        assert slots.num_bytes(1) == plain.num_bytes(1)
        assert not held(slots, 0)
        for place, ranks in plain._lora_ranks.items():
            members = plain._num_members(place[1])
            row = slots._table_row(place)
            assert row is not None
            assert row[members : 2 * members].tolist() == ranks[members : 2 * members]
    slots.clear_slot(1)
    assert not held(slots, 1)
    assert not any(slots._table_row(place).any() for place in slots._pairs)
    assert len(transfer._pieces[1]) > 1 or room > 1


def test_where_no_slot_has_room_for_experts_they_are_refused_by_the_options_name():
    weights = adapter_weights(expert_adapter(MODEL, 1, rank=2, parts=("up_proj",)))
    slots = static_slots(ExpertSlots(0, 16))

    assert slots.prepare(weights) is weights
    with pytest.raises(InvalidAdapter, match="--expert-adapter-slots"):
        slots.load_slot(0, weights)


def test_experts_have_a_largest_rank_of_their_own():
    slots = static_slots(ExpertSlots(1, 4))
    slots.load_slot(0, slots.prepare(adapter_weights(expert_adapter(MODEL, 1, rank=4, parts=("up_proj",)))))

    with pytest.raises(InvalidAdapter, match="rank 5, allowed are 1 to 4"):
        slots.load_slot(0, adapter_weights(expert_adapter(MODEL, 1, rank=5, parts=("up_proj",))))
    assert not slots.have_experts([0, 1, 2])
