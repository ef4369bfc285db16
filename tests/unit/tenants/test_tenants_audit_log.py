"""The audit log's chain: what breaks it is found, and writers in several processes keep it one."""

import asyncio
import multiprocessing

import pytest

from tenants.audit_log import NO_HASH, SERVER, Actor, AuditLog, Change, Head
from tenants.database import Database
from tests.tampering import tamper

ANNA = Actor("k123456789", "Anna")


def change(number: int) -> Change:
    return Change("tenant.set_limits", f"ten_{number}", {"weight": number}, {"weight": number + 1})


async def write(database: Database, *numbers: int, actor: Actor = ANNA) -> None:
    for number in numbers:
        async with database.transaction() as session:
            await AuditLog(session).append(actor, change(number))


async def breaches(database: Database, *known: Head) -> list[str]:
    async with database.session() as session:
        return await AuditLog(session).verify(known)


async def head(database: Database) -> Head:
    async with database.session() as session:
        return await AuditLog(session).head()


def test_an_empty_log_is_whole(with_database):
    async def body(database):
        assert (await breaches(database), await head(database)) == ([], Head(0, NO_HASH))

    with_database(body)


def test_events_are_numbered_from_one_say_who_did_what_and_form_a_chain(with_database):
    async def body(database):
        await write(database, 1, 2)
        await write(database, 3, actor=SERVER)
        async with database.session() as session:
            first, second, third = await AuditLog(session).page(0, 10)
        assert [event.number for event in (first, second, third)] == [1, 2, 3]
        assert (first.actor, first.actor_key_id, third.actor, third.actor_key_id) == (
            "Anna",
            "k123456789",
            "server",
            "",
        )
        assert (first.before, first.after) == ('{"weight":1}', '{"weight":2}')
        assert [first.prev_hash, second.prev_hash, third.prev_hash] == [NO_HASH, first.hash, second.hash]
        assert await breaches(database) == []
        assert await head(database) == Head(3, third.hash)

    with_database(body)


def test_a_page_begins_behind_a_number(with_database):
    async def body(database):
        await write(database, 1, 2, 3, 4)
        async with database.session() as session:
            assert [event.number for event in await AuditLog(session).page(1, 2)] == [2, 3]

    with_database(body)


@pytest.mark.parametrize(
    ("statements", "says"),
    [
        (["UPDATE audit_event SET after = 'null' WHERE number = 2"], "event 2 was changed"),
        (["UPDATE audit_event SET actor = 'Bob' WHERE number = 2"], "event 2 was changed"),
        (["UPDATE audit_event SET occurred_unix_ns = 5 WHERE number = 1"], "event 1 was changed"),
        (["DELETE FROM audit_event WHERE number = 2"], "event 2 is missing"),
        (["DELETE FROM audit_event WHERE number = 1"], "event 1 is missing"),
        (["DELETE FROM audit_event WHERE number = 4"], "event 4 with hash"),
        (["DELETE FROM audit_event"], "event 4 with hash"),
        (
            ["UPDATE audit_event SET number = 12 WHERE number = 2",
             "UPDATE audit_event SET number = 2 WHERE number = 3",
             "UPDATE audit_event SET number = 3 WHERE number = 12"],
            "event 2 does not follow",
        ),
        (["UPDATE audit_head SET number = 3"], "not written through the log"),
    ],
)  # fmt: skip
def test_a_changed_removed_or_reordered_event_is_found(with_database, statements, says):
    async def body(database):
        await write(database, 1, 2, 3, 4)
        await tamper(database, *statements)
        assert any(says in breach for breach in await breaches(database))

    with_database(body)


def test_a_log_that_was_written_anew_is_found_by_a_head_that_was_kept(with_database):
    async def body(database):
        await write(database, 1, 2)
        kept = await head(database)
        await write(database, 3)
        assert await breaches(database, kept) == []
        await tamper(database, "DELETE FROM audit_event", "DELETE FROM audit_head")
        await write(database, 1, 5, 3)
        assert await breaches(database) == []
        assert any("event 2" in breach for breach in await breaches(database, kept))

    with_database(body)


def test_a_transaction_that_fails_leaves_no_event(with_database):
    async def body(database):
        async def fail():
            async with database.transaction() as session:
                await AuditLog(session).append(ANNA, change(1))
                raise RuntimeError

        with pytest.raises(RuntimeError):
            await fail()
        await write(database, 2)
        assert (await head(database)).number == 1
        assert await breaches(database) == []

    with_database(body)


def _write_many(url: str, start, numbers: range) -> None:
    async def main() -> None:
        database = Database(url)
        await database.start()
        start.wait(120)
        await asyncio.gather(*(write(database, *numbers[first::4]) for first in range(4)))
        await database.close()

    asyncio.run(main())


def test_writers_in_two_processes_keep_one_chain(database_url):
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(2)
    parts = (range(20), range(20, 40))
    writers = [context.Process(target=_write_many, args=(database_url, start, part)) for part in parts]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0]

    async def main() -> None:
        database = Database(database_url)
        await database.start()
        async with database.session() as session:
            targets = {event.target for event in await AuditLog(session).page(0, 100)}
        assert targets == {f"ten_{number}" for number in range(40)}
        assert await breaches(database) == []
        await database.close()

    asyncio.run(main())
