"""Prepaid credit: reserved by a conditional UPDATE, resolved once by the record, never given away twice."""

import asyncio
import json
from dataclasses import replace

import pytest
from sqlmodel import select

from tenants.errors import GrantDiffers, InvalidValue
from tenants.ledger import Ledger
from tenants.meter import RequestContext
from tenants.pricing import RateCard, default_prices
from tenants.quota.alerts import AlertFold, alert_of_limits
from tenants.quota.wallet import MAX_PICOUSD, Hold, WalletFold, WalletRepository
from tenants.repositories import TenantRepository
from tenants.settled import SettledRequest
from tenants.tables import Event, Tenant, Wallet, WalletHold

CARD = RateCard("rc_1", 1, 1, default_prices())
PRICE = 3 * 50_000 + 4 * 100_000 + 1_000_000
ADMITTED_NS = 1_800_000_000 * 10**9


def hold(number: int, picousd: int, tenant_id: str, attempt: int = 0) -> Hold:
    return Hold(tenant_id, f"request-{number}", attempt, "gateway", picousd)


def record(number: int, tenant_id: str, outcome: int = 200, attempt: int = 0, **more) -> SettledRequest:
    context = RequestContext(
        tenant_id, "k1", f"request-{number}", attempt, "tiny", "tiny", "", "standard", "rc_1",
        more.pop("admitted_unix_ns", ADMITTED_NS),
    )  # fmt: skip
    tokens = {"prompt_tokens": 3, "cached_tokens": 0, "output_tokens": 4 if outcome else 0}
    return SettledRequest(context, outcome, **tokens, **dict.fromkeys(
        ("queue_ns", "prefill_ns", "decode_ns", "post_ns", "network_ns", "first_token_ns", "gpu_ns"), 0
    ), finished_unix_ns=context.admitted_unix_ns + 10**9)  # fmt: skip


async def prepaid(database, amount: int, name: str = "acme", **limits) -> str:
    async with database.transaction() as session:
        tenant = await TenantRepository(session).create(name, limits=limits)
        if amount:
            await WalletRepository(session).grant(tenant, amount, "first")
    return tenant.tenant_id


async def ask(database, question, *arguments):
    async with database.transaction() as session:
        return await question(WalletRepository(session), *arguments)


async def book(database, *records: SettledRequest) -> None:
    async with database.transaction() as session:
        await Ledger((WalletFold(), AlertFold())).post(session, records, {"rc_1": CARD})


async def wallet_of(database, tenant_id: str) -> tuple[int, int, int]:
    async with database.session() as session:
        found = await session.get(Wallet, tenant_id)
        return found.granted_picousd, found.reserved_picousd, found.spent_picousd


def test_credit_is_reserved_to_the_last_picousd_and_not_one_more(with_database):
    async def body(database):
        tenant_id = await prepaid(database, MAX_PICOUSD)
        assert await ask(database, WalletRepository.reserve, hold(1, MAX_PICOUSD - 1, tenant_id))
        assert not await ask(database, WalletRepository.reserve, hold(2, 2, tenant_id))
        assert await ask(database, WalletRepository.reserve, hold(3, 1, tenant_id))
        assert await wallet_of(database, tenant_id) == (MAX_PICOUSD, MAX_PICOUSD, 0)

    with_database(body)


def test_of_many_at_once_only_as_many_are_held_as_the_credit_has(with_database):
    async def body(database):
        tenant_id = await prepaid(database, 1000)
        wanted = [ask(database, WalletRepository.reserve, hold(number, 99, tenant_id)) for number in range(24)]
        assert (await asyncio.gather(*wanted)).count(True) == 10
        assert await wallet_of(database, tenant_id) == (1000, 990, 0)

    with_database(body)


def test_the_record_frees_what_it_did_not_use_once_however_often_it_comes(with_database):
    async def body(database):
        tenant_id = await prepaid(database, 10 * PRICE)
        await ask(database, WalletRepository.reserve, hold(1, 4 * PRICE, tenant_id))
        await asyncio.gather(*(book(database, record(1, tenant_id)) for _ in range(3)))
        assert await wallet_of(database, tenant_id) == (10 * PRICE, 0, PRICE)
        assert not await ask(database, WalletRepository.give_back, tenant_id, "request-1", 0)
        assert await wallet_of(database, tenant_id) == (10 * PRICE, 0, PRICE)

    with_database(body)


