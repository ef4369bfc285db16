"""Adapter slots: pins, generations, replacement; host copies."""

import random

import pytest
from arithmetic_peer import Weights

from engine import adapter_pool
from engine.adapter_pool import AdapterPool, HostTier


def pool_with(num_slots: int, *keys: str) -> AdapterPool:
    pool = AdapterPool(num_slots, HostTier(10_000))
    for key in keys:
        pool.host.put(key, Weights(key))
    return pool


def test_an_adapter_in_use_is_never_replaced():
    pool = pool_with(1, "a", "b")
    slot, generation = pool.acquire("a")
    pool.take_loads()

    assert not pool.has_room("b")
    assert pool.has_room("a")
    pool.release(slot, generation)
    assert pool.has_room("b")


def test_two_sequences_of_one_adapter_share_its_slot_and_load_it_once():
    pool = pool_with(2, "a")

    assert pool.acquire("a") == pool.acquire("a")
    assert [load.key for load in pool.take_loads()] == ["a"]
    assert pool.take_loads() == []


def test_the_slot_that_is_idle_longest_is_replaced_under_a_new_generation():
    pool = pool_with(2, "a", "b", "c")
    held = {key: pool.acquire(key) for key in "ab"}
    pool.take_loads()
    for key in "ba":
        pool.release(*held[key])

    slot, generation = pool.acquire("c")

    (load,) = pool.take_loads()
    assert slot == held["b"][0] == load.slot
    assert generation > held["b"][1]
    assert load.replaces
    with pytest.raises(AssertionError):
        pool.release(*held["b"])


def test_an_idle_adapter_is_used_again_without_a_load():
    pool = pool_with(1, "a")
    held = pool.acquire("a")
    pool.release(*held)
    pool.take_loads()

    assert pool.acquire("a") == held
    assert pool.take_loads() == []


def test_a_forgotten_adapter_leaves_its_slot_with_its_last_user_and_is_not_resident_before():
    pool = pool_with(1, "a")
    first, second = pool.acquire("a"), pool.acquire("a")

    pool.forget("a")
    assert not pool.is_resident("a")
    pool.release(*first)
    assert not pool.has_clears
    pool.release(*second)

    assert (pool.take_clear(), pool.take_clear()) == (0, -1)
    assert (pool.num_free, pool.num_resident) == (1, 0)


def test_an_idle_forgotten_adapter_is_cleared_at_once():
    pool = pool_with(1, "a")
    pool.release(*pool.acquire("a"))

    pool.forget("a")

    assert pool.take_clear() == 0


def test_a_freed_slot_that_is_taken_before_it_was_zeroed_is_zeroed_for_its_load():
    pool = pool_with(1, "a", "b")
    pool.release(*pool.acquire("a"))
    pool.take_loads()
    pool.forget("a")

    pool.acquire("b")

    (load,) = pool.take_loads()
    assert load.replaces
    assert not pool.has_clears


def test_a_forgotten_adapter_that_comes_back_keeps_its_slot():
    pool = pool_with(1, "a")
    held = pool.acquire("a")
    pool.forget("a")
    pool.host.put("a", Weights("a"))

    pool.release(*pool.acquire("a"))
    pool.release(*held)

    assert not pool.has_clears
    assert pool.num_idle == 1


def test_host_copies_are_bounded_in_bytes_least_recently_used_out_first():
    host = HostTier(250)
    for key in "ab":
        host.put(key, Weights(key))
    host.get("a")

    host.put("c", Weights("c"))

    assert ("a" in host, "b" in host, "c" in host) == (True, False, True)
    assert host.num_bytes == 200


def test_a_copy_larger_than_the_tier_is_kept_alone():
    host = HostTier(50)
    for key in "ab":
        host.put(key, Weights(key))

    assert ("a" in host, "b" in host, host.num_bytes) == (False, True, 100)


def test_a_copy_that_nobody_could_bring_again_outlives_every_eviction():
    host = HostTier(200)
    host.put("a", Weights("a"))
    host.keep("a")

    for key in "bcd":
        host.put(key, Weights(key))
        host.check_invariants()
    assert ("a" in host, "d" in host, len(host)) == (True, True, 2)
    host.drop("a")
    host.put("e", Weights("e"))

    assert (list(host), host.num_bytes) == (["d", "e"], 200)


