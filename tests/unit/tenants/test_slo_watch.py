"""Incidents are opened and closed once, whoever looks, and told with an event."""

import asyncio
import json

from sqlmodel import select

from tenants.slo.burn import CALM_MINUTES
from tenants.slo.refusals import Refusal, write_refusals
from tenants.slo.watch import GRACE_S, incidents_of, look
from tenants.tables import Event
from tests.slo_requests import NOON_S, booked, objective, post, promise

UP = objective("availability", target=0.99)


def minutes_of(outcome: int, start: int, end: int, tenant_id: str = "ten_a"):
    """Five requests in each minute of [start, end)."""
    return [
        booked(10_000 + 10 * minute + number, outcome, at_s=NOON_S + 60 * minute, tenant_id=tenant_id)
        for minute in range(start, end)
        for number in range(5)
    ]


def at(minute: int) -> int:
    """When that minute is looked at."""
    return NOON_S + 60 * minute + GRACE_S + 3


async def events(database) -> list[tuple[str, str, dict]]:
    async with database.session() as session:
        rows = (await session.exec(select(Event).order_by(Event.kind, Event.event_id))).all()
        return [(row.tenant_id, row.kind, json.loads(row.data)) for row in rows]


async def incidents(database, tenant_id: str = "ten_a") -> dict[str, tuple[int, int | None]]:
    async with database.session() as session:
        return {row.alert: (row.opened_s, row.closed_s) for row in await incidents_of(session, tenant_id, 10)}


def test_an_incident_opens_and_closes_with_an_event_each(with_database):
    async def body(database):
        await promise(database, UP)
        await post(database, *minutes_of(200, 0, 60), *minutes_of(500, 60, 70), *minutes_of(200, 70, 90))
        return (
            [await look(database, at(minute)) for minute in (60, 70, 71, 80)],
            await incidents(database),
            await events(database),
        )

    changes, found, told = with_database(body)

    assert changes[0] == 0
    assert changes[1] > 0
    assert changes[2] == 0
    assert found["page_fast"] == (NOON_S + 70 * 60, NOON_S + 80 * 60)
    burns = {data["alert"]: data for _, kind, data in told if kind == "slo.burn"}
    recovered = {data["alert"]: data for _, kind, data in told if kind == "slo.recovered"}
    assert burns.keys() == found.keys()
    assert recovered.keys() == {alert for alert, (_, closed) in found.items() if closed}
    page = burns["page_fast"]
    assert (page["objective"], page["sli"], page["target"], page["closed_at"]) == (
        "availability",
        "availability",
        0.99,
        None,
    )
    assert page["burn_rate_short"] == 100.0
    assert recovered["page_fast"]["incident_id"] == page["incident_id"]
    assert recovered["page_fast"]["closed_at"] == NOON_S + 80 * 60


def test_a_rate_that_wavers_is_one_incident_with_one_event_at_each_end(with_database):
    """Bad minutes in pairs, five good ones between: the alert's five minutes burn, don't, burn; then all is well."""

    def traffic():
        yield from minutes_of(500, 0, 30)
        for minute in range(30, 80):
            yield from minutes_of(500 if minute % 7 < 2 else 200, minute, minute + 1)
        yield from minutes_of(200, 80, 100)

    async def body(database):
        await promise(database, objective("availability", target=0.98))
        await post(database, *traffic())
        changes = [await look(database, at(minute)) for minute in range(25, 100)]
        return changes, await incidents(database), await events(database)

    changes, found, told = with_database(body)

    # 77 and 78 are bad: of the five minutes before 83 one is, which does not burn
    assert found["page_fast"] == (NOON_S + 25 * 60, NOON_S + (83 + CALM_MINUTES - 1) * 60)
    mine = [kind for _, kind, data in told if data["alert"] == "page_fast"]
    assert sorted(mine) == ["slo.burn", "slo.recovered"]
    assert sum(changes) == len(told)


def test_an_incident_outlives_looks_that_nobody_made(with_database):
    """The calm is in what was counted, not in who looked."""

    async def body(database):
        await promise(database, UP)
        await post(database, *minutes_of(500, 0, 30), *minutes_of(200, 30, 38), *minutes_of(500, 38, 39))
        await look(database, at(30))
        await look(database, at(36))  # calm since 35, for two looks
        before = await incidents(database)
        await look(database, at(44))  # calm since 44
        return before, await incidents(database)

    before, after = with_database(body)

    assert (before["page_fast"][1], after["page_fast"][1]) == (None, None)


def test_of_many_who_look_at_a_minute_one_is_heard(with_database):
    async def body(database):
        await promise(database, UP)
        await post(database, *minutes_of(500, 0, 30))
        answers = await asyncio.gather(*(look(database, at(30)) for _ in range(6)))
        again = await look(database, at(30)), await look(database, at(29))
        return answers, again, await events(database)

    answers, again, told = with_database(body)

    heard = [each for each in answers if each is not None]
    assert len(heard) == 1
    assert again == (None, None)
    assert len(told) == heard[0] > 0


def test_shed_requests_burn_the_budget_and_refused_ones_do_not(with_database):
    def refusals(tenant_id: str, status: int, reason: str):
        return {
            Refusal(tenant_id, NOON_S + 60 * m, "smollm2", "smollm2", "standard", status, reason): 5 for m in range(30)
        }

    async def body(database):
        await promise(database, UP, objective("availability", target=0.99, tenant_id="ten_b", version_id="slo_b"))
        async with database.transaction() as session:
            await write_refusals(session, "p1", refusals("ten_a", 503, "overloaded"))
            await write_refusals(session, "p1", refusals("ten_b", 429, "rate_limit_exceeded"))
        await look(database, at(30))
        return await incidents(database), await incidents(database, "ten_b")

    shed, limited = with_database(body)

    assert "page_fast" in shed
    assert limited == {}


def test_without_an_objective_there_is_nothing_to_watch(with_database):
    async def body(database):
        await post(database, *minutes_of(500, 0, 30))
        return await look(database, at(30)), await events(database)

    assert with_database(body) == (0, [])


def test_an_objective_that_ended_closes_its_incidents(with_database):
    async def body(database):
        await promise(database, UP)
        await post(database, *minutes_of(500, 0, 30))
        await look(database, at(30))
        end = objective(
            "availability", version=2, version_id="end", retired=True, effective_unix_ns=(NOON_S + 1860) * 10**9
        )
        await promise(database, end)
        await look(database, at(32))
        return await incidents(database)

    assert {closed for _, closed in with_database(body).values()} == {NOON_S + 32 * 60}
