"""A GPU's memory is shared out before it is taken."""

import pytest

from engine.memory_account import MemoryAccount

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
