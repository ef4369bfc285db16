"""A tenant with prices and requests, for tests of what is invoiced."""

import asyncio
import random
import uuid
from collections.abc import Callable, Coroutine
from datetime import datetime
from typing import Any, TypeVar
from zoneinfo import ZoneInfo

from tenants.database import Database
from tenants.invoices.invoices import Draft, InvoiceRepository, Issued, Order
from tenants.ledger import Ledger
from tenants.meter import RequestContext
from tenants.pricing import MAX_QUANTITY, PriceKey, RateCard, default_prices
from tenants.repositories import RateCardRepository, TenantRepository
from tenants.set_aside import UNKNOWN_RATE_CARD, set_aside
from tenants.settled import SettledRequest

_T = TypeVar("_T")
SECOND = 10**9
HOUR = 3600 * SECOND
DAY = 24 * HOUR


def instant(text: str, zone: str = "UTC") -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).timestamp()) * SECOND


def request(tenant_id: str, card: RateCard, finished_unix_ns: int, tokens=(20, 16, 5), **context) -> SettledRequest:
    fields = {
        "tenant_id": tenant_id,
        "key_id": "key_1",
        "request_id": str(uuid.uuid4()),
        "attempt": 0,
        "base_model": "smollm2",
        "model": "pirate",
        "adapter_version_id": "adv_1",
        "flow_class": "standard",
        "rate_card_id": card.rate_card_id,
        "admitted_unix_ns": finished_unix_ns - SECOND,
        "operation": "chat",
    } | context
    return SettledRequest(
        RequestContext(**fields), context.pop("outcome", 200), *tokens, 1, 2, 3, 4, 5, 6, 7, finished_unix_ns
    )


def random_requests(rng: random.Random, tenant_id: str, card: RateCard, start: int, end: int, count: int):
    """Of a few models and classes, at any time of [start, end)."""
    for _ in range(count):
        cached = rng.randint(0, 1000)
        tokens = cached + rng.randint(0, 5000), cached, rng.randint(1, 3000)
        model = rng.choice(["smollm2", "pirate", "support@3"])
        flow_class = rng.choice(["interactive", "standard", "batch"])
        yield request(tenant_id, card, rng.randrange(start, end), tokens, model=model, flow_class=flow_class)


def enormous(tenant_id: str, card: RateCard, finished_unix_ns: int, **context) -> SettledRequest:
    """With the dearest card it costs $6.7 million."""
    return request(tenant_id, card, finished_unix_ns, (MAX_QUANTITY, 0, MAX_QUANTITY), **context)


async def make_tenant(database: Database, name: str = "acme", time_zone: str = "UTC") -> str:
    async with database.transaction() as session:
        return (await TenantRepository(session).create(name, time_zone)).tenant_id


async def publish(
    database: Database, effective: str = "2020-01-01", prices: dict[PriceKey, int] | None = None
) -> RateCard:
    """As if it had been published a second before it took effect."""
    at = instant(effective)
    async with database.transaction() as session:
        return await RateCardRepository(session).publish(default_prices() | (prices or {}), at, at - 1)


async def book(database: Database, *requests: SettledRequest) -> None:
    async with database.transaction() as session:
        await Ledger().post(session, requests, {})


async def issue(
    database: Database, tenant_id: str, period: str, *, now: str = "2040-01-01", zone: str = "UTC", force: bool = False
) -> Issued:
    """``now`` is a local time of ``zone``."""
    draft = await prepare(database, Order(tenant_id, period, "Tenora GmbH", instant(now, zone), force))
    return (await keep(database, draft))[0]


async def prepare(database: Database, order: Order) -> Draft:
    async with database.session() as session:
        return await InvoiceRepository(session).prepare(order)


async def keep(database: Database, draft: Draft) -> tuple[Issued, bool]:
    async with database.transaction() as session:
        return await InvoiceRepository(session).keep(draft)


async def read(database: Database, invoice_id: str, tenant_id: str | None = None) -> Issued | None:
    async with database.session() as session:
        return await InvoiceRepository(session).get(invoice_id, tenant_id)


def charge_on(database_url: str, tenant_id: str, finished_unix_ns: int) -> None:
    """A request of a few dollars at the prices in force, in an installation's database."""

    async def work(database: Database) -> None:
        await book(database, await _enormous_now(database, tenant_id, finished_unix_ns))

    _on(database_url, work)


def set_aside_on(database_url: str, tenant_id: str, finished_unix_ns: int, **context) -> str:
    """The same, but set aside; its request id."""

    async def work(database: Database) -> str:
        one = await _enormous_now(database, tenant_id, finished_unix_ns, **context)
        async with database.transaction() as session:
            await set_aside(session, [one], UNKNOWN_RATE_CARD)
        return one.context.request_id

    return _on(database_url, work)


async def _enormous_now(database: Database, tenant_id: str, finished_unix_ns: int, **context) -> SettledRequest:
    async with database.session() as session:
        cards = await RateCardRepository(session).list_all()
    in_force = [card for card in cards if card.effective_unix_ns <= finished_unix_ns] or cards[:1]
    context = {"admitted_unix_ns": finished_unix_ns} | context
    return enormous(tenant_id, in_force[-1], finished_unix_ns, **context)


def _on(database_url: str, work: Callable[[Database], Coroutine[Any, Any, _T]]) -> _T:
    async def main() -> _T:
        database = Database(database_url)
        await database.start()
        try:
            return await work(database)
        finally:
            await database.close()

    return asyncio.run(main())
