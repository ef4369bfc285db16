"""What the ledger knows of a spend window: the records of what began in it, most of them by the sums of their days."""

import random
from dataclasses import replace

import msgspec
import pytest
from random_ledger import DAY_S, NS, START_S, post, random_request, rows_of

from tenants.periods import Period
from tenants.quota.budgets import Window
from tenants.quota.spend_repository import SpendRepository
from tenants.settled import SettledRequest
from tenants.tables import RequestRecord

HOUR_S = 3600
BEGIN_S, END_S = START_S + 5 * DAY_S - 5 * HOUR_S, START_S + 35 * DAY_S - 5 * HOUR_S  # midnight in a zone of +5
MONTH = Period(BEGIN_S * NS, END_S * NS, "2030-03-22")
EDGES_S = (BEGIN_S, END_S, *(edge + DAY_S for edge in (BEGIN_S, END_S)), START_S + 6 * DAY_S, START_S + 34 * DAY_S)
SCOPES = ("tenant", "key:k1", "key:k2:model:smollm2", "key:k1:adapter:pirate")


def long_request(rng: random.Random, number: int) -> SettledRequest:
    """It began up to a day before its end, which is anywhere in the month or beside it, often at an edge of days."""
    request = random_request(rng, number)
    near_s = rng.choice(EDGES_S) + rng.randrange(-2, 3) if number % 2 else START_S + rng.randrange(45 * DAY_S)
    finished_ns = near_s * NS + rng.randrange(NS)
    took_ns = rng.choice([rng.randrange(5 * NS), rng.randrange(DAY_S * NS)])
    its = {"model": rng.choice(["pirate", "pirate@2", "pirates"]), "admitted_unix_ns": finished_ns - took_ns}
    return replace(request, context=msgspec.structs.replace(request.context, **its), finished_unix_ns=finished_ns)


@pytest.mark.parametrize("scope", SCOPES)
def test_a_window_has_what_began_in_its_period_to_the_picousd_whenever_it_ended(with_database, scope):
    rng = random.Random(11)
    requests = [long_request(rng, number) for number in range(300)]

    def is_of_scope(row: RequestRecord) -> bool:
        _, key, kind, name = (*scope.split(":"), "", "", "")[:4] if scope != "tenant" else ("", "", "", "")
        names = {"model": [row.base_model], "adapter": row.model.split("@")[:1], "": [name]}[kind]
        return key in ("", row.key_id) and name in names

    async def body(database):
        await post(database, *requests)
        began = [
            row.price_picousd
            for row in await rows_of(database, RequestRecord)
            if row.tenant_id == "ten_a" and is_of_scope(row)
            and MONTH.start_unix_ns <= row.admitted_unix_ns < MONTH.end_unix_ns
        ]  # fmt: skip
        async with database.session() as session:
            spent = await SpendRepository(session).spent("ten_a", Window(f"{scope}@{MONTH.label}", 1, 0, MONTH))
        assert spent == sum(began) > 0

    with_database(body)


def test_a_period_shorter_than_two_days_is_summed_from_its_records(with_database):
    rng = random.Random(12)
    short = Period(BEGIN_S * NS, (BEGIN_S + 30 * HOUR_S) * NS, "2030-03-22")

    async def body(database):
        await post(database, *(long_request(rng, number) for number in range(300)))
        began = [
            row.price_picousd
            for row in await rows_of(database, RequestRecord)
            if row.tenant_id == "ten_b" and short.start_unix_ns <= row.admitted_unix_ns < short.end_unix_ns
        ]
        async with database.session() as session:
            spent = await SpendRepository(session).spent("ten_b", Window(f"tenant@{short.label}", 1, 0, short))
        assert spent == sum(began) > 0

    with_database(body)
