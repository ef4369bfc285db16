"""Idempotency-Key over HTTP: one run, one bill, one answer however often it is asked for."""

import asyncio
import concurrent.futures
import json
import socket
import time
from collections.abc import Iterator

import httpx
import openai
import pytest
from gateway_harness import House, eventually, rows, running_house, stopped
from sqlalchemy.exc import OperationalError

from tenants.idempotency import LEASE_NS, IdempotencyKey, IdempotencyRepository
from tenants.secrets import Secrets
from tenants.tables import IdempotentRequest, LedgerEntry, RequestRecord

BODY = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 6, "temperature": 1, "ignore_eos": True}


@pytest.fixture(scope="module")
def house(tmp_path_factory) -> Iterator[House]:
    """Of this file's own: its engine is stopped now and then."""
    with running_house(
        tmp_path_factory.mktemp("once"), "--kv-blocks", "512", "--max-running", "8", context_tokens=2048
    ) as running:
        yield running


def ask(http: httpx.Client, value: str, **change) -> httpx.Response:
    return http.post("/completions", json=BODY | change, headers={"idempotency-key": value})


def settled(house: House, key: str, num: int) -> list[RequestRecord]:
    return eventually(lambda: len(found := rows(house, key, RequestRecord)) >= num and found)


def test_a_repeated_request_gets_the_same_bytes_and_is_billed_once(house: House):
    key = house.new_tenant("repeats", requests_per_minute=2)
    with house.http(key) as http:
        answers = [ask(http, "k1") for _ in range(3)]
        another = ask(http, "k2")

    assert [answer.status_code for answer in (*answers, another)] == [200] * 4
    assert len({answer.content for answer in answers}) == 1
    assert another.json()["id"] != answers[0].json()["id"]
    assert len({answer.headers["x-request-id"] for answer in answers}) == 1
    assert [answer.headers.get("idempotency-replayed") for answer in answers] == [None, "true", "true"]
    assert len(settled(house, key, 2)) == 2
    assert len({row.request_id for row in rows(house, key, LedgerEntry)}) == 2
    assert house.metric("tenora_requests_total", **{"model": "", "class": "", "outcome": "replayed"}) >= 2


def test_a_stock_client_is_given_its_answer_again(house: House):
    key = house.new_tenant("stock")
    with openai.OpenAI(base_url=house.url + "/v1", api_key=key, max_retries=0, timeout=60) as client:
        one, other = (
            client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": "hi"}],
                max_tokens=5,
                extra_headers={"Idempotency-Key": "mine"},
            )
            for _ in range(2)
        )

    assert one.id == other.id
    assert one == other


def test_another_body_or_route_under_a_used_key_is_422(house: House):
    key = house.new_tenant("mismatch")
    with house.http(key) as http:
        ask(http, "k")
        body = ask(http, "k", max_tokens=7)
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
        route = http.post("/chat/completions", json=chat, headers={"idempotency-key": "k"})

    for answer in (body, route):
        assert (answer.status_code, answer.json()["error"]["code"]) == (422, "idempotency_mismatch")
        assert answer.headers["x-should-retry"] == "false"


def test_while_the_first_runs_the_second_is_409_and_told_when_to_come_back(house: House):
    key = house.new_tenant("in-flight")
    with concurrent.futures.ThreadPoolExecutor(1) as pool, house.http(key) as http:
        with stopped(house.engine_pid):
            first = pool.submit(ask, http, "k")
            eventually(lambda: rows(house, key, IdempotentRequest))
            second, other = ask(http, "k"), ask(http, "k", max_tokens=7)
        answered = first.result()
        third = ask(http, "k")

    assert (second.status_code, second.json()["error"]["code"]) == (409, "idempotency_in_flight")
    assert int(second.headers["retry-after-ms"]) > 0
    assert other.json()["error"]["code"] == "idempotency_mismatch"
    assert third.content == answered.content


