"""The replicas' time stays as it was written, by the second and then by the hour, and no report or audit notices."""

from dataclasses import astuple, replace

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from tenants import replica_times
from tenants.audit.findings import Findings
from tenants.audit.replicas import JournaledTime, check_replicas, check_spans
from tenants.margins import MarginQuery, margins
from tenants.replica_hours import roll_up
from tenants.replica_times import ReplicaSpan

SECOND, HOUR_S = 10**9, 3_600
START_S = 1_900_000_800  # a whole hour
EVERY_S = 600  # six records an hour are enough
DAY = (START_S, START_S + 86_400)


def spans(num: int, engine: str = "e0", **changed) -> list[ReplicaSpan]:
    """One in EVERY_S, the first in the middle of an hour."""
    first = ReplicaSpan(engine, 7, 0, "m", 0, EVERY_S * SECOND, 0, 1, 2, 3, 0, 4, 50_000, 990_000)
    made = []
    for number in range(num):
        busy_ns = number * 10**7
        idle_ns = EVERY_S * SECOND - busy_ns - 10
        until_ns = (START_S + HOUR_S // 2 + number * EVERY_S) * SECOND
        values = {"number": number, "until_unix_ns": until_ns, "attributed_ns": busy_ns, "idle_ns": idle_ns}
        made.append(replace(first, **values, **changed))
    return made


async def book(database, given: list[ReplicaSpan]) -> None:
    async with database.transaction() as session:
        await replica_times.post(session, given)


async def rows(database, table: str) -> int:
    async with database.session() as session:
        return (await session.exec(text(f"SELECT count(*) FROM {table}"))).scalar_one()


async def told(database, journal: list[ReplicaSpan]) -> tuple:
    """What reports and audits say."""
    findings = Findings()
    async with database.session() as session:
        report = await margins(session, MarginQuery(*DAY))
        connection = await session.connection()
        await check_replicas(connection, findings)
        await check_spans(
            connection, "j", [JournaledTime(n, True, astuple(s)) for n, s in enumerate(journal)], findings
        )
    return report, {name: findings[name].examples for name in ("I8", "I10")}


def test_hours_say_what_their_seconds_said_to_reports_and_audits(with_database):
    async def body(database):
        given = [*spans(40), *spans(40, "e1", error_ppm=90_000)]
        await book(database, given)
        before, clean = await told(database, given)

        gone = await roll_up(database, (START_S + 4 * HOUR_S + 1) * SECOND)

        assert gone == 2 * (4 * 6 - 3)  # whole hours only, the first of them began with its fourth record
        assert (await rows(database, "replica_time"), await rows(database, "replica_hour")) == (80 - gone, 8)
        after, still_clean = await told(database, given)
        assert clean == still_clean == {"I8": [], "I10": []}
        assert (after.accounts, after.wall_ns) == (before.accounts, before.wall_ns)
        assert after.error_ratio == pytest.approx(before.error_ratio, abs=1e-6)
        assert after.r_squared == pytest.approx(before.r_squared, abs=1e-6)
        assert await roll_up(database, (START_S + 4 * HOUR_S + 1) * SECOND) == 0

    with_database(body)


def test_what_is_in_an_hour_is_not_taken_again_when_a_journal_delivers_it_again(with_database):
    async def body(database):
        await book(database, spans(40))
        await roll_up(database, (START_S + 3 * HOUR_S) * SECOND)
        left = await rows(database, "replica_time")

        await book(database, spans(40))

        assert await rows(database, "replica_time") == left < 40

    with_database(body)


def test_an_hour_that_lacks_a_record_stays_for_the_audit(with_database):
    async def body(database):
        given = spans(20)
        await book(database, [span for span in given if span.number != 5])

        await roll_up(database, (START_S + 86_400) * SECOND)

        assert await rows(database, "replica_time") == 5  # of the hour of records 3 to 8
        _, found = await told(database, given)
        assert found["I10"] == ["e0 since 7: 19 of 20 time records are there"]
        assert found["I8"] == ["record 5 of j, a second's accounts, is not in the database"]

    with_database(body)


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("UPDATE replica_time SET idle_ns = idle_ns + 1", "replica_time is append-only"),
        ("DELETE FROM replica_time", "append-only until its hour"),
        ("UPDATE replica_hour SET idle_ns = idle_ns + 1", "replica_hour is append-only"),
        ("DELETE FROM replica_hour", "replica_hour is append-only"),
    ],
)
def test_the_database_refuses_to_change_the_replicas_time(with_database, statement, words):
    async def body(database):
        await book(database, spans(20))
        await roll_up(database, (START_S + 2 * HOUR_S) * SECOND)
        with pytest.raises(DBAPIError, match=words):
            async with database.transaction() as session:
                await session.exec(text(statement))

    with_database(body)
