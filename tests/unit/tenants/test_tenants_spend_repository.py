"""What the ledger knows of spend windows, and who may know more, where clocks differ."""

import time

from tenants.quota.budgets import Window, period_of
from tenants.quota.spend_repository import GatewayLeaseRepository, SpendRepository
from tests.invoicing import HOUR, SECOND, book, instant, make_tenant, publish, request

DECEMBER = instant("2026-12-01")


def test_a_request_that_ended_by_an_engines_slow_clock_before_it_began_counts_in_its_month(with_database):
    async def body(database):
        tenant_id, card = await make_tenant(database), await publish(database)
        times = ((-3, -1), (2, -1), (2, -3600), (4, 5))  # seconds of December: by the gateway's clock, by the engine's
        for admitted, finished in times:
            one = request(tenant_id, card, DECEMBER + finished * SECOND, admitted_unix_ns=DECEMBER + admitted * SECOND)
            await book(database, one)
        price = 4 * 50_000 + 16 * 25_000 + 5 * 100_000 + 1_000_000
        async with database.session() as session:
            months = [period_of(DECEMBER + HOUR * sign, "UTC", 1) for sign in (-1, 1)]
            windows = [Window(f"tenant@{month.label}", 1, 0, month) for month in months]
            spent = [await SpendRepository(session).spent(tenant_id, window) for window in windows]

        assert spent == [price, 3 * price]

    with_database(body)


def test_a_gateways_lease_lasts_as_long_whatever_its_hosts_clock_says(database_url, with_database, monkeypatch):
    """On SQLite all are of one host, and have one clock."""
    skews = (-HOUR, HOUR) if database_url.startswith("postgresql") else (0, 0)
    real = time.time_ns

    async def body(database):
        for name, skew, lasts in (("behind", skews[0], 60 * SECOND), ("ahead", skews[1], -SECOND)):
            monkeypatch.setattr(time, "time_ns", lambda skew=skew: real() + skew)
            async with database.transaction() as session:
                await GatewayLeaseRepository(session).renew(name, lasts)
        async with database.session() as session:
            assert await GatewayLeaseRepository(session).alive() == {"behind"}

    with_database(body)
