"""The margin report: what requests took, what they paid, and every nanosecond of every replica in one row."""

import random
import uuid
from dataclasses import replace

import pytest

from tenants import replica_times
from tenants.database import Database
from tenants.errors import InvalidRecord, InvalidValue
from tenants.ledger import Ledger
from tenants.margins import MarginQuery, Margins, margins
from tenants.meter import RequestContext
from tenants.pricing import Quantities, RateCard, charges, default_prices
from tenants.replica_times import ReplicaSpan
from tenants.settled import SettledRequest

CARD = RateCard("rc_1", 1, 0, default_prices())
CARDS = {"rc_1": CARD}
PRICE = sum(each.amount_picousd for each in charges(Quantities(20, 16, 5), CARD, "smollm2", "standard"))
SECOND = 10**9
NOON_S = 1_900_000_800  # a whole hour
DAY = (NOON_S - 43_200, NOON_S + 43_200)
GPU_HOUR = 2 * 10**12


def span(
    number: int, *, at_s: int = NOON_S, model: str = "smollm2", wall_ns: int = SECOND, **accounts: int
) -> ReplicaSpan:
    """The accounts named; the rest of the wall time is idle."""
    named = {f"{name}_ns": accounts.get(name, 0) for name in ("attributed", "load", "recompute", "lost", "overhead")}
    idle_ns = wall_ns - sum(named.values()) if "idle" not in accounts else accounts["idle"]
    return ReplicaSpan(
        engine_id=f"{model}-0",
        incarnation_unix_ns=1,
        number=number,
        model=model,
        until_unix_ns=at_s * SECOND,
        wall_ns=wall_ns,
        idle_ns=idle_ns,
        error_ppm=accounts.get("error_ppm", 50_000),
        r2_ppm=990_000,
        **named,
    )


def took(
    number: int, gpu_ns: int, load_ns: int = 0, outcome: int = 200, at_s: int = NOON_S, **context
) -> SettledRequest:
    named = {
        "tenant_id": "ten_a",
        "key_id": "key_1",
        "request_id": str(uuid.UUID(int=number)),
        "attempt": 1,
        "base_model": "smollm2",
        "model": "pirate",
        "adapter_version_id": "adv_1",
        "flow_class": "standard",
        "rate_card_id": "rc_1",
        "admitted_unix_ns": (at_s - 1) * SECOND,
    }
    tokens, phases = (20, 16, 5), (1, 2, 3, 4, 5, 6)
    made = RequestContext(**{**named, **context})
    return SettledRequest(made, outcome, *tokens, *phases, gpu_ns, at_s * SECOND, load_ns=load_ns)


async def book(database: Database, requests, spans) -> None:
    for _ in range(2):  # a second delivery changes nothing
        async with database.transaction() as session:
            await Ledger().post(session, requests, CARDS)
            await replica_times.post(session, spans)


async def report(database: Database, **query) -> Margins:
    async with database.session() as session:
        return await margins(session, MarginQuery(**{"start_s": DAY[0], "end_s": DAY[1], **query}))


def total_ns(found: Margins) -> int:
    return sum(taken.busy_ns for taken in found.groups.values()) + sum(found.accounts.values())


def test_each_tenant_has_what_its_requests_took_beside_what_they_paid(with_database):
    async def check(database):
        requests = [
            took(1, 300, tenant_id="ten_a"),
            took(2, 500, load_ns=40, tenant_id="ten_a"),
            took(3, 100, outcome=503, tenant_id="ten_b"),
            took(4, 200, outcome=0, tenant_id="ten_b"),
        ]
        await book(database, requests, [span(0, attributed=1_100, load=40, recompute=25, lost=7, overhead=3)])
        found = await report(database, gpu_hour_picousd=GPU_HOUR)

        a, b = found.groups["ten_a",], found.groups["ten_b",]
        assert (a.gpu_ns, a.load_ns, b.gpu_ns, b.load_ns) == (800, 40, 100, 0)
        assert a.price_picousd == 2 * PRICE
        assert b.price_picousd == 0  # ours to pay
        idle_ns = SECOND - 1_100 - 40 - 25 - 7 - 3
        assert found.accounts == {
            "load": 0,
            "recompute": 25,
            "lost": 7 + 200,
            "idle": idle_ns,
            "overhead": 3,
            "unsettled": 0,
        }
        assert found.query.cost_picousd(3_600 * SECOND) == GPU_HOUR

    with_database(check)


