"""The way along what was charged: each entry once, in the order of the commits, whoever commits when."""

import asyncio
import random

from random_ledger import CARDS, post, random_request, rows_of
from sqlmodel import select

from tenants.database import Database
from tenants.ledger import Ledger
from tenants.postings import Place, entries_from
from tenants.tables import LedgerEntry, PostingHead


async def walk(database, place: Place, limit: int = 7) -> tuple[list[str], Place]:
    """The ids of all entries from there on, page by page."""
    ids: list[str] = []
    while True:
        async with database.session() as session:
            entries, place = await entries_from(session, place, limit)
        ids += [entry.entry_id for entry in entries]
        if len(entries) < limit:
            return ids, place


def test_pages_of_any_size_give_the_same_entries_in_the_same_order_each_once(with_database):
    rng = random.Random(1)
    requests = [random_request(rng, number) for number in range(50)]

    async def body(database):
        while requests:
            await post(database, *(requests.pop() for _ in range(min(len(requests), rng.randint(1, 30)))))
        everything, end = await walk(database, Place(), 1000)
        for limit in (1, 2, 7, 50):
            assert await walk(database, Place(), limit) == (everything, end)
        assert sorted(everything) == sorted(entry.entry_id for entry in await rows_of(database, LedgerEntry))
        assert await walk(database, end) == ([], end)

    with_database(body)


def test_a_reader_beside_two_writers_misses_nothing_and_sees_nothing_twice(with_database, database_url):
    rng = random.Random(2)
    halves = [[random_request(rng, 1000 * half + number) for number in range(120)] for half in range(2)]

    async def write(database, requests) -> None:
        for start in range(0, len(requests), 6):
            await post(database, *requests[start : start + 6])

    async def read(database, done: asyncio.Event) -> list[str]:
        seen, place = [], Place()
        while not done.is_set():
            new, place = await walk(database, place)
            seen += new
        return seen + (await walk(database, place))[0]

    async def body(database):
        other, done = Database(database_url), asyncio.Event()
        await other.start()
        try:
            reading = asyncio.create_task(read(database, done))
            await asyncio.gather(write(database, halves[0]), write(other, halves[1]))
            done.set()
            seen = await reading
        finally:
            await other.close()
        assert len(seen) == len(set(seen))
        assert sorted(seen) == sorted(entry.entry_id for entry in await rows_of(database, LedgerEntry))

    with_database(body)


def test_a_commit_that_comes_late_is_read_before_what_was_posted_after_it(with_database, database_url):
    """The second writer waits for the number until the first has committed: it can't be visible before."""
    rng = random.Random(3)
    first, second = (next(each for each in iter_billed(rng, start)) for start in (1, 500))

    async def body(database):
        other = Database(database_url)
        await other.start()
        try:
            async with database.transaction() as session:
                await Ledger().post(session, [first], CARDS)
                waiting = asyncio.create_task(post(other, second))
                seen_early, place = await walk(other, Place())
                assert (seen_early, place) == ([], Place())
                assert not waiting.done()
            await waiting
        finally:
            await other.close()
        ids, _ = await walk(database, Place())
        async with database.session() as session:
            order = [(await session.get(LedgerEntry, each)).request_id for each in ids]
            head = (await session.exec(select(PostingHead))).one()
        assert list(dict.fromkeys(order)) == [first.context.request_id, second.context.request_id]
        assert head.number == 2

    with_database(body)


def iter_billed(rng: random.Random, start: int):
    while True:
        request = random_request(rng, start)
        start += 1
        if request.outcome == 200:
            yield request


def test_a_transaction_that_is_rolled_back_leaves_no_gap(with_database):
    rng = random.Random(4)
    lost, kept = (next(iter_billed(rng, start)) for start in (1, 500))

    async def body(database):
        async with database.transaction() as session:
            await Ledger().post(session, [lost], CARDS)
            await session.rollback()
        await post(database, kept)
        async with database.session() as session:
            entries, place = await entries_from(session, Place(), 100)
        assert {entry.request_id for entry in entries} == {kept.context.request_id}
        assert place == Place(2)

    with_database(body)
