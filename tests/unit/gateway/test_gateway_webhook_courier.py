"""The courier on a real database and real sockets, under a clock of the test's own."""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from gateway.webhooks.addresses import Resolver
from gateway.webhooks.courier import MAX_OF_A_TENANT, MAX_OF_AN_ENDPOINT, Courier
from gateway.webhooks.poster import Poster
from migrations import upgrade
from tenants.database import Database
from tenants.deliveries import JITTER, LEASE_NS, RETRY_AFTER_S
from tenants.events import emit
from tenants.repositories import TenantRepository
from tenants.secrets import Secrets
from tenants.webhooks import WebhookRepository
from tests.hooks import Receiver, receiving

S = 10**9


class Office:
    """A database, and as many couriers as a test wants; all have one clock."""

    def __init__(self, database: Database, secrets: Secrets, receiver: Receiver) -> None:
        self.database, self.secrets, self.receiver = database, secrets, receiver
        self.now_ns = 10**18
        self.results: Counter[str] = Counter()
        self.resolver = Resolver(allow_loopback=True)

    def courier(self) -> Courier:
        poster = Poster(self.resolver, allow_loopback=True)
        count = lambda result: self.results.update([result])  # noqa: E731
        return Courier(self.database, self.secrets, poster, count, now_ns=lambda: self.now_ns)

    async def tenant(self, name: str, *paths: str) -> str:
        """With an endpoint at each path."""
        async with self.database.transaction() as session:
            tenant = await TenantRepository(session).create(name)
            for path in paths:
                await WebhookRepository(session, self.secrets).create(tenant.tenant_id, self.receiver.url + path)
        return tenant.tenant_id

    async def emit(self, tenant_id: str, times: int = 1) -> None:
        async with self.database.transaction() as session:
            for _ in range(times):
                await emit(session, tenant_id, "adapter.ready", {})

    def came(self, path: str) -> int:
        return len(self.receiver.at(path))


@pytest.fixture
def in_office(tmp_path: Path) -> Callable[[Callable[[Office], Coroutine[Any, Any, None]]], None]:
    def run(body: Callable[[Office], Coroutine[Any, Any, None]]) -> None:
        url = f"sqlite:///{tmp_path / 'tenora.db'}"
        upgrade(url)

        async def main(receiver: Receiver) -> None:
            database = Database(url)
            await database.start()
            office = Office(database, Secrets.load_or_create(tmp_path / "secrets.json"), receiver)
            try:
                await body(office)
            finally:
                office.resolver.close()
                await database.close()

        with receiving() as receiver:
            asyncio.run(main(receiver))

    return run


def test_a_failed_event_comes_again_when_it_is_due_with_the_same_id_and_body_and_a_new_time(in_office):
    async def body(office: Office) -> None:
        courier = office.courier()
        office.receiver.answer = lambda _: 503
        await office.emit(await office.tenant("acme", "/hook"))
        await courier.round()
        await courier.idle()
        office.now_ns += RETRY_AFTER_S[0] * S - 1
        await courier.round()
        await courier.idle()
        assert office.came("/hook") == 1

        office.receiver.answer = lambda _: 200
        office.now_ns += int(RETRY_AFTER_S[0] * S * JITTER) + 1
        await courier.round()
        await courier.idle()
        first, second = office.receiver.at("/hook")
        assert (first.event_id, first.body) == (second.event_id, second.body)
        waited_s = int(second.headers["webhook-timestamp"]) - int(first.headers["webhook-timestamp"])
        assert waited_s >= RETRY_AFTER_S[0]
        assert office.results == {"retried": 1, "delivered": 1}

    in_office(body)


def test_what_a_courier_had_in_hand_when_it_died_comes_by_another_one_under_the_same_id(in_office):
    async def body(office: Office) -> None:
        hanging, go_on = threading.Event(), threading.Event()

        def hang(_) -> int:
            hanging.set()
            go_on.wait(10)
            return 200

        office.receiver.answer = hang
        await office.emit(await office.tenant("acme", "/hook"))
        dead, heir = office.courier(), office.courier()
        await dead.round()
        await asyncio.to_thread(hanging.wait, 10)
        for post in dead._posts:  # as a SIGKILL would: nothing of it is settled
            post.cancel()
        await dead.idle()
        go_on.set()

        await heir.round()
        await heir.idle()
        assert office.came("/hook") == 1  # the claim of the dead one still holds
        office.now_ns += LEASE_NS
        await heir.round()
        await heir.idle()
        first, second = office.receiver.at("/hook")
        assert first.event_id == second.event_id
        assert office.results == {"delivered": 1}
        office.now_ns += 100 * LEASE_NS
        await heir.round()
        assert not heir._posts

    in_office(body)


def test_endpoints_that_hang_delay_nobody_else(in_office):
    async def body(office: Office) -> None:
        go_on = threading.Event()

        def answer(got) -> int:
            if got.path.startswith("/slow"):
                go_on.wait(10)
            return 200

        office.receiver.answer = answer
        courier = office.courier()
        slow = await office.tenant("slow", "/slow-1", "/slow-2", "/slow-3")
        quick = await office.tenant("quick", "/quick")
        await office.emit(slow, 20)
        await office.emit(quick, 5)
        async with asyncio.timeout(10):
            while office.came("/quick") < 5:
                await courier.round()
                await asyncio.sleep(0.01)
        assert sum(office.came(f"/slow-{n}") for n in (1, 2, 3)) <= MAX_OF_A_TENANT
        assert max(office.came(f"/slow-{n}") for n in (1, 2, 3)) <= MAX_OF_AN_ENDPOINT
        go_on.set()
        async with asyncio.timeout(20):
            while office.results["delivered"] < 3 * 20 + 5:
                await courier.round()
                await courier.idle()
        assert len({(each.path, each.event_id) for each in office.receiver.received}) == 3 * 20 + 5

    in_office(body)


def test_two_couriers_bring_each_event_once(in_office):
    async def body(office: Office) -> None:
        await office.emit(await office.tenant("acme", "/hook"), 10)
        couriers = [office.courier(), office.courier()]
        async with asyncio.timeout(20):
            while office.results["delivered"] < 10:
                await asyncio.gather(*(courier.round() for courier in couriers))
                await asyncio.gather(*(courier.idle() for courier in couriers))
        assert office.came("/hook") == 10

    in_office(body)
