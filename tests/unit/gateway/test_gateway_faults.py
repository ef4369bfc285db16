"""What breaks under a running request: engine, store, database, the gateway's own end."""

import concurrent.futures
import contextlib
import json
import os
import signal
import sqlite3
import threading
from collections.abc import Iterator

import httpx
import pytest
from gateway_harness import House, eventually, rows, running_house, stopped

from engine import wire
from tenants.tables import LedgerEntry, RequestRecord
from tests import plain

BODY = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 110, "temperature": 0, "ignore_eos": True}
LONG = BODY | {"max_tokens": 1900}  # for what must come before its end


@pytest.fixture(scope="module")
def fragile(tmp_path_factory) -> Iterator[House]:
    """A house of this file's own: its engine is killed, its store stopped."""
    with running_house(
        tmp_path_factory.mktemp("fragile"), "--kv-blocks", "512", "--max-running", "8", context_tokens=2048
    ) as house:
        yield house


def open_requests(house: House) -> int:
    return house.parts.catalog.models["tiny"].engines[0].load


def stream_until(house: House, key: str, act, body: dict = BODY) -> str:
    """Streams a completion; calls ``act`` when the first bytes of the answer are there; returns all of it."""
    text = ""
    with house.http(key) as http, http.stream("POST", "/completions", json=body | {"stream": True}) as answer:
        assert answer.status_code == 200
        for piece in answer.iter_text():
            if not text:
                act()
            text += piece
    return text


def last_event(text: str) -> dict:
    return json.loads(text.rstrip().rpartition("data: ")[2])


def restart(house: House) -> None:
    house.engine.stop()
    house.engine.start()
    eventually(house.parts.catalog.models["tiny"].connected)


def test_an_engine_killed_after_the_first_token_ends_the_stream_with_an_error_and_costs_nothing(fragile: House):
    key = fragile.new_tenant("killed-after", tokens_per_minute=2000)

    text = stream_until(fragile, key, fragile.engine.kill, LONG)

    assert last_event(text)["error"]["code"] == "engine_lost"
    assert "[DONE]" not in text
    (record,) = eventually(lambda: rows(fragile, key, RequestRecord))
    assert (record.outcome, record.price_picousd, record.billed) == (0, 0, False)
    assert record.prompt_tokens == 3
    restart(fragile)
    with fragile.http(key) as http:
        assert http.post("/completions", json=BODY | {"max_tokens": 2}).status_code == 200
    eventually(lambda: len(rows(fragile, key, RequestRecord)) == 2)
    assert [row.outcome for row in rows(fragile, key, RequestRecord)].count(0) == 1


def test_an_engine_killed_before_the_first_token_costs_one_retry_and_makes_one_bill(fragile: House, monkeypatch):
    monkeypatch.setattr("gateway.dispatch.RECONNECT_S", 60.0)  # however slowly this machine starts an engine
    key = fragile.new_tenant("killed-before")
    with concurrent.futures.ThreadPoolExecutor(1) as pool, fragile.http(key) as http:
        with stopped(fragile.engine_pid):
            answer = pool.submit(http.post, "/completions", json=BODY | {"max_tokens": 4})
            eventually(lambda: open_requests(fragile) == 1)
            fragile.engine.kill()
        fragile.engine.start()
        result = answer.result()

    assert result.status_code == 200
    assert result.json()["usage"]["completion_tokens"] == 4
    receipt = fragile.receipt(key, result.headers["x-request-id"])
    assert (receipt["status"], receipt["attempt"]) == (200, 1)
    assert [row.outcome for row in rows(fragile, key, RequestRecord)] == [200]
    assert len({row.meter for row in rows(fragile, key, LedgerEntry)}) == len(rows(fragile, key, LedgerEntry)) == 3


def test_without_any_engine_a_request_waits_a_while_and_is_then_503(fragile: House, monkeypatch):
    key = fragile.new_tenant("nobody-there")
    monkeypatch.setattr("gateway.dispatch.RECONNECT_S", 0.3)
    fragile.engine.kill()
    eventually(lambda: not fragile.parts.catalog.models["tiny"].connected())

    with fragile.http(key) as http:
        answer = http.post("/completions", json=BODY)
        listed = http.get("/models")
    restart(fragile)

    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "overloaded")
    assert int(answer.headers["retry-after"]) >= 1
    assert [model["id"] for model in listed.json()["data"]] == ["tiny"]
    assert rows(fragile, key, RequestRecord) == []


