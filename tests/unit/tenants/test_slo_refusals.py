"""Counts of refusals: whole, by process, as often as one likes."""

from sqlmodel import select

from tenants.slo.refusals import Refusal, write_refusals
from tenants.tables import RefusalMinute

SHED = Refusal("ten_a", 60, "tiny", "tiny", "standard", 503, "overloaded")
LIMITED = Refusal("ten_a", 60, "tiny", "tiny", "standard", 429, "rate_limit_exceeded")


def test_a_count_that_is_written_again_replaces_its_own_and_adds_to_the_others(with_database):
    async def body(database):
        for process, counts in (("p1", {SHED: 1}), ("p2", {SHED: 5}), ("p1", {SHED: 3, LIMITED: 2})):
            for _ in range(2):
                async with database.transaction() as session:
                    await write_refusals(session, process, counts)
        async with database.session() as session:
            return (await session.exec(select(RefusalMinute))).all()

    found = sorted((row.status, row.process_id, row.num_requests) for row in with_database(body))

    assert found == [(429, "p1", 2), (503, "p1", 3), (503, "p2", 5)]
