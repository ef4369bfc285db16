"""Events: written with what they tell or not at all; of those with one name only the first."""

import pytest
from sqlmodel import select

from tenants.database import Database
from tenants.events import MAX_DATA_BYTES, emit
from tenants.tables import Event


async def written(database: Database) -> list[Event]:
    async with database.session() as session:
        return list((await session.exec(select(Event).order_by(Event.occurred_unix_ns))).all())


def test_an_event_is_written_with_the_transaction_that_it_tells_of(with_database):
    async def body(database):
        async with database.session() as session:
            await emit(session, "ten_a", "adapter.ready", {"name": "x"})
            await session.rollback()
        assert await written(database) == []

        async with database.transaction() as session:
            await emit(session, "ten_a", "adapter.ready", {"name": "é", "n": 1 << 70})
        (event,) = await written(database)
        assert (event.tenant_id, event.kind, event.number) == ("ten_a", "adapter.ready", None)
        assert event.data == '{"name":"\\u00e9","n":1180591620717411303424}'

    with_database(body)


def test_of_events_with_one_once_only_the_first_is_for_each_tenant_and_kind(with_database):
    async def body(database):
        for level in (80, 81):
            async with database.transaction() as session:
                await emit(session, "ten_a", "budget.alert", {"percent": level}, once="2026-11:80")
        async with database.transaction() as session:
            await emit(session, "ten_b", "budget.alert", {}, once="2026-11:80")
            await emit(session, "ten_a", "credit.low", {}, once="2026-11:80")
            await emit(session, "ten_a", "budget.alert", {}, once="2026-12:80")
        found = [(event.tenant_id, event.kind, event.data) for event in await written(database)]
        assert sorted(found) == [
            ("ten_a", "budget.alert", '{"percent":80}'),
            ("ten_a", "budget.alert", "{}"),
            ("ten_a", "credit.low", "{}"),
            ("ten_b", "budget.alert", "{}"),
        ]

    with_database(body)


@pytest.mark.parametrize(("kind", "data"), [("adapter.unheard", {}), ("adapter.ready", {"x": "y" * MAX_DATA_BYTES})])
def test_unknown_kinds_and_long_data_are_bugs_of_the_caller(with_database, kind, data):
    async def body(database):
        async with database.transaction() as session:
            with pytest.raises(AssertionError):
                await emit(session, "ten_a", kind, data)

    with_database(body)