def test_a_use_over_the_hold_is_debited_in_full_and_refuses_what_comes(with_database):
    async def body(database):
        tenant_id = await prepaid(database, PRICE)
        await ask(database, WalletRepository.reserve, hold(1, 5, tenant_id))
        await ask(database, WalletRepository.reserve, hold(2, PRICE - 5, tenant_id))
        await book(database, record(1, tenant_id), record(2, tenant_id))
        assert await wallet_of(database, tenant_id) == (PRICE, 0, 2 * PRICE)
        assert not await ask(database, WalletRepository.reserve, hold(3, 1, tenant_id))

    with_database(body)


def test_a_record_that_comes_after_its_hold_was_given_back_is_debited_all_the_same(with_database):
    """By a sweep that knew of nobody who ran it: a gateway whose lease had run out, say."""

    async def body(database):
        tenant_id = await prepaid(database, 10 * PRICE)
        assert await ask(database, WalletRepository.reserve, hold(1, 2 * PRICE, tenant_id))
        assert await ask(database, WalletRepository.give_back, tenant_id, "request-1", 0)
        for _ in range(2):
            await book(database, record(1, tenant_id))

        assert await wallet_of(database, tenant_id) == (10 * PRICE, 0, PRICE)
        async with database.session() as session:
            (kept,) = (await session.exec(select(WalletHold))).all()
        assert (kept.spent_picousd, kept.gateway) == (PRICE, "")

    with_database(body)


def test_a_hold_whose_record_is_booked_is_not_given_back(with_database):
    async def body(database):
        tenant_id = await prepaid(database, 10 * PRICE)
        assert await ask(database, WalletRepository.reserve, hold(1, 2 * PRICE, tenant_id))
        async with database.transaction() as session:
            await Ledger().post(session, [record(1, tenant_id)], {"rc_1": CARD})

        assert not await ask(database, WalletRepository.give_back, tenant_id, "request-1", 0)
        assert await wallet_of(database, tenant_id) == (10 * PRICE, 2 * PRICE, 0)

    with_database(body)


def test_a_lost_request_gives_its_hold_back(with_database):
    async def body(database):
        tenant_id = await prepaid(database, PRICE)
        await ask(database, WalletRepository.reserve, hold(1, PRICE, tenant_id))
        await book(database, record(1, tenant_id, outcome=0))
        assert await wallet_of(database, tenant_id) == (PRICE, 0, 0)

    with_database(body)


@pytest.mark.parametrize("lost_is_first", [True, False])
def test_a_second_attempt_has_its_own_hold_whenever_the_record_of_the_first_comes(with_database, lost_is_first):
    async def body(database):
        tenant_id = await prepaid(database, 2 * PRICE)
        await ask(database, WalletRepository.reserve, hold(1, 2 * PRICE, tenant_id))
        if lost_is_first:
            await book(database, record(1, tenant_id, outcome=0))
        assert await ask(database, WalletRepository.begin_attempt, hold(1, 2 * PRICE, tenant_id, attempt=1))
        if not lost_is_first:
            await book(database, record(1, tenant_id, outcome=0))
        assert await wallet_of(database, tenant_id) == (2 * PRICE, 2 * PRICE, 0)
        await book(database, record(1, tenant_id, attempt=1))
        assert await wallet_of(database, tenant_id) == (2 * PRICE, 0, PRICE)

    with_database(body)


def test_an_extension_holds_more_or_nothing(with_database):
    async def body(database):
        tenant_id = await prepaid(database, 100)
        await ask(database, WalletRepository.reserve, hold(1, 60, tenant_id))
        assert not await ask(database, WalletRepository.extend, hold(1, 41, tenant_id))
        assert await ask(database, WalletRepository.extend, hold(1, 40, tenant_id))
        assert not await ask(database, WalletRepository.extend, replace(hold(1, 0, tenant_id), request_id="nobody"))
        async with database.session() as session:
            (row,) = (await session.exec(select(WalletHold))).all()
        assert row.amount_picousd == 100
        assert await wallet_of(database, tenant_id) == (100, 100, 0)

    with_database(body)


