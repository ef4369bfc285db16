"""Which request an idempotency key stands for, on both kinds of database."""

import asyncio

import pytest
from cryptography.exceptions import InvalidTag
from sqlmodel import select

from tenants.idempotency import KEEP_NS, LEASE_NS, IdempotencyKey, IdempotencyRepository
from tenants.tables import IdempotentRequest

NOW = 1_800_000_000_000_000_000


@pytest.fixture
def key(secrets) -> IdempotencyKey:
    return IdempotencyKey("ten_a", *secrets.idempotency_key("ten_a", "order 66"))


def in_turn(with_database, *steps):
    """What each step, given a repository in a transaction of its own, answers."""

    async def body(database):
        answers = []
        for step in steps:
            async with database.transaction() as session:
                answers.append(await step(IdempotencyRepository(session)))
        return answers

    return with_database(body)


def claim(key, request_id: str, now_ns: int = NOW):
    return lambda repository: repository.claim(key, b"h" * 32, request_id, now_ns)


def holder(found) -> str | None:
    return found and found.request_id


def test_a_key_stands_for_the_first_request_until_that_lets_go(with_database, key):
    first, second, _, third = in_turn(
        with_database,
        claim(key, "one"),
        claim(key, "two"),
        lambda repository: repository.release(key, "one"),
        claim(key, "three"),
    )

    assert [holder(found) for found in (first, second, third)] == [None, "one", None]


def test_of_many_claims_at_once_one_wins(with_database, key):
    async def body(database):
        async def one(number: int):
            async with database.transaction() as session:
                return await IdempotencyRepository(session).claim(key, b"h" * 32, f"r{number}", NOW)

        return await asyncio.gather(*(one(number) for number in range(8)))

    found = with_database(body)

    assert [holder(row) for row in found].count(None) == 1
    assert len({holder(row) for row in found if row}) == 1


@pytest.mark.parametrize(("later_ns", "is_free"), [(LEASE_NS - 1, False), (LEASE_NS, True)])
def test_a_request_that_nobody_renews_holds_its_key_for_the_length_of_a_lease(with_database, key, later_ns, is_free):
    _, found = in_turn(with_database, claim(key, "crashed"), claim(key, "next", NOW + later_ns))

    assert (found is None) == is_free


def test_a_renewed_request_keeps_its_key(with_database, key):
    steps = [claim(key, "long")]
    for number in range(1, 4):
        steps.append(lambda repository, at=NOW + number * LEASE_NS - 1: repository.renew(key, "long", at))
    *_, found = in_turn(with_database, *steps, claim(key, "next", NOW + 4 * LEASE_NS - 2))

    assert holder(found) == "long"


def test_of_those_who_find_a_dead_request_one_takes_over(with_database, key):
    async def body(database):
        async def one(name: str, now_ns: int):
            async with database.transaction() as session:
                return await IdempotencyRepository(session).claim(key, b"h" * 32, name, now_ns)

        await one("dead", NOW)
        return await asyncio.gather(*(one(f"r{number}", NOW + LEASE_NS) for number in range(6)))

    assert [holder(row) for row in with_database(body)].count(None) == 1


def test_a_finished_request_is_kept_for_a_day_and_then_removed(with_database, key):
    steps = [
        claim(key, "done"),
        lambda repository: repository.finish(key, "done", b"sealed", NOW + 5),
        claim(key, "soon", NOW + KEEP_NS - 1),
        lambda repository: repository.purge(NOW + KEEP_NS - 1),
        lambda repository: repository.purge(NOW + KEEP_NS),
        claim(key, "late", NOW + KEEP_NS),
    ]
    _, finished, soon, kept, removed, late = in_turn(with_database, *steps)

    assert finished
    assert (soon.request_id, soon.answer) == ("done", b"sealed")
    assert (kept, removed) == (0, 1)
    assert late is None


def test_an_old_key_that_is_not_yet_removed_is_free(with_database, key):
    steps = [claim(key, "done"), lambda repository: repository.finish(key, "done", None, NOW)]
    *_, found = in_turn(with_database, *steps, claim(key, "next", NOW + KEEP_NS))

    assert found is None


def test_a_request_that_lost_its_key_changes_nothing_any_more(with_database, key):
    steps = [
        claim(key, "slow"),
        claim(key, "next", NOW + LEASE_NS),
        lambda repository: repository.finish(key, "slow", b"x", NOW + LEASE_NS),
        lambda repository: repository.release(key, "slow"),
        claim(key, "third", NOW + LEASE_NS),
    ]
    _, _, finished, _, found = in_turn(with_database, *steps)

    assert not finished
    assert (found.request_id, found.answer, found.finished_unix_ns) == ("next", None, None)


def test_one_value_of_two_tenants_is_two_keys(with_database, key, secrets):
    other = IdempotencyKey("ten_b", *secrets.idempotency_key("ten_b", "order 66"))
    found = in_turn(with_database, claim(key, "a"), claim(other, "b"))

    assert found == [None, None]
    assert other.secret.reveal() != key.secret.reveal()


def test_an_answer_opens_with_its_own_key_and_request_alone(key, secrets):
    sealed = key.seal("r1", b"a secret answer")
    other = IdempotencyKey("ten_a", *secrets.idempotency_key("ten_a", "order 67"))

    assert key.open("r1", sealed) == b"a secret answer"
    assert b"secret" not in sealed
    assert key.seal("r1", b"a secret answer") != sealed
    for thief, request_id in ((other, "r1"), (key, "r2")):
        with pytest.raises(InvalidTag):
            thief.open(request_id, sealed)


def test_nothing_of_a_value_or_its_secret_is_in_the_table(with_database, key):
    async def body(database):
        async with database.transaction() as session:
            repository = IdempotencyRepository(session)
            await repository.claim(key, key.body_hash(b"body"), "r", NOW)
            await repository.finish(key, "r", key.seal("r", b"an answer"), NOW)
        async with database.session() as session:
            (row,) = (await session.exec(select(IdempotentRequest))).all()
        return repr(row).encode() + row.answer + row.body_hash

    stored = with_database(body)

    for hidden in (b"order 66", b"an answer", key.secret.reveal(), key.secret.reveal().hex().encode()):
        assert hidden not in stored
