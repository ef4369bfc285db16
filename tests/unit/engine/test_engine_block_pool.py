"""Blocks: three states, reference counts, order of eviction."""

import random

import pytest

from engine.block_pool import BlockPool


def make_findable(pool: BlockPool, *blocks: int) -> None:
    for block in blocks:
        pool.set_findable(block, True)


def test_free_blocks_are_taken_before_cached_ones():
    pool = BlockPool(3)
    held = pool.allocate(1)
    make_findable(pool, *held)
    pool.release(held)

    taken = pool.allocate(2)

    assert held[0] not in taken
    assert (pool.num_free, pool.num_cached, pool.num_used) == (0, 1, 2)


def test_the_cached_block_that_was_released_longest_ago_is_evicted_first_and_the_cache_is_told():
    pool, evicted = BlockPool(3), []
    pool.on_evict = evicted.append
    first, second, third = (pool.allocate(1) for _ in range(3))
    make_findable(pool, *first, *second, *third)
    for table in (second, first, third):
        pool.release(table)

    assert pool.allocate(2) == [*second, *first]
    assert evicted == [*second, *first]


def test_the_tail_of_a_prefix_is_evicted_before_its_head():
    pool, evicted = BlockPool(3), []
    pool.on_evict = evicted.append
    table = pool.allocate(3)
    make_findable(pool, *table)
    pool.release(table)

    pool.allocate(2)

    assert evicted == [table[2], table[1]]


def test_a_block_that_is_found_again_leaves_the_line_of_eviction():
    pool = BlockPool(2)
    table = pool.allocate(2)
    make_findable(pool, *table)
    pool.release(table)

    pool.retain(table[1])

    assert pool.num_available == 1
    assert pool.allocate(1) == [table[0]]
    assert pool.num_reused == 1


def test_a_shared_block_is_used_until_its_last_holder_gives_it_up():
    pool = BlockPool(1)
    table = pool.allocate(1)
    make_findable(pool, *table)
    pool.retain(table[0])

    pool.release(table)
    assert pool.num_used == 1
    pool.release(table)
    assert (pool.num_used, pool.num_cached) == (0, 1)


def test_releasing_too_often_and_taking_too_much_are_bugs_that_show():
    pool = BlockPool(2)
    table = pool.allocate(1)
    pool.release(table)

    with pytest.raises(AssertionError):
        pool.release(table)
    with pytest.raises(AssertionError):
        pool.allocate(3)
    with pytest.raises(AssertionError):
        pool.retain(table[0])


@pytest.mark.parametrize("seed", range(3))
def test_a_random_walk_keeps_every_block_in_one_state(seed: int):
    pick, pool = random.Random(seed), BlockPool(12)
    tables: list[list[int]] = []
    findable: set[int] = set()
    pool.on_evict = findable.discard
    for _ in range(2_000):
        kind = pick.random()
        if kind < 0.4 and pool.num_available >= 3:
            tables.append(pool.allocate(pick.randint(1, 3)))
        elif kind < 0.6 and tables:
            block = pick.choice(pick.choice(tables))
            pool.set_findable(block, True)
            findable.add(block)
        elif kind < 0.75 and findable:
            block = pick.choice(sorted(findable))
            if pool.num_idle([block]) == 0 or pool.num_available:
                pool.retain(block)
                tables.append([block])
        elif tables:
            pool.release(tables.pop(pick.randrange(len(tables))))
        pool.check_invariants(tables)
