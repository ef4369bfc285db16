"""Objectives in the database: versions that only ever change what comes."""

from dataclasses import replace

from tenants.slo.objectives import effective_from
from tenants.slo.repository import ObjectiveRepository
from tests.slo_requests import SECOND, objective

DRAFT = objective("ttft", 500, version_id="", version=0)
NOON_NS = 1_900_000_800 * SECOND


def changing(with_database, *steps):
    """Runs steps on a repository, each in a transaction of its own; their results."""

    async def body(database):
        results = []
        for step in steps:
            async with database.transaction() as session:
                results.append(await step(ObjectiveRepository(session)))
        return results

    return with_database(body)


def test_a_new_version_begins_with_a_minute_that_every_process_reaches_after_it_is_written():
    assert effective_from(NOON_NS) == NOON_NS + 60 * SECOND
    assert effective_from(NOON_NS + 50 * SECOND) == NOON_NS + 60 * SECOND
    assert effective_from(NOON_NS + 51 * SECOND) == NOON_NS + 120 * SECOND


def test_what_is_set_again_unchanged_is_no_new_version(with_database):
    first, again, history = changing(
        with_database,
        lambda it: it.set([DRAFT], NOON_NS),
        lambda it: it.set([DRAFT], NOON_NS + SECOND),
        lambda it: it.history("ten_a"),
    )

    assert first == again == history
    assert [each.version for each in history] == [1]


def test_a_change_is_a_new_version_and_the_old_one_stays(with_database):
    other = replace(DRAFT, threshold_ns=1)
    *_, history, latest = changing(
        with_database,
        lambda it: it.set([DRAFT, objective("e2e", version_id="", version=0)], NOON_NS),
        lambda it: it.set([other], NOON_NS + 3600 * SECOND),
        lambda it: it.history("ten_a"),
        lambda it: it.latest("ten_a"),
    )

    found = [(each.sli, each.version, each.threshold_ns) for each in history]
    assert found == [("e2e", 1, 500_000_000), ("ttft", 1, 500_000_000), ("ttft", 2, 1)]
    assert [(each.sli, each.version) for each in latest] == [("e2e", 1), ("ttft", 2)]
    assert len({each.version_id for each in history}) == 3


def test_an_ended_objective_may_begin_again(with_database):
    async def end(it):
        await it.retire(await it.latest("ten_a"), NOON_NS)

    *_, nothing, begun = changing(
        with_database,
        lambda it: it.set([DRAFT], NOON_NS),
        end,
        lambda it: it.latest("ten_a"),
        lambda it: it.set([DRAFT], NOON_NS),
    )

    assert nothing == []
    assert [(each.version, each.retired) for each in begun] == [(3, False)]
