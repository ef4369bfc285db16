"""A whole installation on PostgreSQL and an external Valkey, as a production one is: nothing of value in HOME."""

import concurrent.futures
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from redis import Redis

from tests.months import stay_within_a_month
from tests.served import Served, eventually, start
from tests.stores import PostgresServer, ValkeyServer, postgres_server, valkey_server

BODY = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 6, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    with postgres_server() as server:
        yield server


@pytest.fixture(scope="module")
def valkey() -> Iterator[ValkeyServer]:
    with valkey_server() as server:
        yield server


class Installation:
    """Two gateways and an engine on outer stores; may be stopped and started on another home."""

    def __init__(self, home: Path, model: Path, database_url: str, redis_url: str) -> None:
        self.home = home
        self.options = ["--model", f"tiny={model}", "--gateways", "2", "--block-size", "4", "--kv-blocks", "256"]
        self.options += ["--context", "128", "--demo", "--database-url", database_url, "--redis-url", redis_url]
        self.served: Served = start(home, *self.options)

    def restart(self) -> None:
        assert self.served.stop() == 0
        self.served = start(self.home, *self.options)


@pytest.fixture(scope="module")
def installation(postgres, valkey, model_dir, tmp_path_factory) -> Iterator[Installation]:
    database = postgres.create_database()
    made = Installation(tmp_path_factory.mktemp("home"), model_dir, postgres.url(database), valkey.url)
    yield made
    made.served.stop()


def complete(served: Served, key: str, **fields):
    with served.http(key) as http:
        return http.post("/completions", json=BODY | fields)


def receipt(served: Served, key: str, request_id: str) -> dict:
    with served.http(key) as http:

        def found():
            answer = http.get(f"/requests/{request_id}")
            return answer.json() if answer.status_code == 200 else None

        return eventually(found)


def test_a_request_has_its_receipt_its_usage_and_its_rows_and_all_of_it_outlives_a_restart(installation: Installation):
    served = installation.served
    key = served.new_tenant("durable", tokens_per_minute=100_000)
    answer = complete(served, key)
    assert answer.status_code == 200, answer.text
    request_id = answer.headers["x-request-id"]
    before = receipt(served, key, request_id)
    assert (before["status"], before["tokens"]) == (200, {"input": 3, "cached": 0, "output": 6})
    assert before["price"]["picousd"] == 3 * 50_000 + 6 * 100_000 + 1_000_000

    installation.restart()

    served = installation.served
    assert receipt(served, key, request_id) == before
    assert complete(served, key).status_code == 200
    assert not (served.home / "tenora.db").exists()


def test_usage_is_what_the_receipts_say(installation: Installation):
    served = installation.served
    key = served.new_tenant("counted")
    ids = [complete(served, key, max_tokens=number).headers["x-request-id"] for number in (1, 2, 3)]
    receipts = [receipt(served, key, request_id) for request_id in ids]

    with served.http(key) as http:
        window = {"start_time": int(time.time()) - 3600, "bucket_width": "1d"}
        rows = [
            row
            for bucket in http.get("/organization/usage/completions", params=window).json()["data"]
            for row in bucket["results"]
        ]

    assert sum(row["output_tokens"] for row in rows) == sum(each["tokens"]["output"] for each in receipts) == 6
    assert sum(row["input_tokens"] for row in rows) == 9
    assert sum(row["num_model_requests"] for row in rows) == 3


def test_limits_are_kept_in_the_external_store_for_all_gateways_together(installation, valkey):
    served = installation.served
    key = served.new_tenant("limited", requests_per_minute=4)

    answers = [complete(served, key, max_tokens=1).status_code for _ in range(8)]

    assert answers == [200] * 4 + [429] * 4
    with Redis.from_url(valkey.url) as redis:
        assert any(name.startswith(b"tn:q2:") for name in redis.scan_iter())


def spent(served: Served, key: str) -> int:
    """What the ledger has of the key's tenant, exactly."""
    with served.http(key) as http:
        window = {"start_time": int(time.time()) - 86_400, "bucket_width": "1d"}
        buckets = http.get("/organization/costs", params=window).json()["data"]
    return sum(result["amount"]["picousd"] for bucket in buckets for result in bucket["results"])


def test_fifty_callers_over_two_gateways_never_pass_a_spend_limit_by_one_unit_also_across_a_flush(installation, valkey):
    stay_within_a_month()
    served, price = installation.served, 3 * 50_000 + 6 * 100_000 + 1_000_000
    key = served.new_tenant("budgeted", spend_limit_picousd_per_month=60 * price)
    codes: list[int] = []

    def ask(_: int) -> None:
        codes.append(complete(served, key).status_code)

    with concurrent.futures.ThreadPoolExecutor(50) as pool, Redis.from_url(valkey.url) as redis:
        asked = [pool.submit(ask, number) for number in range(100)]
        for enough in (10, 30):
            eventually(lambda enough=enough: len(codes) >= enough)
            redis.flushall()
        for one in asked:
            one.result()
        assert set(codes) <= {200, 402, 503}
        later = [complete(served, key).status_code for _ in range(61 - codes.count(200))]

        assert codes.count(200) <= 60
        assert later == [200] * (60 - codes.count(200)) + [402]
        assert eventually(lambda: spent(served, key) == 60 * price)
        (window,) = list(redis.scan_iter(match="tn:q2:*:s:tenant@*"))
        assert int(redis.hget(window, "n") or 0) == 60 * price


