"""Limits of money through a whole gateway: reserved, settled, refused, and counted anew when the store lost them."""

import concurrent.futures
import contextlib
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from gateway_harness import House, eventually, rows, running_house
from redis import Redis

from tenants.key_repository import KeyRepository
from tenants.quota.budgets import period_of
from tenants.quota.spend_repository import GatewayLeaseRepository
from tenants.quota.wallet import Hold, WalletRepository
from tenants.repositories import TenantRepository
from tenants.tables import LedgerEntry, RequestRecord, WalletHold
from tests.months import stay_within_a_month

BODY = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
PRICE = 3 * 50_000 + 4 * 100_000 + 1_000_000  # of BODY


@pytest.fixture(scope="module")
def spending(tmp_path_factory) -> Iterator[House]:
    with running_house(
        tmp_path_factory.mktemp("spend"), "--kv-blocks", "512", "--max-running", "8", context_tokens=2048
    ) as house:
        yield house


@pytest.fixture(autouse=True)
def _one_month() -> None:
    stay_within_a_month()


def flush(house: House) -> None:
    with Redis.from_url(house.valkey.url) as redis:
        redis.flushall()


def window_sum(house: House, key: str, scope: str = "tenant") -> int:
    label = period_of(time.time_ns(), "UTC", 1).label
    with Redis.from_url(house.valkey.url) as redis:
        return int(redis.hget(f"tn:q2:{{{house.tenants[key]}}}:s:{scope}@{label}", "n") or -1)


def billed(house: House, key: str) -> int:
    return sum(entry.amount_picousd for entry in rows(house, key, LedgerEntry))


def set_limits(house: House, key: str, model: str | None = None, **limits) -> str:
    """Of the key; its id."""

    async def work() -> str:
        async with house.parts.database.transaction() as session:
            (row,) = await KeyRepository(session).list_all(house.tenants[key])
            changes = limits | ({"model": model} if model else {})
            await KeyRepository(session).set_limits(row.tenant_id, row.key_id, changes)
        await house.parts.pipeline.directory.refresh()
        return row.key_id

    return house.on_loop(work())


