"""Webhook endpoints and deliveries in the database, on both kinds of it, under a clock of the test's own."""

import asyncio
import time

import pytest
from sqlmodel import select

from tenants.database import Database
from tenants.deliveries import (
    GIVE_UP_NS,
    JITTER,
    KEEP_NS,
    LEASE_NS,
    RETRY_AFTER_S,
    Attempt,
    Busy,
    Claimed,
    DeliveryRepository,
)
from tenants.errors import InvalidValue, LimitExceeded, NotFound
from tenants.events import EventRepository, emit, emit_test
from tenants.repositories import TenantRepository
from tenants.secrets import Secrets, rotate
from tenants.tables import Event, WebhookDelivery, WebhookEndpoint
from tenants.webhooks import MAX_ENDPOINTS, WebhookRepository, signing_secrets

S = 10**9
URL = "https://hooks.example/tenora"
DOWN, DONE = Attempt(0, "timeout"), Attempt(204)


class Post:
    """A database with tenants and endpoints, and a clock."""

    def __init__(self, database: Database, secrets: Secrets) -> None:
        self.database, self.secrets, self.now_ns = database, secrets, 10**18

    async def tenant(self, name: str) -> str:
        async with self.database.transaction() as session:
            return (await TenantRepository(session).create(name)).tenant_id

    async def endpoint(self, tenant_id: str, *kinds: str) -> str:
        async with self.database.transaction() as session:
            return (await WebhookRepository(session, self.secrets).create(tenant_id, URL, kinds)).endpoint_id

    async def emit(self, tenant_id: str, kind: str = "adapter.ready") -> None:
        async with self.database.transaction() as session:
            await emit(session, tenant_id, kind, {"name": "x"})

    async def tell(self) -> int:
        async with self.database.transaction() as session:
            return await DeliveryRepository(session).tell(self.now_ns)

    async def claim(self, **busy) -> list[Claimed]:
        async with self.database.transaction() as session:
            return await DeliveryRepository(session).claim(self.now_ns, 100, Busy(**busy))

    async def settle(self, claimed: Claimed, attempt: Attempt) -> str:
        async with self.database.transaction() as session:
            return await DeliveryRepository(session).settle(claimed, attempt, self.now_ns)

    async def rows(self, table) -> list:
        async with self.database.session() as session:
            return list((await session.exec(select(table))).all())

    async def one_on_the_way(self) -> str:
        """The tenant of one endpoint with one event told."""
        tenant_id = await self.tenant("acme")
        await self.endpoint(tenant_id)
        await self.emit(tenant_id)
        await self.tell()
        return tenant_id


@pytest.fixture
def with_post(with_database, secrets):
    return lambda body: with_database(lambda database: body(Post(database, secrets)))


# ── telling ──────────────────────────────────────────────────────────────────────────────────────


def test_an_event_goes_to_each_enabled_endpoint_of_its_tenant_that_wants_its_kind(with_post):
    async def body(post):
        acme, globex = await post.tenant("acme"), await post.tenant("globex")
        every, fitting = await post.endpoint(acme), await post.endpoint(acme, "adapter.ready", "credit.low")
        await post.endpoint(acme, "credit.low")
        await post.endpoint(globex)
        off = await post.endpoint(acme)
        async with post.database.transaction() as session:
            await WebhookRepository(session, post.secrets).change(acme, off, enabled=False)
        await post.emit(acme)
        assert (await post.tell(), await post.tell()) == (1, 0)
        assert {row.endpoint_id for row in await post.rows(WebhookDelivery)} == {every, fitting}

    with_post(body)


def test_a_test_event_goes_to_its_endpoint_alone_whatever_that_wants(with_post):
    async def body(post):
        acme = await post.tenant("acme")
        await post.endpoint(acme)
        asked = await post.endpoint(acme, "credit.low")
        async with post.database.transaction() as session:
            event_id = await emit_test(session, acme, asked)
        await post.tell()
        assert [(row.event_id, row.endpoint_id) for row in await post.rows(WebhookDelivery)] == [(event_id, asked)]

    with_post(body)


def test_events_told_by_several_at_once_get_each_number_once_and_one_delivery(with_post):
    async def body(post):
        acme = await post.tenant("acme")
        await post.endpoint(acme)
        for _ in range(20):
            await post.emit(acme)
        told = await asyncio.gather(*(post.tell() for _ in range(4)))
        assert sum(told) == 20
        assert sorted(event.number for event in await post.rows(Event)) == list(range(1, 21))
        assert len(await post.rows(WebhookDelivery)) == 20

    with_post(body)


def test_a_tenant_reads_its_own_told_events_from_a_number_on(with_post):
    async def body(post):
        acme, globex = await post.tenant("acme"), await post.tenant("globex")
        for tenant_id in (acme, globex, acme, acme):
            await post.emit(tenant_id)
            await post.tell()
        await post.emit(acme)  # not told yet: nobody reads on from behind it
        async with post.database.session() as session:
            events = EventRepository(session)
            assert [event.number for event in await events.page(acme, 0, 10)] == [1, 3, 4]
            assert [event.number for event in await events.page(acme, 1, 1)] == [3]
            assert await events.page(acme, 4, 10) == []

    with_post(body)


