"""What several processes do to one PostgreSQL at once: nothing is lost, and nobody waits for another in a circle.

Each test holds a row that the others need, so that they stand in a line of its choosing. (SQLite has one writer.)
"""

import asyncio
import json
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from sqlmodel import select, text

from gateway.idempotency import Idempotency
from tenants import keys
from tenants.audit_log import SERVER, AuditLog, Change
from tenants.database import Database
from tenants.deletion import delete_tenant
from tenants.deliveries import Attempt, DeliveryRepository
from tenants.errors import NotFound
from tenants.events import emit
from tenants.idempotency import IdempotencyKey, IdempotencyRepository
from tenants.key_repository import KeyRepository
from tenants.ledger import Ledger
from tenants.quota.alerts import AlertFold, alert_of_limits
from tenants.quota.wallet import WalletFold, WalletRepository
from tenants.repositories import TenantRepository
from tenants.tables import (
    AdapterMeterHead,
    AdapterVersion,
    ApiKey,
    Event,
    IdempotentRequest,
    Posting,
    RequestRecord,
    SpendTotal,
    UnbookedRecord,
    Wallet,
    WebhookDelivery,
)
from tenants.webhooks import WebhookRepository
from tests.invoicing import HOUR, book, instant, make_tenant, publish, request

NOW = instant("2026-11-30T12:00:00")
_WAITING = text("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'")
BOOKS = (WalletFold(), AlertFold())  # as a gateway has them
Step = Callable[[], Coroutine[Any, Any, Any]]


pytestmark = pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)


async def in_line(database: Database, held: str, *steps: Step) -> list[Any]:
    """Lets each step come to where it waits, one behind the other, while the row of ``held`` is locked; what becomes of
    them when it is let go."""
    tasks = []
    async with database.transaction() as session:
        await session.exec(text(f"{held} FOR UPDATE"))  # pyright: ignore[reportCallIssue, reportArgumentType]
        for number, step in enumerate(steps, 1):
            tasks.append(asyncio.create_task(step()))
            await _wait_for(database, number)
    return await asyncio.gather(*tasks, return_exceptions=True)


async def _wait_for(database: Database, number: int) -> None:
    async with asyncio.timeout(60):
        while True:
            async with database.session() as session:
                if (await session.exec(_WAITING)).scalar_one() >= number:  # pyright: ignore[reportCallIssue, reportArgumentType]
                    return
            await asyncio.sleep(0.01)


async def delete(database: Database, tenant_id: str) -> None:
    """As an operator's request does."""
    async with database.transaction() as session:
        await delete_tenant(session, tenant_id, NOW)
        await AuditLog(session).append(SERVER, Change("tenant.delete", tenant_id, None, None))


async def all_of(database: Database, table: Any) -> list[Any]:
    async with database.session() as session:
        return list((await session.exec(select(table))).all())


def test_of_two_first_grants_at_once_both_are_credit(with_database):
    async def body(database: Database) -> None:
        tenant_id = await make_tenant(database)

        async def grant(reference: str) -> None:
            async with database.transaction() as session:
                tenant = await TenantRepository(session).get(tenant_id)
                assert tenant is not None
                await WalletRepository(session).grant(tenant, 5, reference)

        done = await in_line(
            database, f"SELECT 1 FROM tenant WHERE tenant_id = '{tenant_id}'", lambda: grant("a"), lambda: grant("b")
        )

        assert done == [None, None]
        (wallet,) = await all_of(database, Wallet)
        assert (wallet.granted_picousd, wallet.num_grants) == (10, 2)

    with_database(body)


def test_two_limits_of_one_key_set_at_once_are_both_in_force(with_database, secrets):
    async def body(database: Database) -> None:
        tenant_id = await make_tenant(database)
        new = keys.issue("live", secrets)
        async with database.transaction() as session:
            await KeyRepository(session).create(tenant_id, new)

        async def limit(model: str) -> None:
            async with database.transaction() as session:
                repository = KeyRepository(session)
                before = await repository.get(tenant_id, new.minted.key_id)
                limits = {"model": model, "requests_per_minute": 1}
                assert await repository.set_limits(tenant_id, new.minted.key_id, limits) is before

        held = f"SELECT 1 FROM api_key WHERE key_id = '{new.minted.key_id}'"
        assert await in_line(database, held, lambda: limit("a"), lambda: limit("b")) == [None, None]
        (key,) = await all_of(database, ApiKey)
        assert {scope["model"] for scope in key.scoped_limits} == {"a", "b"}

    with_database(body)