def test_a_reference_grants_once_and_never_another_amount(with_database):
    async def body(database):
        tenant_id = await prepaid(database, 70)
        async with database.session() as session:
            tenant = await session.get(Tenant, tenant_id)
        assert tenant.is_prepaid
        for _ in range(2):
            await ask(database, WalletRepository.grant, tenant, 30, "second")
        with pytest.raises(GrantDiffers):
            await ask(database, WalletRepository.grant, tenant, 31, "second")
        for amount, reference in ((0, "x"), (-1, "x"), (MAX_PICOUSD + 1, "x"), (1, ""), (1, "x" * 129), (1, "\n")):
            with pytest.raises(InvalidValue):
                await ask(database, WalletRepository.grant, tenant, amount, reference)
        assert await wallet_of(database, tenant_id) == (100, 0, 0)

    with_database(body)


def test_credit_of_more_than_ten_million_dollars_over_time_stays_exact(with_database):
    async def body(database):
        tenant_id = await prepaid(database, MAX_PICOUSD)
        async with database.transaction() as session:
            wallet = await session.get(Wallet, tenant_id)
            wallet.spent_picousd = MAX_PICOUSD - 5
            session.add(wallet)
        async with database.session() as session:
            tenant = await session.get(Tenant, tenant_id)
        with pytest.raises(InvalidValue):
            await ask(database, WalletRepository.grant, tenant, MAX_PICOUSD, "too much at a time")
        await ask(database, WalletRepository.grant, tenant, MAX_PICOUSD - 5, "second")
        assert await wallet_of(database, tenant_id) == (MAX_PICOUSD, 0, 0)

    with_database(body)


# ── alerts ───────────────────────────────────────────────────────────────────────────────────────


async def events(database, kind: str) -> list[dict]:
    async with database.session() as session:
        return [json.loads(row.data) for row in (await session.exec(select(Event).where(Event.kind == kind))).all()]


def test_an_alert_comes_where_the_booked_spend_passes_a_threshold_once_a_month(with_database):
    async def body(database):
        limits = {"spend_limit_picousd_per_month": 10 * PRICE, "spend_alerts": [20, 90]}
        tenant_id = await prepaid(database, 0, **limits)
        seen = []
        for number in range(11):
            await book(database, record(number, tenant_id))
            seen.append([event["percent"] for event in await events(database, "budget.alert")])
        assert seen == [[], *[[20]] * 7, *[[20, 90]] * 3]
        first = (await events(database, "budget.alert"))[0]
        assert first == {
            "period": "2027-01-01", "percent": 20, "limit_picousd": 10 * PRICE, "spent_picousd": 2 * PRICE
        }  # fmt: skip
        later = ADMITTED_NS + 31 * 86_400 * 10**9
        await book(database, *(record(number, tenant_id, admitted_unix_ns=later) for number in range(20, 22)))
        assert [event["period"] for event in await events(database, "budget.alert")] == [
            "2027-01-01", "2027-01-01", "2027-02-01"
        ]  # fmt: skip

    with_database(body)


def test_the_months_of_alerts_begin_on_the_tenants_own_day(with_database):
    async def body(database):
        tenant_id = await prepaid(database, 0, spend_limit_picousd_per_month=2 * PRICE, spend_alerts=[50])
        async with database.transaction() as session:
            await TenantRepository(session).set_billing_anchor_day(tenant_id, 31)
        await book(database, record(0, tenant_id))
        (alert,) = await events(database, "budget.alert")
        assert (alert["period"], alert["spent_picousd"]) == ("2026-12-31", PRICE)

    with_database(body)


def test_a_limit_that_is_set_in_mid_month_alerts_of_what_was_spent_before(with_database):
    async def body(database):
        tenant_id = await prepaid(database, 0)
        await book(database, *(record(number, tenant_id) for number in range(5)))
        async with database.transaction() as session:
            await TenantRepository(session).set_limits(tenant_id, {"spend_limit_picousd_per_month": 10 * PRICE})
        await book(database, record(5, tenant_id))
        (alert,) = await events(database, "budget.alert")
        assert (alert["percent"], alert["spent_picousd"]) == (50, 6 * PRICE)

    with_database(body)


