"""Random usage records, and the ledger that they are posted to."""

import random
import uuid

from sqlmodel import select

from tenants.ledger import Ledger
from tenants.meter import RequestContext
from tenants.pricing import ANY, MAX_PRICE_PICOUSD, METERS, RateCard, default_prices
from tenants.settled import SettledRequest

DAY_S = 86_400
START_S = 1_900_022_400 - 1_900_022_400 % DAY_S
NS = 10**9
DEAR = {(meter, ANY, ANY): MAX_PRICE_PICOUSD - number for number, meter in enumerate(METERS)}
CARDS = {"rc_1": RateCard("rc_1", 1, 0, default_prices()), "rc_2": RateCard("rc_2", 2, 0, DEAR)}


def random_request(rng: random.Random, number: int, attempt: int = 0, span_s: int = 3 * DAY_S) -> SettledRequest:
    its = random.Random(number)  # whose and what: the same for every dispatch
    finished_ns = START_S * NS + rng.randrange(span_s * NS)
    context = RequestContext(
        tenant_id=its.choice(["ten_a", "ten_b"]),
        key_id=its.choice(["k1", "k2"]),
        request_id=str(uuid.UUID(int=number)),
        attempt=attempt,
        base_model="smollm2",
        model=its.choice(["pirate", "smollm2"]),
        adapter_version_id="adv_1",
        flow_class=its.choice(["interactive", "batch"]),
        rate_card_id=its.choice(["rc_1", "rc_2"]),
        admitted_unix_ns=finished_ns - NS,
    )
    cached, uncached, output = rng.randint(0, 9), rng.randint(0, 1 << 24), rng.randint(0, 1 << 25)
    outcome = rng.choice([200, 200, 499, 503, 0])
    return SettledRequest(
        context, outcome, cached + uncached, cached, output, 1, 2, 3, 4, 5, 6, rng.randrange(NS), finished_ns
    )


async def rows_of(database, table) -> list:
    async with database.session() as session:
        return list((await session.exec(select(table))).all())


async def post(database, *requests) -> None:
    async with database.transaction() as session:
        await Ledger().post(session, requests, CARDS)