@pytest.mark.parametrize("seed", range(3))
def test_a_random_walk_never_shows_a_user_another_adapter(seed: int):
    pick, pool = random.Random(seed), pool_with(3)
    content: list[str] = ["", "", ""]
    users: list[tuple[str, int, int]] = []
    for _ in range(2_000):
        key, kind = pick.choice("abcdef"), pick.random()
        if kind < 0.5:
            if not pool.is_resident(key):
                pool.host.put(key, Weights(key))
            if pool.has_room(key):
                users.append((key, *pool.acquire(key)))
        elif kind < 0.95 and users:
            _key, slot, generation = users.pop(pick.randrange(len(users)))
            pool.release(slot, generation)
        else:
            pool.forget(key)
        if pick.random() < 0.5 and (slot := pool.take_clear()) >= 0:
            content[slot] = ""
        for load in pool.take_loads():
            assert bool(content[load.slot]) == load.replaces
            content[load.slot] = load.key
        pins: dict[int, int] = {}
        for key, slot, generation in users:
            assert content[slot] == key
            assert pool.generation(slot) == generation
            pins[slot] = pins.get(slot, 0) + 1
        pool.check_invariants(pins)


def test_adapters_with_experts_have_the_first_slots_and_others_leave_them_alone_while_they_can():
    pool = pool_with_experts(3, 1, "ab", "xy")
    slot, generation = pool.acquire("x")
    pool.take_loads()
    pool.release(slot, generation)

    assert slot == 0
    assert {pool.acquire("a")[0], pool.acquire("b")[0]} == {1, 2}
    pool.take_loads()
    assert pool.is_resident("x")
    assert pool.acquire("x") == (slot, generation), "its slot was taken"
    pool.host.put("c", Weights("c"))
    assert not pool.has_room("y")
    assert not pool.has_room("c")
    pool.release(slot, generation)
    assert pool.acquire("c")[0] == 0, "an adapter waits beside an idle slot"


def test_without_slots_for_experts_whoever_loads_refuses_them():
    assert pool_with_experts(2, 0, "", "x").has_room("x")


def pool_with_experts(num_slots: int, num_expert_slots: int, plain: str, with_experts: str) -> AdapterPool:
    pool = AdapterPool(num_slots, HostTier(10_000), num_expert_slots)
    for key in plain + with_experts:
        pool.host.put(key, Weights(key, has_experts=key in with_experts))
    return pool


@pytest.mark.parametrize("seed", range(3))
def test_a_random_walk_never_puts_experts_into_a_slot_without_room(seed: int):
    pick, pool = random.Random(seed), pool_with_experts(5, 2, "abcdef", "xyz")
    users: list[tuple[int, int]] = []
    placed: set[str] = set()
    for _ in range(2_000):
        key = pick.choice("abcdefxyz")
        if pick.random() < 0.5 and pool.has_room(key):
            slot, generation = pool.acquire(key)
            users.append((slot, generation))
            assert slot < 2 or key in "abcdef"
            placed.add(key)
        elif users and pick.random() < 0.9:
            pool.release(*users.pop(pick.randrange(len(users))))
        pool.take_loads()
        pins: dict[int, int] = {}
        for slot, _ in users:
            pins[slot] = pins.get(slot, 0) + 1
        pool.check_invariants(pins)
    assert placed == set("abcdefxyz")


def test_a_step_loads_many_small_adapters_or_one_large_one(monkeypatch):
    monkeypatch.setattr(adapter_pool, "MAX_LOADS_PER_STEP", 3)
    monkeypatch.setattr(adapter_pool, "MAX_LOAD_BYTES_PER_STEP", 350)
    pool = pool_with(9, *"abcd")  # 100 bytes each
    for key in ("large", "larger"):
        pool.host.put(key, Weights(key, num_bytes=400))

    assert num_loaded(pool, ["a", "b", "c", "d"]) == 3
    assert num_loaded(pool, ["large", "d"]) == 1
    assert num_loaded(pool, ["d", "larger"]) == 1
    assert num_loaded(pool, ["larger"]) == 1


def num_loaded(pool: AdapterPool, keys: list[str]) -> int:
    """In one step that could use all of them."""
    for key in keys:
        if pool.has_room(key):
            pool.acquire(key)
    return len(pool.take_loads())