def test_the_rows_sum_to_the_wall_time_of_all_replicas_and_so_does_the_second_column(with_database):
    async def check(database):
        draw = random.Random(4)
        tenants, classes = ["ten_a", "ten_b", "ten_c"], ["interactive", "standard", "batch"]
        requests = [
            took(
                number,
                draw.randrange(10**8),
                load_ns=draw.choice([0, 0, 10**7]),
                outcome=draw.choice([200, 200, 499, 0]),
                at_s=draw.randrange(*DAY),
                tenant_id=draw.choice(tenants),
                flow_class=draw.choice(classes),
                base_model=draw.choice(["smollm2", "large"]),
            )
            for number in range(60)
        ]
        spans = [
            span(number, model=model, attributed=draw.randrange(10**8), idle=10**6, wall_ns=draw.randrange(10**9))
            for number in range(50)
            for model in ("smollm2", "large", "unused")
        ]
        await book(database, requests, spans)
        for groups in (("tenant",), ("class", "model"), ("adapter",), ("tenant", "model", "adapter", "class")):
            found = await report(database, group_by=groups)

            assert found.wall_ns == sum(each.wall_ns for each in spans) == total_ns(found)
            full_ns = sum(taken.full_ns for taken in found.groups.values())
            assert full_ns + found.unspread_ns == found.wall_ns
            assert found.unspread_ns == sum(each.wall_ns for each in spans if each.model == "unused")

    with_database(check)


def test_a_model_that_stands_idle_is_not_spread_over_the_users_of_another(with_database):
    async def check(database):
        busy = [took(1, 600_000_000, tenant_id="ten_a"), took(2, 200_000_000, tenant_id="ten_b")]
        spans = [span(0, attributed=800_000_000), *(span(number, model="large") for number in range(100))]
        await book(database, busy, spans)
        found = await report(database)

        assert found.groups["ten_a",].spread_ns == 150_000_000
        assert found.groups["ten_b",].spread_ns == 50_000_000
        assert found.unspread_ns == 100 * SECOND

    with_database(check)


def test_what_lies_outside_the_interval_is_not_in_it_and_what_runs_over_its_edge_is_unsettled(with_database):
    async def check(database):
        requests = [took(1, 100), took(2, 40, at_s=DAY[1]), took(3, 7, at_s=DAY[0] - 1)]
        spans = [span(0, attributed=140), span(1, at_s=DAY[1], attributed=9), span(2, at_s=DAY[0] - 1)]
        await book(database, requests, spans)
        found = await report(database)

        assert found.groups["ten_a",].gpu_ns == 100
        assert found.accounts["unsettled"] == 40
        assert found.wall_ns == total_ns(found) == SECOND

    with_database(check)


def test_the_error_of_the_model_that_shared_the_steps_is_weighted_by_the_time_it_shared(with_database):
    async def check(database):
        assert (await report(database)).error_ratio is None
        await book(
            database, [], [span(0, attributed=300_000, error_ppm=20_000), span(1, attributed=100_000, error_ppm=60_000)]
        )

        assert (await report(database)).error_ratio == pytest.approx(0.03)
        assert (await report(database)).r_squared == pytest.approx(0.99)

    with_database(check)


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ({"start_s": 60, "end_s": 60}, "end_time"),
        ({"start_s": 0, "end_s": 40 * 86_400}, "end_time"),
        ({"group_by": ()}, "group_by"),
        ({"group_by": ("tenant", "tenant")}, "group_by"),
        ({"group_by": ("key",)}, "group_by"),
    ],
)
def test_a_question_that_has_no_answer_is_refused_by_its_field(query: dict, field: str):
    with pytest.raises(InvalidValue) as error:
        MarginQuery(**{"start_s": 0, "end_s": 60, **query})

    assert error.value.field == field


@pytest.mark.parametrize("given", [{"wall_ns": -1}, {"engine_id": ""}, {"model": "m" * 65}, {"number": 1 << 63}])
def test_a_time_record_that_no_engine_writes_is_unfit(given: dict):
    with pytest.raises(InvalidRecord):
        replace(span(0), **given)
