"""A GPU's memory is shared out before it is taken."""

from dataclasses import replace

import pytest
import torch
from live_engine import CONFIG
from tiny import tiny_config, tiny_weights
from tiny_moe import MOE

from engine.memory_account import MemoryAccount, adapter_bytes, says_what_to_do, step_bytes
from engine.models.decoder import Decoder
from engine.models.lora_slots import ExpertSlots, LoraSlots
from engine.runner import SCORE_ROWS

GB = 10**9


def whole(kv: int) -> MemoryAccount:
    return MemoryAccount(weights=16 * GB, adapters=10 * GB, step=2 * GB, graphs=GB, kv=kv)


def test_keys_and_values_get_what_is_asked_for_or_all_that_is_left():
    assert whole(90 * GB).with_kv(0, least=1).total == 119 * GB
    assert whole(90 * GB).with_kv(2 * GB, least=1).total == 31 * GB


@pytest.mark.parametrize(
    ("left", "wanted", "said"),
    [
        (90 * GB, 91 * GB, "91.00 GB are asked for"),
        (-3 * GB, 0, "something else has the rest"),
        (5, 0, "something else has the rest"),
        (-3 * GB, 2 * GB, "2.00 GB are asked for"),
    ],
)
def test_a_device_without_room_is_an_error_that_says_who_takes_what(left: int, wanted: int, said: str):
    with pytest.raises(ValueError, match=said) as caught:
        whole(left).with_kv(wanted, least=1 << 20)

    assert "weights 16.00 GB" in str(caught.value)
    assert "--kv-memory" in str(caught.value)


def test_a_gpu_that_is_full_before_the_account_says_what_to_do_too():
    with pytest.raises(ValueError, match=r"Tried to allocate 2\.00 GiB.*--kv-memory") as caught, says_what_to_do():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of …")

    assert "total capacity" not in str(caught.value)


def test_what_slots_take_is_what_the_account_says():
    """With experts, a rank that is no multiple of 8, and the buffer in which adapters arrive."""
    for model, slots in ((tiny_config(), 0), (MOE["qwen2_moe"], 0), (MOE["qwen2_moe"], 2)):
        config = replace(CONFIG, adapter_slots=3, max_lora_rank=12, expert_adapter_slots=slots, max_expert_rank=5)
        like = torch.zeros(1, dtype=torch.bfloat16)
        made = LoraSlots(model, 3, 12, like, True, ExpertSlots(slots, 5))
        held = sum(tensor.nbytes for pair in made._pairs.values() for tensor in pair)
        assert made._transfer is not None

        assert held + made._transfer._buffer.nbytes == adapter_bytes(model, config, torch.bfloat16)


def test_a_prompt_can_be_scored_whatever_number_of_sequences_may_run():
    model = Decoder(tiny_config(), tiny_weights())

    one, as_many, more = (
        step_bytes(model, replace(CONFIG, max_running=num)) for num in (1, SCORE_ROWS, 2 * SCORE_ROWS)
    )

    assert one == as_many < more