# ── claiming ─────────────────────────────────────────────────────────────────────────────────────


def test_of_many_claimers_one_gets_a_delivery(with_post):
    async def body(post):
        await post.one_on_the_way()
        claims = await asyncio.gather(*(post.claim() for _ in range(4)))
        assert sum(map(len, claims)) == 1

    with_post(body)


def test_a_claim_that_nobody_settles_is_another_ones_after_its_lease_under_the_same_id(with_post):
    async def body(post):
        await post.one_on_the_way()
        (dead,) = await post.claim()
        post.now_ns += LEASE_NS - 1
        assert await post.claim() == []
        post.now_ns += 1
        (alive,) = await post.claim()
        assert alive.event.event_id == dead.event.event_id
        assert await post.settle(dead, DONE) == ""  # it was not dead, but late: the claim is another one's
        assert await post.settle(alive, DONE) == "delivered"
        post.now_ns += 10 * LEASE_NS
        assert await post.claim() == []

    with_post(body)


def test_a_long_queue_of_one_tenant_leaves_turns_to_the_others(with_post):
    async def body(post):
        acme, globex = await post.tenant("acme"), await post.tenant("globex")
        slow, other = await post.endpoint(acme), await post.endpoint(globex)
        for _ in range(5):
            await post.emit(acme)
        await post.emit(globex)
        await post.tell()
        assert {claimed.endpoint.endpoint_id for claimed in await post.claim()} == {slow, other}
        assert [claimed.endpoint.endpoint_id for claimed in await post.claim()] == [slow]
        assert await post.claim(endpoints=[slow]) == []
        assert await post.claim(tenants=[acme]) == []

    with_post(body)


# ── settling ─────────────────────────────────────────────────────────────────────────────────────


def test_what_fails_is_tried_again_later_and_later_and_at_last_given_up(with_post):
    async def body(post):
        await post.one_on_the_way()
        for wait_s in RETRY_AFTER_S:
            (claimed,) = await post.claim()
            assert await post.settle(claimed, DOWN) == "pending"
            post.now_ns += wait_s * S - 1
            assert await post.claim() == []
            post.now_ns += int(wait_s * S * JITTER) + 1
        (claimed,) = await post.claim()
        assert await post.settle(claimed, Attempt(500)) == "failed"
        (row,) = await post.rows(WebhookDelivery)
        assert (row.state, row.attempts, row.last_status) == ("failed", len(RETRY_AFTER_S) + 1, 500)
        (endpoint,) = await post.rows(WebhookEndpoint)
        assert (endpoint.status, endpoint.failing_since_unix_ns) == ("enabled", 10**18)

    with_post(body)


def test_an_endpoint_that_says_gone_is_told_nothing_more(with_post):
    async def body(post):
        acme = await post.one_on_the_way()
        await post.emit(acme)
        await post.tell()
        (claimed,) = await post.claim()
        assert await post.settle(claimed, Attempt(410)) == "failed"
        assert [row.state for row in await post.rows(WebhookDelivery)] == ["failed", "failed"]
        assert [endpoint.status for endpoint in await post.rows(WebhookEndpoint)] == ["gone"]
        await post.emit(acme)
        assert await post.tell() == 1  # it can be read all the same
        assert len(await post.rows(WebhookDelivery)) == 2

    with_post(body)


def test_an_endpoint_that_fails_for_days_is_disabled_and_one_success_forgives_all(with_post):
    async def body(post):
        acme = await post.one_on_the_way()

        async def attempt(outcome: Attempt) -> WebhookEndpoint:
            await post.emit(acme)
            await post.tell()
            (claimed,) = await post.claim()
            await post.settle(claimed, outcome)
            return (await post.rows(WebhookEndpoint))[0]

        await attempt(DOWN)
        post.now_ns += GIVE_UP_NS - 1
        assert (await attempt(DONE)).failing_since_unix_ns is None
        post.now_ns += 1
        assert (await attempt(DOWN)).status == "enabled"
        post.now_ns += GIVE_UP_NS
        assert (await attempt(DOWN)).status == "failing"
        assert {row.state for row in await post.rows(WebhookDelivery)} == {"delivered", "failed"}

    with_post(body)


def test_finished_deliveries_are_removed_when_they_are_old_and_pending_ones_never(with_post):
    async def body(post):
        acme = await post.one_on_the_way()
        (claimed,) = await post.claim()
        await post.settle(claimed, DONE)
        await post.emit(acme)
        await post.tell()

        async def purge() -> int:
            async with post.database.transaction() as session:
                return await DeliveryRepository(session).purge(post.now_ns)

        post.now_ns += KEEP_NS - 1
        assert await purge() == 0
        post.now_ns += 1
        assert await purge() == 1
        assert [row.state for row in await post.rows(WebhookDelivery)] == ["pending"]
        assert len(await post.rows(Event)) == 2

    with_post(body)