def test_a_caller_who_leaves_while_waiting_for_an_engine_is_not_waited_for(fragile: House, monkeypatch):
    monkeypatch.setattr("gateway.dispatch.RECONNECT_S", 600.0)
    key = fragile.new_tenant("impatient")
    fragile.engine.kill()
    eventually(lambda: not fragile.parts.catalog.models["tiny"].connected())
    admission = fragile.parts.pipeline.admission

    with pytest.raises(httpx.ReadTimeout), fragile.http(key) as http:
        http.post("/completions", json=BODY, timeout=0.3)
    eventually(admission.idle.is_set)
    restart(fragile)

    assert rows(fragile, key, RequestRecord) == []


ONE = BODY | {"max_tokens": 1}


def test_an_engine_that_drains_refuses_and_the_caller_hears_when_to_come_back(fragile: House):
    key = fragile.new_tenant("engine-drains")
    answers = []

    def drain() -> None:
        """Until it refuses: a request may still be there before the signal is."""
        os.kill(fragile.engine_pid, signal.SIGTERM)
        with fragile.http(key) as http:
            while not answers or answers[-1].status_code == 200:
                answers.append(http.post("/completions", json=ONE))

    text = stream_until(fragile, key, drain, BODY | {"n": 8})
    assert fragile.engine.process is not None
    fragile.engine.process.join(30)
    restart(fragile)

    assert text.endswith("data: [DONE]\n\n")
    assert answers[-1].status_code == 503
    assert answers[-1].json()["error"]["code"] in ("draining", "overloaded")
    assert "retry-after" in answers[-1].headers


def store_is_back(house: House) -> None:
    eventually(lambda: not house.parts.pipeline.admission.limiter.is_away)


def test_while_the_store_is_away_rates_are_kept_to_a_local_share_and_marked(fragile: House, caplog):
    limited = fragile.new_tenant("limited", requests_per_minute=3)
    free = fragile.new_tenant("free")
    name = {"kind": "limiter", "reason": "store_unavailable"}
    before = fragile.metric("tenora_fallbacks_total", **name)

    with stopped(fragile.valkey.process.pid), fragile.http(limited) as http, fragile.http(free) as other:
        answers = [http.post("/completions", json=ONE) for _ in range(4)]
        admitted = other.post("/completions", json=ONE)
    store_is_back(fragile)
    with fragile.http(limited) as http:
        after = http.post("/completions", json=ONE)

    assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
    assert {answer.headers.get("x-ratelimit-degraded") for answer in answers} == {"true"}
    assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["2", "1", "0", "0"]
    assert int(answers[3].headers["retry-after"]) <= 20
    assert (admitted.status_code, admitted.headers.get("x-ratelimit-degraded")) == (200, None)
    assert (after.status_code, after.headers.get("x-ratelimit-degraded")) == (200, None)
    assert after.headers["x-ratelimit-remaining-requests"] == "2"
    assert fragile.metric("tenora_fallbacks_total", **name) == before + 4
    changes = [record.getMessage() for record in caplog.records if record.name == "gateway.limits.limiter"]
    assert len(changes) == 2


def test_while_the_store_is_away_money_is_not_spent_and_no_rate_goes_on_for_ever(fragile: House, monkeypatch):
    spender = fragile.new_tenant("spender", requests_per_minute=9, spend_limit_picousd_per_month=10**12)
    limited = fragile.new_tenant("limited-long", requests_per_minute=9)
    with stopped(fragile.valkey.process.pid), fragile.http(spender) as http, fragile.http(limited) as other:
        closed = http.post("/completions", json=ONE)
        monkeypatch.setattr("gateway.limits.limiter.LOCAL_FOR_S", 0.0)
        too_long = other.post("/completions", json=ONE)
    store_is_back(fragile)

    for refused in (closed, too_long):
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "store_unavailable")
        assert "retry-after" in refused.headers


def test_what_runs_when_the_store_goes_is_extended_from_the_share_and_settled_when_it_is_back(fragile: House):
    key = fragile.new_tenant("cut-off", default_output_tokens=8, tokens_per_minute=3000)
    talk = [{"role": "user", "content": "x" * 1900}]  # not far from the context's end
    chat = {"model": "tiny", "messages": talk, "ignore_eos": True, "stream": True}
    with concurrent.futures.ThreadPoolExecutor(1) as pool, fragile.http(key) as http, contextlib.ExitStack() as stack:
        with stopped(fragile.engine_pid):
            answer = pool.submit(http.post, "/chat/completions", json=chat)
            eventually(lambda: open_requests(fragile) == 1)
            stack.enter_context(stopped(fragile.valkey.process.pid))
        text = answer.result().text
        eventually(lambda: fragile.parts.pipeline.admission.limiter.is_away)
    store_is_back(fragile)
    with fragile.http(key) as http:
        after = http.post("/completions", json=ONE)

    assert text.endswith("data: [DONE]\n\n")
    assert int(after.headers["x-ratelimit-remaining-tokens"]) >= 3000 - 2048 - 4