def test_a_database_that_is_connected_and_silent_is_a_503_in_time_and_what_needs_none_is_served(installation, postgres):
    served = installation.served
    key = served.new_tenant("silent", tokens_per_minute=100_000)
    assert [complete(served, key).status_code for _ in range(16)] == [200] * 16  # both gateways know the key
    assert complete(served, key, model="nobody").status_code == 404

    def once() -> httpx.Response:
        with served.http(key) as http:
            return http.post("/completions", json=BODY, headers={"idempotency-key": "silent"})

    def models() -> httpx.Response:
        with served.http(key) as http:
            return http.get("/models")

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        with postgres.frozen():
            waiting = [pool.submit(each) for each in (once, models, lambda: complete(served, key, model="nobody"))]
            needless = [complete(served, key).status_code for _ in range(8)]
            refused = [each.result(60) for each in waiting]
        eventually(lambda: once().status_code == 200)

    assert needless == [200] * 8
    assert [(each.status_code, each.json()["error"]["code"]) for each in refused] == [(503, "store_unavailable")] * 3
    assert all("retry-after" in each.headers for each in refused)
    assert complete(served, key, model="nobody").status_code == 404


def test_a_silent_database_is_a_503_in_time_for_all_who_change_or_read_what_is_theirs(installation, postgres):
    served = installation.served
    key = served.new_tenant("silent-changes")
    assert {complete(served, key).status_code for _ in range(16)} == {200}  # both gateways know the key
    changes = {"name": "s"}, {"url": "https://example.com"}

    def of_tenant(method: str, path: str, **body) -> httpx.Response:
        with served.http(key) as http:
            return http.request(method, path, **body)

    def of_operator(method: str, path: str, **body) -> httpx.Response:
        with served.ops() as ops:
            return ops.request(method, path, **body)

    asked = [
        (of_tenant, "DELETE", "/adapters/s", {}),
        (of_tenant, "GET", "/adapters", {}),
        (of_tenant, "POST", "/webhooks", {"json": changes[1]}),
        (of_tenant, "GET", "/webhooks", {}),
        (of_tenant, "GET", "/organization/credit", {}),
        (of_operator, "GET", "/tenants", {}),
        (of_operator, "POST", "/tenants", {"json": changes[0]}),
        (of_operator, "GET", "/rate-cards", {}),
        (of_operator, "GET", "/audit", {}),
    ]
    with postgres.frozen(), concurrent.futures.ThreadPoolExecutor(len(asked)) as pool:
        waiting = [pool.submit(ask, method, path, **body) for ask, method, path, body in asked]
        refused = [each.result(30) for each in waiting]

    told = [(each.request.method, each.url.path, each.status_code, "retry-after" in each.headers) for each in refused]
    assert [each for each in told if each[2:] != (503, True)] == []
    assert of_operator("GET", "/tenants").status_code == 200


def test_a_database_that_is_away_for_a_while_delays_receipts_and_loses_none(installation: Installation, postgres):
    served = installation.served
    key = served.new_tenant("delayed")
    assert {complete(served, key).status_code for _ in range(8)} == {200}  # so that each gateway has heard of it
    name = postgres.execute("SELECT datname FROM pg_database WHERE datname LIKE 'test_%'")[0][0]
    postgres.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
    postgres.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'")
    try:
        answers = [complete(served, key) for _ in range(3)]
    finally:
        postgres.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")

    assert [answer.status_code for answer in answers] == [200] * 3
    for answer in answers:
        assert receipt(served, key, answer.headers["x-request-id"])["price"]["picousd"] > 0


TENANTS_PATHS = ("adapters/%00", "models/%00", "requests/%00", "organization/invoices/%00", "webhooks/%00") + (
    "organization/usage/completions?start_time=1700000000&models=%00",
    "organization/events?after=%00",
)
OPERATORS_PATHS = ("tenants/%00", "keys/%00", "operators/%00/rotate", "invoices/%00", "ledger?tenant_id=%00")


def test_the_character_that_postgresql_does_not_store_is_the_callers_mistake(installation: Installation):
    served = installation.served
    with served.http(served.new_tenant("null")) as http:
        answers = [http.get(f"/{path}") for path in TENANTS_PATHS]
        answers.append(http.post("/completions", json=BODY | {"model": "a\0b"}))
        answers.append(http.post("/webhooks", json={"url": "https://example.com", "description": "\0"}))
        answers.append(http.put("/adapters/%00/files/adapter_config.json", content=b"{}"))
    with served.ops() as ops:
        answers += [ops.request("POST" if path.endswith("rotate") else "GET", f"/{path}") for path in OPERATORS_PATHS]
        answers.append(ops.post("/tenants", json={"name": "a\0b"}))

    told = {(str(answer.url), answer.status_code): answer.text for answer in answers}
    assert {key: text for key, text in told.items() if key[1] not in (200, 400, 404)} == {}