def test_an_old_test_is_forgotten_with_its_delivery(with_post):
    async def body(post):
        acme = await post.tenant("acme")
        async with post.database.transaction() as session:
            await emit_test(session, acme, await post.endpoint(acme))
        post.now_ns = time.time_ns()
        await post.tell()
        (claimed,) = await post.claim()
        for now_ns, left in ((post.now_ns, 1), (post.now_ns + 2 * KEEP_NS, 1)):
            async with post.database.transaction() as session:
                await DeliveryRepository(session).purge(now_ns)
            assert len(await post.rows(Event)) == left
        await post.settle(claimed, DONE)
        async with post.database.transaction() as session:
            await DeliveryRepository(session).purge(post.now_ns + 2 * KEEP_NS)
        assert await post.rows(Event) == []

    with_post(body)


# ── endpoints ────────────────────────────────────────────────────────────────────────────────────


def test_endpoints_are_their_tenants_own_and_at_most_ten(with_post):
    async def body(post):
        acme, globex = await post.tenant("acme"), await post.tenant("globex")
        ids = [await post.endpoint(acme) for _ in range(MAX_ENDPOINTS)]
        with pytest.raises(LimitExceeded):
            await post.endpoint(acme)
        await post.endpoint(globex)
        async with post.database.transaction() as session:
            theirs = WebhookRepository(session, post.secrets)
            assert len(await theirs.list_all(globex)) == 1
            for ask in (
                theirs.get(globex, ids[0]),
                theirs.change(globex, ids[0], enabled=False),
                theirs.rotate_secret(globex, ids[0], 0),
                theirs.delete(globex, ids[0]),
                theirs.deliveries(globex, ids[0], 10),
            ):
                with pytest.raises(NotFound):
                    await ask
            for wrong in ({"kinds": ["adapter.unheard"]}, {"description": "a\0b"}, {"description": "ä" * 33}):
                with pytest.raises(InvalidValue):
                    await theirs.create(globex, URL, **wrong)
            for no_id in ("", "\0", "whe_" + "\ud800", "whe_" + "A" * 24):
                with pytest.raises(NotFound):
                    await theirs.get(globex, no_id)
                with pytest.raises(NotFound):
                    await EventRepository(session).number_of(globex, no_id)
        with pytest.raises(NotFound):
            await post.endpoint("ten_nobody")

    with_post(body)


def test_a_deleted_tenants_endpoints_deliveries_and_events_are_gone(with_post):
    async def body(post):
        acme = await post.one_on_the_way()
        async with post.database.transaction() as session:
            await TenantRepository(session).delete(acme)
        for table in (WebhookDelivery, WebhookEndpoint, Event):
            assert await post.rows(table) == []

    with_post(body)


def test_a_deleted_endpoint_takes_its_deliveries_along_and_a_late_attempt_settles_nothing(with_post):
    async def body(post):
        acme = await post.one_on_the_way()
        (claimed,) = await post.claim()
        async with post.database.transaction() as session:
            await WebhookRepository(session, post.secrets).delete(acme, claimed.endpoint.endpoint_id)
        assert await post.settle(claimed, DONE) == ""
        assert await post.rows(WebhookDelivery) == []
        assert len(await post.rows(Event)) == 1

    with_post(body)


# ── secrets ──────────────────────────────────────────────────────────────────────────────────────


def test_a_rotated_secret_signs_beside_the_new_one_until_its_time_is_over(with_post):
    async def body(post):
        acme = await post.tenant("acme")
        endpoint_id = await post.endpoint(acme)
        (endpoint,) = await post.rows(WebhookEndpoint)
        (first,) = signing_secrets(post.secrets, endpoint, 0)
        async with post.database.transaction() as session:
            endpoint = await WebhookRepository(session, post.secrets).rotate_secret(acme, endpoint_id, 60)
        end = endpoint.old_secret_until_unix_ns
        new, old = signing_secrets(post.secrets, endpoint, end - 1)
        assert old.reveal() == first.reveal() != new.reveal()
        assert [secret.reveal() for secret in signing_secrets(post.secrets, endpoint, end)] == [new.reveal()]

    with_post(body)


def test_webhook_secrets_differ_by_endpoint_and_name_and_outlive_a_rotation_of_the_installation(tmp_path):
    path = tmp_path / "secrets.json"
    before = Secrets.load_or_create(path)
    name = before.new_webhook_secret_name()
    secret = before.webhook_secret("whe_a", name).reveal()
    after = rotate(path)
    assert len(secret) == 32
    assert after.webhook_secret("whe_a", name).reveal() == secret
    others = [after.webhook_secret("whe_b", name), after.webhook_secret("whe_a", after.new_webhook_secret_name())]
    assert secret not in [other.reveal() for other in others]
    assert after.new_webhook_secret_name().startswith("2.")