def test_a_locked_database_delays_the_bill_and_loses_nothing(fragile: House):
    key = fragile.new_tenant("locked")
    lock = sqlite3.connect(fragile.settings.home / "tenora.db", isolation_level=None, check_same_thread=False)
    lock.execute("BEGIN IMMEDIATE")
    with fragile.http(key) as http:
        answers = [http.post("/completions", json=BODY | {"max_tokens": 2}) for _ in range(3)]
    while_locked = rows(fragile, key, RequestRecord)
    lock.execute("ROLLBACK")
    lock.close()

    assert [answer.status_code for answer in answers] == [200] * 3
    assert while_locked == []
    for answer in answers:
        assert fragile.receipt(key, answer.headers["x-request-id"])["price"]["picousd"] > 0


def test_a_database_that_fails_is_503_and_counted_as_that(fragile: House, caplog: pytest.LogCaptureFixture):
    key = fragile.new_tenant("no-database")
    before = fragile.metric("tenora_admission_refusals_total", reason="store_unavailable")
    path = fragile.settings.home / "tenora.db"
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute("ALTER TABLE adapter_version RENAME TO away")
        try:
            with fragile.http(key) as http:
                answers = [http.post("/completions", json=BODY | {"model": "mine"}), http.get("/models")]
        finally:
            database.execute("ALTER TABLE away RENAME TO adapter_version")

    assert [answer.status_code for answer in answers] == [503, 503]
    assert [answer.json()["error"]["code"] for answer in answers] == ["store_unavailable"] * 2
    assert all(answer.headers["retry-after"] for answer in answers)
    eventually(lambda: fragile.metric("tenora_admission_refusals_total", reason="store_unavailable") == before + 1)
    assert "mine" not in caplog.text


def test_a_forged_context_is_counted_acknowledged_and_never_billed(fragile: House):
    engine = fragile.parts.catalog.models["tiny"].engines[0]
    before = fragile.metric("tenora_records_unbooked_total", reason="forged")

    async def run_unsealed() -> None:
        submit = wire.Submit(
            "forged",
            [wire.pack_ids([5])],
            wire.SamplingParams(max_tokens=1),
            wire.Flow("f"),
            b"n",
            1,
            context=b"x" * 64,
        )
        stream = engine.submit(submit)
        while not any(isinstance(event, wire.Finished) for event in await stream.next()):
            pass
        stream.close(wire.Close("forged", 200))

    fragile.on_loop(run_unsealed())

    eventually(lambda: fragile.metric("tenora_records_unbooked_total", reason="forged") == before + 1)
    key = fragile.new_tenant("after-forgery")
    with fragile.http(key) as http:  # records behind it are not held up
        answer = http.post("/completions", json=BODY | {"max_tokens": 1})
    assert fragile.receipt(key, answer.headers["x-request-id"])["status"] == 200


def test_what_the_drain_cuts_off_ends_with_an_error_event_and_is_not_billed(fragile: House):
    key = fragile.new_tenant("drained")
    pipeline = fragile.parts.pipeline

    def drain() -> None:
        pipeline.admission.closed = True
        with fragile.http(key) as http:
            refused = http.post("/completions", json=BODY)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert plain.get(f"{fragile.url}/health").status_code == 503
        fragile.loop.call_soon_threadsafe(pipeline.dispatch.interrupt_all)

    text = stream_until(fragile, key, drain, LONG)
    pipeline.admission.closed = False

    assert last_event(text)["error"]["code"] == "draining"
    assert '"finish_reason":"stop"' not in text
    (record,) = eventually(lambda: rows(fragile, key, RequestRecord))
    assert (record.outcome, record.billed) == (503, False)


def test_every_request_of_a_mixed_crowd_ends_once_in_the_ledger_and_the_counters(fragile: House):
    key = fragile.new_tenant("crowd", concurrent_requests=100)
    barrier = threading.Barrier(12)

    def call(i: int) -> int:
        barrier.wait()
        try:
            with fragile.http(key) as http:
                body = BODY | {"max_tokens": 60, "n": 2, "stream": i % 2 == 0}
                patience = httpx.Timeout(60, read=0.2 if i % 3 == 0 else 60)
                return http.post("/completions", json=body, timeout=patience).status_code
        except httpx.ReadTimeout:
            return 499

    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        ended = list(pool.map(call, range(12)))

    eventually(fragile.parts.pipeline.admission.idle.is_set)
    records = eventually(lambda: len(found := rows(fragile, key, RequestRecord)) >= ended.count(200) and found)
    assert len({record.request_id for record in records}) == len(records) <= 12
    assert {record.outcome for record in records} <= {200, 499}
    eventually(lambda: [row.outcome for row in rows(fragile, key, RequestRecord)].count(200) >= ended.count(200))
    eventually(lambda: open_requests(fragile) == 0)