def test_the_month_ends_at_its_limit_with_402_and_a_retry_does_not_help(spending: House):
    key = spending.new_tenant("three", spend_limit_picousd_per_month=3 * PRICE)
    with spending.http(key) as http:
        answers = [http.post("/completions", json=BODY) for _ in range(4)]
        small = http.post("/completions", json=BODY | {"max_tokens": 1})

    assert [answer.status_code for answer in answers] == [200, 200, 200, 402]
    assert small.status_code == 402
    error = answers[3].json()["error"]
    assert (error["type"], error["code"]) == ("insufficient_quota", "spend_limit_exceeded")
    assert "this account's limit" in error["message"]
    assert "tokens; a smaller max_tokens needs less" in error["message"]
    ends = datetime.fromtimestamp(period_of(time.time_ns(), "UTC", 1).end_unix_ns // 10**9, UTC)
    assert ends.strftime("%Y-%m-%dT%H:%M:%SZ") in error["message"]
    assert answers[3].headers["x-should-retry"] == "false"
    eventually(lambda: billed(spending, key) == 3 * PRICE)
    eventually(lambda: window_sum(spending, key) == 3 * PRICE)


def test_what_was_reserved_and_not_used_is_free_at_once(spending: House):
    key = spending.new_tenant("stopper", spend_limit_picousd_per_month=40 * 100_000 + 2 * PRICE)
    with spending.http(key) as http:
        first = http.post(
            "/completions", json=BODY | {"max_tokens": 40, "ignore_eos": False, "stop_token_ids": list(range(64))}
        )
        second = http.post("/completions", json=BODY | {"max_tokens": 40})

    assert first.json()["usage"]["completion_tokens"] < 40
    assert second.status_code == 200


def test_a_limit_of_a_key_and_of_its_use_of_one_model_bind_too(spending: House):
    key = spending.new_tenant("keyed")
    key_id = set_limits(spending, key, spend_limit_picousd_per_month=2 * PRICE)
    with spending.http(key) as http:
        by_key = [http.post("/completions", json=BODY).status_code for _ in range(3)]
        set_limits(spending, key, spend_limit_picousd_per_month=None)
        free = http.post("/completions", json=BODY).status_code
        set_limits(spending, key, model="tiny", spend_limit_picousd_per_month=3 * PRICE)
        by_model = http.post("/completions", json=BODY)

    assert by_key == [200, 200, 402]
    assert free == 200
    assert by_model.status_code == 402  # three were spent before that limit was set
    assert "for the model tiny" in by_model.json()["error"]["message"]
    eventually(lambda: window_sum(spending, key, f"key:{key_id}:model:tiny") == 3 * PRICE)


def test_what_the_store_lost_is_counted_from_the_ledger_and_from_what_runs(spending: House):
    key = spending.new_tenant("flushed", spend_limit_picousd_per_month=2 * PRICE + 100 * 100_000)
    with spending.http(key) as http:
        assert http.post("/completions", json=BODY).status_code == 200
        streamed = BODY | {"max_tokens": 100, "stream": True}
        with http.stream("POST", "/completions", json=streamed) as answer:
            pieces = answer.iter_text()
            next(pieces)
            flush(spending)
            while_it_runs = http.post("/completions", json=BODY)
            assert while_it_runs.status_code == 402
            "".join(pieces)
    total = PRICE + PRICE + 96 * 100_000
    eventually(lambda: billed(spending, key) == total)
    eventually(lambda: window_sum(spending, key) == total)


def test_a_flush_under_load_lets_nobody_over_the_limit(spending: House):
    limit = 23 * PRICE
    key = spending.new_tenant("crowd", spend_limit_picousd_per_month=limit)

    def ask(number: int) -> int:
        with spending.http(key) as http:
            return http.post("/completions", json=BODY).status_code

    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        asked = [pool.submit(ask, number) for number in range(40)]
        eventually(lambda: len(rows(spending, key, RequestRecord)) >= 4)
        flush(spending)
        codes = [one.result() for one in asked]

    served = codes.count(200)
    assert set(codes) <= {200, 402, 503}
    assert served <= 23
    with spending.http(key) as http:  # what the flush refused for a moment is there afterwards
        later = [http.post("/completions", json=BODY).status_code for _ in range(24 - served)]
    assert later == [200] * (23 - served) + [402]
    eventually(lambda: billed(spending, key) == limit)
    eventually(lambda: window_sum(spending, key) == limit)


def test_a_request_that_is_lost_costs_nothing_in_its_window(spending: House):
    key = spending.new_tenant("unlucky", spend_limit_picousd_per_month=PRICE + 1900 * 100_000)
    with spending.http(key) as http:
        with http.stream("POST", "/completions", json=BODY | {"max_tokens": 1900, "stream": True}) as answer:
            pieces = answer.iter_text()
            next(pieces)
            spending.engine.kill()
            assert "engine_lost" in "".join(pieces)
        spending.engine.start()
        eventually(spending.parts.catalog.models["tiny"].connected)
        eventually(lambda: window_sum(spending, key) == 0)
        assert http.post("/completions", json=BODY).status_code == 200


def test_a_gateway_whose_lease_has_run_out_and_is_not_renewed_takes_nothing_that_counts_as_money(
    spending: House, monkeypatch
):
    key = spending.new_tenant("fenced", spend_limit_picousd_per_month=9 * PRICE)
    free = spending.new_tenant("unfenced")
    recount = spending.parts.pipeline.admission.limiter.spending
    monkeypatch.setattr("gateway.admission.LEDGER_WAIT_S", 0.2)
    with spending.http(key) as http, spending.http(free) as other, locked_ledger(spending):
        recount._fenced_at_s = 0.0
        refused = http.post("/completions", json=BODY)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "billing_unavailable")
        assert other.post("/completions", json=BODY).status_code == 200


def test_a_gateway_that_stood_still_for_longer_than_its_lease_renews_it_and_refuses_nobody(spending: House):
    key = spending.new_tenant("slept", spend_limit_picousd_per_month=9 * PRICE)
    recount = spending.parts.pipeline.admission.limiter.spending
    with spending.http(key) as http:
        recount._fenced_at_s = 0.0
        assert http.post("/completions", json=BODY).status_code == 200
    assert not recount.is_fenced


def test_another_gateway_is_waited_for_until_it_has_said_what_it_holds_or_its_lease_is_over(
    spending: House, monkeypatch
):
    key = spending.new_tenant("two", spend_limit_picousd_per_month=9 * PRICE)

    async def lease(seconds: float) -> None:
        async with spending.parts.database.transaction() as session:
            await GatewayLeaseRepository(session).renew("another", int(seconds * 1e9))

    spending.on_loop(lease(600))
    monkeypatch.setattr("gateway.limits.recount.WAIT_S", 0.3)
    with spending.http(key) as http:
        refused = http.post("/completions", json=BODY)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "store_unavailable")
        spending.on_loop(lease(-1))
        eventually(lambda: http.post("/completions", json=BODY).status_code == 200)


# ── prepaid credit ───────────────────────────────────────────────────────────────────────────────


