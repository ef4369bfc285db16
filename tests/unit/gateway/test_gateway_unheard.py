"""What a store that was away has not heard: told once, in order, and the oldest forgotten when it is too much."""

import asyncio

import pytest

from gateway.limits.unheard import Unheard
from tenants.errors import StoreUnavailable


class Store:
    """Hears numbers; while ``line`` is closed nothing comes through."""

    def __init__(self) -> None:
        self.heard: list[int] = []
        self.asked = asyncio.Event()
        self.line = asyncio.Event()
        self.fails = False

    def settlement(self, number: int):
        async def tell() -> None:
            self.asked.set()
            await self.line.wait()
            if self.fails:
                raise StoreUnavailable("gone again")
            self.heard.append(number)

        return tell


@pytest.fixture(autouse=True)
def room_for_three(monkeypatch) -> None:
    monkeypatch.setattr("gateway.limits.unheard.MAX_UNHEARD", 3)


async def telling(unheard: Unheard, store: Store) -> asyncio.Task:
    """With the first one on its way."""
    task = asyncio.create_task(unheard.tell())
    await store.asked.wait()
    return task


def test_what_is_put_while_one_is_being_told_pushes_out_the_oldest_that_waits_and_no_other():
    async def main() -> None:
        store, unheard = Store(), Unheard()
        for number in range(3):
            unheard.put(store.settlement(number))
        task = await telling(unheard, store)
        for number in (3, 4):
            unheard.put(store.settlement(number))
        store.line.set()
        await task
        assert store.heard == [0, 2, 3, 4]
        assert unheard.num_forgotten == 1

    asyncio.run(main())


def test_one_that_was_not_heard_is_told_first_the_next_time():
    async def main() -> None:
        store, unheard = Store(), Unheard()
        for number in range(2):
            unheard.put(store.settlement(number))
        store.line.set()
        store.fails = True
        with pytest.raises(StoreUnavailable):
            await unheard.tell()
        store.fails = False
        await unheard.tell()
        assert store.heard == [0, 1]
        assert unheard.num_forgotten == 0

    asyncio.run(main())


def test_one_that_was_not_heard_is_forgotten_when_three_younger_ones_wait():
    async def main() -> None:
        store, unheard = Store(), Unheard()
        unheard.put(store.settlement(0))
        task = await telling(unheard, store)
        for number in (1, 2, 3):
            unheard.put(store.settlement(number))
        store.fails = True
        store.line.set()
        with pytest.raises(StoreUnavailable):
            await task
        store.fails = False
        await unheard.tell()
        assert store.heard == [1, 2, 3]
        assert (len(unheard), unheard.num_forgotten) == (0, 1)

    asyncio.run(main())
