"""What is counted of requests: by model, class and route, and by tenant only as far as that stays bounded."""

import json
import time

import httpx
import pytest
from gateway_harness import House, eventually

from gateway.top_tenants import BUSIEST, MAX_NAMED, OTHER, TopTenants
from tenants.pricing import default_prices
from tenants.repositories import RateCardRepository


def test_the_busiest_tenants_are_named_and_all_others_are_one():
    tenants = TopTenants()
    for number in range(BUSIEST):
        assert tenants.label(f"big {number}") == f"big {number}"
        tenants.label(f"big {number}")

    assert tenants.label("small") == OTHER


def test_who_becomes_one_of_the_busiest_is_named_from_then_on():
    tenants = TopTenants()
    for number in range(BUSIEST):
        tenants.label(f"early {number}")

    seen = [tenants.label("late") for _ in range(3)]

    assert seen == [OTHER, "late", "late"]
    assert tenants.label("early 0") == "early 0"


def test_however_many_come_few_are_named():
    tenants = TopTenants()

    for number in range(10 * MAX_NAMED):
        for _ in range(number):
            tenants.label(f"tenant {number}")

    assert len({tenants.label(f"tenant {number}") for number in range(10 * MAX_NAMED)} - {OTHER}) == MAX_NAMED


def complete(house: House, key: str, **more) -> httpx.Response:
    body = {"model": "tiny", "prompt": [5, 6], "max_tokens": 4, "ignore_eos": True} | more
    with house.http(key) as http:
        return http.post("/completions", json=body)


@pytest.fixture
def _newcomers_are_named(house: House, monkeypatch):
    """The busiest of the other tests leave no place for tenants with one request."""
    monkeypatch.setattr(house.parts.pipeline.telemetry, "top_tenants", TopTenants())


@pytest.mark.usefixtures("_newcomers_are_named")
def test_a_request_counts_for_its_tenant_with_tokens_time_and_price(house: House):
    key = house.new_tenant("counted")
    tenant = house.tenants[key]

    request_id = complete(house, key).headers["x-request-id"]
    complete(house, key, max_tokens=-1)
    eventually(lambda: house.metric("tenora_tenant_price_usd_total", tenant=tenant))

    price = house.receipt(key, request_id)["price"]["picousd"]
    assert house.metric("tenora_tenant_tokens_total", tenant=tenant, kind="input") == 2
    assert house.metric("tenora_tenant_tokens_total", tenant=tenant, kind="output") == 4
    assert house.metric("tenora_tenant_gpu_seconds_total", tenant=tenant) > 0
    assert house.metric("tenora_tenant_price_usd_total", tenant=tenant) == pytest.approx(price * 1e-12)


def publish(house: House, factor: int) -> None:
    """Prices times ``factor``, in force from now on, which no gateway has heard of yet."""

    async def write() -> None:
        now_ns = time.time_ns()
        async with house.parts.database.transaction() as session:
            prices = {item: price * factor for item, price in default_prices().items()}
            await RateCardRepository(session).publish(prices, now_ns + 1_000, now_ns)

    house.on_loop(write())


@pytest.mark.usefixtures("_newcomers_are_named")
def test_prices_that_a_gateway_hears_of_while_a_request_runs_are_not_that_requests(house: House):
    key = house.new_tenant("pinned")
    body = {"model": "tiny", "prompt": [5, 6], "max_tokens": 60, "stream": True, "ignore_eos": True}
    publish(house, 2)
    try:
        with house.http(key) as http, http.stream("POST", "/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            house.on_loop(house.parts.pipeline.directory.refresh())
            assert [line for line in lines if line][-1] == "data: [DONE]"
    finally:
        publish(house, 1)
        house.on_loop(house.parts.pipeline.directory.refresh())

    price = house.receipt(key, answer.headers["x-request-id"])["price"]["picousd"]
    told = house.metric("tenora_tenant_price_usd_total", tenant=house.tenants[key])
    assert told == pytest.approx(price * 1e-12)
    assert price > 0


def test_latency_and_cost_are_told_apart_by_model_class_and_route(house: House, key: str):
    route = {"model": "tiny", "class": "batch", "route": "base"}
    names = ("request_seconds_count", "time_per_output_token_seconds_count", "request_gpu_seconds_total")
    before = [house.metric(f"tenora_{name}", **route) for name in names]

    complete(house, key, service_tier="flex")

    def moved() -> bool:
        after = [house.metric(f"tenora_{name}", **route) for name in names]
        return all(late > early for early, late in zip(before, after, strict=True))

    eventually(moved)
    assert house.metric("tenora_request_seconds_count", **route) == before[0] + 1


def test_a_negative_increment_ends_no_callers_stream_and_is_counted(house: House, key: str, monkeypatch):
    """Case 24: whatever a metric refuses, the answer is whole."""
    failed = house.metric("tenora_reports_failed_total")
    monkeypatch.setattr("gateway.telemetry._tokens", lambda flight: (("output", -1),))

    with house.http(key) as http:
        body = {"model": "tiny", "prompt": [5], "max_tokens": 3, "stream": True, "ignore_eos": True}
        with http.stream("POST", "/completions", json=body) as answer:
            lines = [line for line in answer.iter_lines() if line]
        assert http.get("/models").status_code == 200

    assert answer.status_code == 200
    assert lines[-1] == "data: [DONE]"
    assert sum(bool(json.loads(line[6:])["choices"]) for line in lines[:-1]) >= 1
    eventually(lambda: house.metric("tenora_reports_failed_total") == failed + 1)