def test_a_tenant_is_deleted_while_a_record_is_set_aside(with_database):
    async def body(database: Database) -> None:
        tenant_id, other = await make_tenant(database), await make_tenant(database, "other")
        card = await publish(database)
        await book(database, request(other, card, NOW))  # from now on there is a head of postings
        async with database.transaction() as session:
            version = {"adapter_version_id": "adv_1", "tenant_id": tenant_id, "name": "pirate", "version": 1}
            shape = {"sha256": "0" * 64, "base_model": "smollm2", "lora_rank": 8, "target_modules": [], "num_pairs": 1}
            times = {"size_bytes": 10**9, "warnings": [], "created_unix_ns": NOW - 3 * HOUR}
            session.add(AdapterVersion(**version, **shape, **times))
            session.add(AdapterMeterHead(head_id=1, hour=NOW // HOUR - 3, looked_unix_ns=NOW))
            await AuditLog(session).append(SERVER, Change("start", "", None, None))

        async def settle() -> None:
            async with database.transaction() as session:
                strange = request(other, card, NOW, rate_card_id="rc_unknown")
                await Ledger().post(session, [request(other, card, NOW), strange], {})

        held = "SELECT 1 FROM posting_head"
        assert await in_line(database, held, lambda: delete(database, tenant_id), settle) == [None, None]
        assert len(await all_of(database, UnbookedRecord)) == 1
        assert len(await all_of(database, Posting)) == 3

    with_database(body)


def test_a_key_is_rotated_while_its_tenant_is_deleted(with_database, secrets):
    async def body(database: Database) -> None:
        tenant_id = await make_tenant(database)
        old, new = keys.issue("live", secrets), keys.issue("live", secrets)
        async with database.transaction() as session:
            await KeyRepository(session).create(tenant_id, old)

        async def rotate() -> None:
            async with database.transaction() as session:
                await KeyRepository(session).rotate(tenant_id, old.minted.key_id, new, 0)

        held = f"SELECT 1 FROM tenant WHERE tenant_id = '{tenant_id}'"
        deleted, rotated = await in_line(database, held, lambda: delete(database, tenant_id), rotate)

        assert deleted is None
        assert isinstance(rotated, NotFound)
        assert await all_of(database, ApiKey) == []

    with_database(body)


@pytest.mark.parametrize("step", ["tell", "settle"])
def test_a_webhook_is_on_its_way_while_its_tenant_is_deleted(with_database, secrets, step: str):
    async def body(database: Database) -> None:
        tenant_id = await make_tenant(database)

        async def happens() -> None:
            async with database.transaction() as session:
                await emit(session, tenant_id, "adapter.ready", {})

        async with database.transaction() as session:
            endpoint = await WebhookRepository(session, secrets).create(tenant_id, "https://example.com/hook")
        await happens()
        async with database.transaction() as session:
            await DeliveryRepository(session).tell(NOW)
        async with database.transaction() as session:
            (claimed,) = await DeliveryRepository(session).claim(NOW, 1)
        await happens()

        async def deliver() -> None:
            async with database.transaction() as session:
                repository = DeliveryRepository(session)
                await (repository.tell(NOW) if step == "tell" else repository.settle(claimed, Attempt(200), NOW))

        held = f"SELECT 1 FROM webhook_endpoint WHERE endpoint_id = '{endpoint.endpoint_id}'"
        done = await in_line(database, held, deliver, lambda: delete(database, tenant_id))

        assert done == [None, None]
        assert await all_of(database, Event) == []

    with_database(body)


def test_events_that_came_since_are_told_of_no_endpoint_of_a_tenant_that_is_deleted(with_database, secrets):
    async def body(database: Database) -> None:
        tenant_id = await make_tenant(database)

        async def endpoint() -> str:
            async with database.transaction() as session:
                made = await WebhookRepository(session, secrets).create(tenant_id, "https://example.com/hook")
                return made.endpoint_id

        first, second = await endpoint(), await endpoint()
        while second > first:  # they lie in this order, and are locked in the other
            first, second = second, await endpoint()

        async def happens_and_is_told() -> None:
            async with database.transaction() as session:
                await emit(session, tenant_id, "adapter.ready", {})
            async with database.transaction() as session:
                await DeliveryRepository(session).tell(NOW)

        held = f"SELECT 1 FROM webhook_endpoint WHERE endpoint_id = '{second}'"
        done = await in_line(database, held, lambda: delete(database, tenant_id), happens_and_is_told)

        assert done == [None, None]
        assert await all_of(database, WebhookDelivery) == []

    with_database(body)


def test_a_booking_that_waits_for_a_limit_to_be_lowered_alerts_of_what_it_passes(with_database):
    async def body(database: Database) -> None:
        tenant_id, card = await make_tenant(database), await publish(database)

        async def lower(limit: int) -> None:
            async with database.transaction() as session:
                tenants = TenantRepository(session)
                await tenants.lock(tenant_id)
                await tenants.set_limits(tenant_id, {"spend_limit_picousd_per_month": limit, "spend_alerts": [50]})
                await alert_of_limits(session, tenant_id, NOW)

        async def settle() -> None:
            async with database.transaction() as session:
                await Ledger((AlertFold(),)).post(session, [request(tenant_id, card, NOW)], {})

        await lower(10**15)
        await settle()
        price = (await all_of(database, RequestRecord))[0].price_picousd
        assert await all_of(database, Event) == []

        held = f"SELECT 1 FROM spend_total WHERE tenant_id = '{tenant_id}'"
        assert await in_line(database, held, lambda: lower(4 * price), settle) == [None, None]

        (event,) = await all_of(database, Event)
        assert json.loads(event.data)["limit_picousd"] == 4 * price

    with_database(body)


def test_a_booking_in_flight_when_the_first_limit_is_set_counts_in_the_months_total(with_database):
    async def body(database: Database) -> None:
        tenant_id, card = await make_tenant(database), await publish(database)
        booked, limited = asyncio.Event(), asyncio.Event()

        async def limit() -> None:
            async with database.transaction() as session:
                tenants = TenantRepository(session)
                await tenants.lock(tenant_id)
                await tenants.set_limits(tenant_id, {"spend_limit_picousd_per_month": 10**15, "spend_alerts": [50]})
                await alert_of_limits(session, tenant_id, NOW)
            limited.set()

        async def settle() -> None:
            async with database.transaction() as session:
                await Ledger(BOOKS).post(session, [request(tenant_id, card, NOW)], {})
                booked.set()
                await _wait_for(database, 1)  # until the limit waits for us
            assert not limited.is_set()

        settling = asyncio.create_task(settle())
        await booked.wait()
        async with asyncio.timeout(30):
            await asyncio.gather(settling, limit())
        (total,) = await all_of(database, SpendTotal)
        assert total.picousd == (await all_of(database, RequestRecord))[0].price_picousd > 0

    with_database(body)


def test_a_booking_that_waits_for_the_first_limit_to_be_set_counts_in_the_months_total(with_database):
    async def body(database: Database) -> None:
        tenant_id, card = await make_tenant(database), await publish(database)

        async def settle() -> None:
            async with database.transaction() as session:
                await Ledger(BOOKS).post(session, [request(tenant_id, card, NOW)], {})

        async with database.transaction() as session:
            tenants = TenantRepository(session)
            await tenants.lock(tenant_id)
            settling = asyncio.create_task(settle())
            await _wait_for(database, 1)
            await tenants.set_limits(tenant_id, {"spend_limit_picousd_per_month": 10**15, "spend_alerts": [50]})
            await alert_of_limits(session, tenant_id, NOW)
        async with asyncio.timeout(30):
            await settling
        (total,) = await all_of(database, SpendTotal)
        assert total.picousd == (await all_of(database, RequestRecord))[0].price_picousd > 0

    with_database(body)


def test_a_gateway_whose_clock_is_an_hour_ahead_takes_no_idempotency_key_that_another_one_holds(
    with_database, secrets, monkeypatch
):
    """Its lease is told by the database's clock."""

    async def body(database: Database) -> None:
        stage = Idempotency(database, secrets)
        key = IdempotencyKey(await make_tenant(database), *secrets.idempotency_key("ten_a", "order"))

        async def claim(request_id: str) -> IdempotentRequest | None:
            async with database.transaction() as session:
                now_ns = await stage.now_ns(session)
                return await IdempotencyRepository(session).claim(key, b"h" * 32, request_id, now_ns)

        assert await claim("first") is None
        ahead_ns = time.time_ns() + 3600 * 10**9
        monkeypatch.setattr("time.time_ns", lambda: ahead_ns)
        held = await claim("second")
        assert held is not None
        assert held.request_id == "first"

    with_database(body)