@pytest.mark.parametrize("kind", ["streamed", "large"])
def test_what_is_streamed_or_large_is_stood_for_by_its_receipt(house: House, monkeypatch, kind: str):
    monkeypatch.setattr("gateway.idempotency.MAX_STORED_BYTES", 100)
    key = house.new_tenant(f"receipt-{kind}")
    with house.http(key) as http:
        first = ask(http, "k", stream=kind == "streamed")
        again = eventually(lambda: (found := ask(http, "k", stream=kind == "streamed")).status_code == 200 and found)

    receipt = house.receipt(key, first.headers["x-request-id"])
    assert again.json() == receipt
    assert (receipt["status"], receipt["tokens"]["output"]) == (200, 6)
    assert again.headers["x-request-id"] == first.headers["x-request-id"]
    assert len(rows(house, key, RequestRecord)) == 1


def test_what_was_refused_may_be_sent_again_under_its_key(house: House):
    key = house.new_tenant("refused", requests_per_minute=2)
    admission = house.parts.pipeline.admission
    with house.http(key) as http:
        bad = ask(http, "k", temperature=9)
        admission.closed = True
        draining = ask(http, "k")
        admission.closed = False
        good = ask(http, "k")
        ask(http, "other")
        limited = ask(http, "third")

    assert [answer.status_code for answer in (bad, draining, good, limited)] == [400, 503, 200, 429]
    assert len(rows(house, key, IdempotentRequest)) == 2


def test_a_stream_that_broke_may_be_sent_again(house: House, monkeypatch):
    key = house.new_tenant("broke")

    async def breaks(form) -> None:
        raise RuntimeError("a bug of ours")

    with house.http(key) as http:
        with monkeypatch.context() as patch:
            patch.setattr("gateway.streaming.Streamed.end", breaks)
            broken = ask(http, "k", stream=True)
        again = eventually(lambda: (found := ask(http, "k", stream=True)).status_code == 200 and found)

    assert '"internal"' in broken.text
    assert again.text.endswith("data: [DONE]\n\n")
    assert sorted(row.outcome for row in settled(house, key, 2)) == [200, 500]


def test_one_value_of_two_tenants_is_two_keys_here_too(house: House):
    one, other = house.new_tenant("tenant-one"), house.new_tenant("tenant-two")
    with house.http(one) as http, house.http(other) as stranger:
        mine, theirs = ask(http, "same"), ask(stranger, "same")

    assert mine.json()["id"] != theirs.json()["id"]
    assert "idempotency-replayed" not in theirs.headers


@pytest.mark.parametrize("value", ["", "x" * 256, "caf\xe9"])
def test_a_value_that_is_no_key_is_400(house: House, value: str):
    key = house.new_tenant(f"unfit-{len(value)}")
    with house.http(key) as http:
        answer = http.post("/completions", json=BODY, headers=[("idempotency-key", value.encode("latin-1"))])

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Idempotency-Key")


def streamed(max_tokens: int) -> bytes:
    return json.dumps(BODY | {"stream": True, "max_tokens": max_tokens}).encode()


def leave_after(house: House, key: str, body: bytes, read_bytes: int) -> None:
    """Sends a request under the key "k", closes the connection when so much of the answer is there."""
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\nidempotency-key: k\r\n"
    with socket.create_connection(("127.0.0.1", house.port), timeout=30) as connection:
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        assert not read_bytes or connection.recv(read_bytes)
        eventually(lambda: rows(house, key, IdempotentRequest))


async def has_left(house: House, key: str) -> bool:
    """Whether the caller of the key's request at an engine has, and that engine has been told."""
    flights = list(house.parts.pipeline.dispatch._flights)
    own = [flight for flight in flights if flight.call.principal.tenant_id == house.tenants[key]]
    is_gone = any(flight.call.gone.is_set() for flight in own)
    await asyncio.sleep(0)  # what is told in a turn of the loop is written at its end
    return is_gone