def grant(house: House, key: str, picousd: int, reference: str = "first") -> None:
    async def work() -> None:
        async with house.parts.database.transaction() as session:
            tenant = await TenantRepository(session).get(house.tenants[key])
            assert tenant is not None
            await WalletRepository(session).grant(tenant, picousd, reference)
        await house.parts.pipeline.directory.refresh()

    house.on_loop(work())


def balance(house: House, key: str) -> tuple[int, int, int]:
    with house.http(key) as http:
        shown = http.get("/organization/credit").json()
    assert shown["granted_picousd"] == shown["free_picousd"] + shown["reserved_picousd"] + shown["spent_picousd"]
    return shown["granted_picousd"], shown["reserved_picousd"], shown["spent_picousd"]


def test_prepaid_credit_is_spent_to_its_end_and_no_further(spending: House):
    key = spending.new_tenant("prepaid")
    with spending.http(key) as http:
        assert http.get("/organization/credit").status_code == 404
        grant(spending, key, 2 * PRICE)
        for number in (1, 2):
            assert http.post("/completions", json=BODY).status_code == 200
            eventually(lambda number=number: balance(spending, key) == (2 * PRICE, 0, number * PRICE))
        refused = http.post("/completions", json=BODY)

    error = refused.json()["error"]
    assert (refused.status_code, error["type"], error["code"]) == (
        402,
        "insufficient_quota",
        "credit_balance_exhausted",
    )
    assert "tokens; a smaller max_tokens needs less" in error["message"]
    assert refused.headers["x-should-retry"] == "false"
    assert balance(spending, key) == (2 * PRICE, 0, 2 * PRICE)
    grant(spending, key, PRICE, "second")
    with spending.http(key) as http:
        assert http.post("/completions", json=BODY).status_code == 200


def test_many_callers_at_once_never_hold_more_than_the_credit(spending: House):
    key = spending.new_tenant("prepaid-crowd")
    grant(spending, key, 5 * PRICE)

    def ask(_: int) -> int:
        with spending.http(key) as http:
            return http.post("/completions", json=BODY).status_code

    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        codes = list(pool.map(ask, range(24)))
    assert set(codes) <= {200, 402, 503}  # 503: a store that was too slow to say
    eventually(lambda: balance(spending, key) == (5 * PRICE, 0, codes.count(200) * PRICE))
    assert 0 < codes.count(200) <= 5
    holds = rows(spending, key, WalletHold)
    assert sum(hold.spent_picousd or 0 for hold in holds) == billed(spending, key) == codes.count(200) * PRICE


def test_what_was_refused_by_a_rate_holds_no_credit_and_by_credit_no_rate(spending: House):
    key = spending.new_tenant("prepaid-rated", requests_per_minute=2)
    grant(spending, key, PRICE)
    with spending.http(key) as http:
        assert http.post("/completions", json=BODY | {"max_tokens": 40}).status_code == 402
        assert http.post("/completions", json=BODY).headers["x-ratelimit-remaining-requests"] == "1"
        eventually(lambda: balance(spending, key) == (PRICE, 0, PRICE))


def test_a_hold_that_no_record_will_resolve_is_swept_when_the_journals_are_empty(spending: House, monkeypatch):
    key = spending.new_tenant("prepaid-swept")
    grant(spending, key, PRICE)
    credit = spending.parts.pipeline.admission.credit

    async def leave_a_hold() -> None:
        async with spending.parts.database.transaction() as session:
            hold = Hold(spending.tenants[key], "nobody-runs-it", 0, "a gateway that is gone", PRICE)
            assert await WalletRepository(session).reserve(hold)

    spending.on_loop(leave_a_hold())
    assert spending.on_loop(credit.sweep()) == 0  # it is young
    monkeypatch.setattr("gateway.limits.credit.YOUNG_S", -1.0)
    assert spending.on_loop(credit.sweep()) == 1
    assert balance(spending, key) == (PRICE, 0, 0)
    assert spending.on_loop(credit.sweep()) == 0


def test_a_hold_of_a_request_that_has_just_ended_waits_for_its_record(spending: House, monkeypatch):
    """Its Close may not have reached the journal yet."""
    key = spending.new_tenant("prepaid-ended")
    grant(spending, key, 2 * PRICE)
    monkeypatch.setattr("gateway.limits.tickets.REMEMBERED_S", 600.0)
    monkeypatch.setattr("gateway.limits.credit.YOUNG_S", -1.0)
    with spending.http(key) as http:
        assert http.post("/completions", json=BODY).status_code == 200
    eventually(lambda: balance(spending, key) == (2 * PRICE, 0, PRICE))
    credit = spending.parts.pipeline.admission.credit
    tickets = credit.recount.tickets

    async def end_another() -> None:
        last = tickets.ended()[-1]
        another = replace(last, reservation=replace(last.reservation, request_id="just-ended"))
        tickets.begin(another)
        tickets.end(another)
        async with spending.parts.database.transaction() as session:
            hold = Hold(spending.tenants[key], "just-ended", 0, credit.recount.name, PRICE)
            assert await WalletRepository(session).reserve(hold)

    spending.on_loop(end_another())
    assert spending.on_loop(credit.sweep()) == 0
    assert balance(spending, key) == (2 * PRICE, PRICE, PRICE)
    tickets._ended.clear()
    assert spending.on_loop(credit.sweep()) == 1