def test_low_credit_is_told_once_until_there_is_more(with_database):
    async def body(database):
        tenant_id = await prepaid(database, 4 * PRICE)
        for number in range(3):
            await ask(database, WalletRepository.reserve, hold(number, PRICE, tenant_id))
            await book(database, record(number, tenant_id))
        assert [event["percent"] for event in await events(database, "credit.low")] == [50]
        async with database.session() as session:
            tenant = await session.get(Tenant, tenant_id)
        await ask(database, WalletRepository.grant, tenant, PRICE, "more")
        await ask(database, WalletRepository.reserve, hold(9, PRICE, tenant_id))
        await book(database, record(9, tenant_id))
        assert sorted(event["percent"] for event in await events(database, "credit.low")) == [50, 50, 80]

    with_database(body)


@pytest.mark.parametrize("alerts", [[0], [101], [50, 20], [50, 50], [1.5], "50", list(range(1, 12)), [True], None])
def test_alerts_are_a_rising_list_of_percentages(with_database, alerts):
    async def body(database):
        with pytest.raises(InvalidValue):
            await prepaid(database, 0, spend_alerts=alerts)

    with_database(body)


async def change_limits(database, tenant_id: str, **limits) -> list[tuple[int, int]]:
    """(percent, limit) of all alerts since the beginning, behind the change."""
    async with database.transaction() as session:
        tenants = TenantRepository(session)
        await tenants.lock(tenant_id)
        await tenants.set_limits(tenant_id, limits)
        await alert_of_limits(session, tenant_id, ADMITTED_NS)
    return [(event["percent"], event["limit_picousd"]) for event in await events(database, "budget.alert")]


def test_a_limit_below_what_is_spent_already_alerts_at_once_and_once(with_database):
    async def body(database):
        tenant_id = await prepaid(database, 0, spend_alerts=[50, 80, 100])
        await book(database, *(record(number, tenant_id) for number in range(4)))
        assert await change_limits(database, tenant_id, spend_limit_picousd_per_month=10 * PRICE) == []
        lowered = [(50, 5 * PRICE), (80, 5 * PRICE)]
        assert await change_limits(database, tenant_id, spend_limit_picousd_per_month=5 * PRICE) == lowered
        below = [*lowered, (100, 3 * PRICE)]
        assert await change_limits(database, tenant_id, spend_limit_picousd_per_month=3 * PRICE) == below
        assert await change_limits(database, tenant_id, spend_limit_picousd_per_month=2 * PRICE) == below
        await book(database, record(4, tenant_id))
        assert len(await events(database, "budget.alert")) == 3

    with_database(body)


def test_a_threshold_that_is_set_below_what_is_spent_already_alerts_at_once(with_database):
    async def body(database):
        limit = 10 * PRICE
        tenant_id = await prepaid(database, 0, spend_limit_picousd_per_month=limit, spend_alerts=[90])
        await book(database, *(record(number, tenant_id) for number in range(4)))
        assert await change_limits(database, tenant_id, spend_alerts=[30, 90]) == [(30, limit)]

    with_database(body)


def test_a_limit_of_nothing_alerts_only_whom_it_stops(with_database):
    async def body(database):
        tenant_id = await prepaid(database, 0, spend_alerts=[100])
        assert await change_limits(database, tenant_id, spend_limit_picousd_per_month=0) == []
        await book(database, record(0, tenant_id))
        assert await change_limits(database, tenant_id, weight=2) == [(100, 0)]

    with_database(body)


def test_thresholds_of_credit_that_are_passed_already_alert_when_they_are_set(with_database):
    async def body(database):
        tenant_id = await prepaid(database, 10 * PRICE, spend_alerts=[90])
        assert await ask(database, WalletRepository.reserve, hold(0, PRICE, tenant_id))
        await book(database, record(0, tenant_id))
        await change_limits(database, tenant_id, spend_alerts=[10, 90])
        assert [event["percent"] for event in await events(database, "credit.low")] == [10]

    with_database(body)