def test_who_leaves_and_pays_gets_the_receipt_and_who_leaves_unserved_may_ask_again(house: House):
    paid, unserved = house.new_tenant("leaves-paid"), house.new_tenant("leaves-unserved")
    long, short = streamed(1900), streamed(20)  # the long one's caller has left before its end
    leave_after(house, paid, long, 1)
    with stopped(house.engine_pid):  # until it can read that the caller has left, behind what it asked for
        leave_after(house, unserved, short, 0)
        eventually(lambda: house.on_loop(has_left(house, unserved)))

    def again(key: str, body: bytes) -> httpx.Response:
        with house.http(key) as http:
            return http.post("/completions", content=body, headers={"idempotency-key": "k"})

    receipt = eventually(lambda: (found := again(paid, long)).status_code == 200 and found).json()
    answer = eventually(lambda: (found := again(unserved, short)).status_code == 200 and found)

    assert (receipt["status"], receipt["price"]["billed"]) == (499, True)
    assert answer.text.endswith("data: [DONE]\n\n")


def test_a_request_that_died_with_its_gateway_frees_its_key_when_its_lease_is_over(house: House):
    key = house.new_tenant("crashed")
    tenant_id = house.tenants[key]
    secrets = Secrets.load_or_create(house.settings.secrets)

    async def claim(value: str, age_ns: int) -> None:
        claimed = IdempotencyKey(tenant_id, *secrets.idempotency_key(tenant_id, value))
        async with house.parts.database.transaction() as session:
            repository = IdempotencyRepository(session)
            assert await repository.claim(claimed, b"h" * 32, "dead", time.time_ns() - age_ns) is None

    house.on_loop(claim("old", LEASE_NS))
    house.on_loop(claim("young", 0))
    with house.http(key) as http:
        old, young = ask(http, "old"), ask(http, "young")

    assert old.status_code == 200
    assert young.status_code in (409, 422)


def test_an_answer_that_cannot_be_kept_is_not_given_and_not_billed(house: House, monkeypatch):
    key = house.new_tenant("unkept")

    async def fails(*_) -> bool:
        raise OperationalError("UPDATE", {}, Exception("away"))

    with house.http(key) as http:
        with monkeypatch.context() as patch:
            patch.setattr(IdempotencyRepository, "finish", fails)
            refused = ask(http, "k")
        answered = ask(http, "k")

    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "store_unavailable")
    assert answered.status_code == 200
    assert sorted((row.outcome, row.billed) for row in settled(house, key, 2)) == [(200, True), (500, False)]


def test_a_running_requests_lease_is_renewed(house: House, monkeypatch):
    monkeypatch.setattr("gateway.idempotency.LEASE_NS", 30_000_000)
    key, renewed = house.new_tenant("renewed"), asyncio.Event()
    real = IdempotencyRepository.renew

    async def renew(*arguments) -> bool:
        renewed.set()
        return await real(*arguments)

    monkeypatch.setattr(IdempotencyRepository, "renew", renew)
    with concurrent.futures.ThreadPoolExecutor(1) as pool, house.http(key) as http:
        with stopped(house.engine_pid):
            first = pool.submit(ask, http, "k")
            eventually(renewed.is_set)
        assert first.result().status_code == 200


def test_the_key_and_the_answer_are_nowhere_in_the_database(house: House):
    key = house.new_tenant("hidden")
    with house.http(key) as http:
        answer = ask(http, "a value to hide")
        settled(house, key, 1)
    files = [house.settings.home / f"tenora.db{end}" for end in ("", "-wal")]
    stored = b"".join(path.read_bytes() for path in files if path.exists())

    assert b"a value to hide" not in stored
    assert answer.json()["id"].encode() not in stored
    (row,) = rows(house, key, IdempotentRequest)
    assert row.answer is not None
    assert row.answer in stored or len(row.answer) > 300  # larger than a page's rest: in pieces


def test_old_keys_are_removed(house: House, monkeypatch):
    key, stage = house.new_tenant("old-keys"), house.parts.pipeline.idempotency
    with house.http(key) as http:
        ask(http, "k")

    async def tomorrow(_) -> int:
        return time.time_ns() + 24 * 3600 * 10**9

    monkeypatch.setattr(stage, "now_ns", tomorrow)

    assert house.on_loop(stage.purge()) >= 1
    assert rows(house, key, IdempotentRequest) == []