# ── without a ledger ─────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def locked_ledger(house: House) -> Iterator[None]:
    lock = sqlite3.connect(house.settings.home / "tenora.db", isolation_level=None, check_same_thread=False)
    lock.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        lock.execute("ROLLBACK")
        lock.close()


def test_a_gateway_that_stood_still_while_it_booked_does_not_take_the_ledger_for_away(spending: House, monkeypatch):
    key, books = spending.new_tenant("stood-still"), spending.parts.pipeline.admission.books
    real, seen = type(books.ledger).post, []

    async def post(ledger, *arguments):
        time.sleep(0.3)  # what a busy machine does to a process
        seen.append(books.is_stuck)
        return await real(ledger, *arguments)

    monkeypatch.setattr("gateway.settlement.STUCK_S", 0.2)
    monkeypatch.setattr(type(books.ledger), "post", post)
    with spending.http(key) as http:
        assert http.post("/completions", json=BODY).status_code == 200
        eventually(lambda: billed(spending, key) == PRICE)
    assert seen
    assert not any(seen)


def test_without_a_ledger_money_stops_at_once_and_others_when_enough_is_owed(spending: House, monkeypatch):
    limited = spending.new_tenant("no-ledger", spend_limit_picousd_per_month=9 * PRICE)
    free = spending.new_tenant("no-ledger-free")
    books = spending.parts.pipeline.admission.books
    monkeypatch.setattr("gateway.settlement.STUCK_S", 0.05)
    monkeypatch.setattr("gateway.settlement.MAX_UNBOOKED", 2)
    monkeypatch.setattr("gateway.admission.LEDGER_WAIT_S", 0.2)
    with spending.http(limited) as http, spending.http(free) as other:
        assert http.post("/completions", json=BODY).status_code == 200
        eventually(lambda: billed(spending, limited) == PRICE)
        with locked_ledger(spending):
            served = [other.post("/completions", json=BODY)]
            eventually(lambda: books.is_stuck)
            refused = http.post("/completions", json=BODY)
            while not books.is_full:
                served.append(other.post("/completions", json=BODY))
            too_much = other.post("/completions", json=BODY)
        for answer in (refused, too_much):
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "billing_unavailable")
            assert "retry-after" in answer.headers
        eventually(lambda: http.post("/completions", json=BODY).status_code == 200)
    settled = [answer for answer in served if answer.status_code == 200]
    eventually(lambda: billed(spending, free) == len(settled) * PRICE)


def test_a_ledger_that_is_late_and_not_away_makes_nobody_wait_in_vain(spending: House, monkeypatch):
    limited = spending.new_tenant("late-ledger", spend_limit_picousd_per_month=9 * PRICE)
    prepaid = spending.new_tenant("late-ledger-prepaid")
    grant(spending, prepaid, 9 * PRICE)
    books = spending.parts.pipeline.admission.books
    monkeypatch.setattr("gateway.settlement.STUCK_S", 0.05)
    with (
        spending.http(limited) as http,
        spending.http(prepaid) as other,
        concurrent.futures.ThreadPoolExecutor() as pool,
    ):
        assert http.post("/completions", json=BODY).status_code == 200  # its window is counted
        with locked_ledger(spending):
            eventually(lambda: books.is_stuck)
            asked = [pool.submit(each.post, "/completions", json=BODY) for each in (http, other)]
            time.sleep(1)  # what a busy disk does to a transaction
            assert not any(one.done() for one in asked)
        assert [one.result().status_code for one in asked] == [200, 200], [one.result().text for one in asked]


def test_a_ledger_that_takes_three_seconds_still_holds_credit(spending: House):
    key = spending.new_tenant("slow-wallet")
    grant(spending, key, 9 * PRICE)
    eventually(lambda: not spending.parts.pipeline.admission.books.is_stuck)
    with spending.http(key) as http, concurrent.futures.ThreadPoolExecutor() as pool:
        with locked_ledger(spending):
            asked = pool.submit(http.post, "/completions", json=BODY)
            time.sleep(3)  # longer than two, shorter than SQLite waits for its lock
        assert asked.result().status_code == 200, asked.result().text
