"""What the limiter tells its store without waiting: heard in the end, whatever breaks meanwhile."""

import asyncio
import json
import time
from collections.abc import Iterator

import pytest
from gateway_harness import House, running_house, stopped

from gateway.limits.limiter import Limiter
from tenants.quota.budgets import Budget, Spend
from tenants.quota.quota import Reservation

PRICE = 5


@pytest.fixture(scope="module")
def house(tmp_path_factory) -> Iterator[House]:
    with running_house(tmp_path_factory.mktemp("limiter")) as house:
        yield house


@pytest.fixture
def limiter(house: House, monkeypatch) -> Limiter:
    """One more, not yet started, on the house's store, which may take its time."""
    its = house.parts.pipeline.admission.limiter
    for part in (its.quota._script, house.on_loop(its.quota._script._connected())):
        monkeypatch.setattr(part, "_deadline_s", 30.0)
    monkeypatch.setattr("gateway.limits.limiter.LAST_WORDS_S", 30.0)
    return Limiter(its.quota, its.share, its.spending, its.count_fallback)


def spent(tenant_id: str) -> Reservation:
    windows = Budget(tenant_limit=10**12).windows("k1", "tiny", "", time.time_ns())
    return Reservation("request-1", 0, tenant_id, "k1", 0, (), Spend(PRICE, windows))


async def booked(limiter: Limiter, tenant_id: str) -> list[tuple[str, str]]:
    """What the store has of the tenant's requests: picousd and booked attempts."""
    holds = [json.loads(hold) for hold in (await limiter.quota.held(tenant_id)).values()]
    return [(hold["amount"], hold["booked"]) for hold in holds]


def test_a_limiter_that_ends_waits_until_the_store_has_heard_what_it_was_told(house: House, limiter: Limiter):
    async def scenario() -> list[tuple[str, str]]:
        await limiter.start()
        with stopped(house.valkey.process.pid):
            limiter.book(spent("ends"), 0)
            closing = asyncio.create_task(limiter.close())
            for _ in range(10):
                await asyncio.sleep(0)
            assert not closing.done()
        await closing
        return await booked(limiter, "ends")

    assert house.on_loop(scenario()) == [(str(PRICE), ",0,")]


def test_a_limiter_whose_store_is_silent_ends_all_the_same(house: House, limiter: Limiter, monkeypatch):
    monkeypatch.setattr("gateway.limits.limiter.LAST_WORDS_S", 0.01)

    async def scenario() -> None:
        await limiter.start()
        with stopped(house.valkey.process.pid):
            limiter.book(spent("silent"), 0)
            await limiter.close()

    house.on_loop(scenario())


def test_what_was_told_while_the_line_broke_is_told_again_once(house: House, limiter: Limiter, monkeypatch):
    told, real = [], limiter.quota.tell_booked

    def tell_booked(reservation: Reservation, attempt: int):
        told.append(reservation.request_id)
        return real(reservation, attempt)

    monkeypatch.setattr(limiter.quota, "tell_booked", tell_booked)

    async def scenario() -> list[tuple[str, str]]:
        await limiter.start()
        with stopped(house.valkey.process.pid):
            limiter.book(spent("breaks"), 0)
            await asyncio.sleep(0)  # it is on its way
            limiter.quota._script._line._transport.abort()
            while not limiter.is_away:
                await asyncio.sleep(0)
            assert len(limiter._unheard) == 1
        while limiter.is_away:
            await asyncio.sleep(0.01)
        await limiter.close()
        return await booked(limiter, "breaks")

    assert house.on_loop(scenario()) == [(str(PRICE), ",0,")]
    assert told == ["request-1", "request-1"]
