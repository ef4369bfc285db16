"""The money path where it is easiest to break: between two awaits, between two processes, at the end of either."""

import asyncio
import concurrent.futures
import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
from gateway_harness import House, eventually, rows, running_house, stopped

from gateway.flight import Flight
from gateway.streaming import Streamed, Whole
from tenants.tables import LedgerEntry, RequestRecord

BODY = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def fragile(tmp_path_factory) -> Iterator[House]:
    with running_house(tmp_path_factory.mktemp("money"), "--kv-blocks", "512", "--max-running", "8") as house:
        yield house


def the_store_may_take_long(house: House, monkeypatch) -> None:
    script = house.parts.pipeline.admission.limiter.quota._script
    for part in (script, house.on_loop(script._connected())):
        monkeypatch.setattr(part, "_deadline_s", 30.0)


def no_engine_is_there(house: House) -> None:
    house.engine.kill()
    eventually(lambda: not house.parts.catalog.models["tiny"].connected())


def an_engine_is_there(house: House) -> None:
    house.engine.start()
    eventually(house.parts.catalog.models["tiny"].connected)


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_behind_a_stop_string_are_neither_reported_nor_billed(house: House, monkeypatch, stream: bool):
    key = house.new_tenant(f"stopped-{stream}")
    monkeypatch.setattr(Flight, "abort", lambda flight, choice=-1: None)  # the engine hears of it too late
    with house.http(key) as http:
        whole = http.post("/completions", json=BODY | {"max_tokens": 40}).json()["choices"][0]["text"]
        stop = next(letter for i, letter in enumerate(whole) if letter.isascii() and whole.find(letter) == i and i > 1)
        body = BODY | {"max_tokens": 120, "stop": [stop], "n": 4, "stream": stream}
        answer = http.post("/completions", json=body | ({"stream_options": {"include_usage": True}} if stream else {}))

    text = answer.text.split("\n\n")[-3].removeprefix("data: ") if stream else answer.text
    usage = json.loads(text)["usage"]
    receipt = house.receipt(key, answer.headers["x-request-id"])
    assert receipt["tokens"]["output"] == usage["completion_tokens"] < 400
    billed = [row for row in rows(house, key, LedgerEntry) if row.request_id == answer.headers["x-request-id"]]
    assert [row.quantity for row in billed if row.meter == "output_tokens"] == [usage["completion_tokens"]]


def test_a_reservation_that_the_store_took_too_late_is_given_back(fragile: House, monkeypatch):
    monkeypatch.setattr("gateway.limits.limiter.LOCAL_FOR_S", 0.0)
    key = fragile.new_tenant("late", tokens_per_minute=50, concurrent_requests=1)
    with fragile.http(key) as http:
        assert http.post("/completions", json=BODY | {"max_tokens": 1}).status_code == 200  # there is a connection
        with stopped(fragile.valkey.process.pid):
            refused = http.post("/completions", json=BODY | {"max_tokens": 40})
        assert refused.json()["error"]["code"] == "store_unavailable"

        admitted = eventually(
            lambda: (answer := http.post("/completions", json=BODY | {"max_tokens": 40})).status_code == 200 and answer,
            timeout_s=30,  # a minute brings 50 tokens: so soon only what was given back is there
        )

    assert admitted.json()["usage"]["completion_tokens"] == 40


def test_who_was_reserving_when_the_drain_began_is_refused_and_takes_nothing(fragile: House, monkeypatch):
    key = fragile.new_tenant("reserving", requests_per_minute=1)
    admission, entered = fragile.parts.pipeline.admission, threading.Event()
    real = admission.limiter.quota.reserve

    async def reserve(reservation):
        entered.set()
        return await real(reservation)

    monkeypatch.setattr(admission.limiter.quota, "reserve", reserve)
    the_store_may_take_long(fragile, monkeypatch)
    with concurrent.futures.ThreadPoolExecutor(1) as pool, fragile.http(key) as http:
        with stopped(fragile.valkey.process.pid):
            answer = pool.submit(http.post, "/completions", json=BODY)
            assert entered.wait(20)
            admission.closed = True
        refused = answer.result()
        admission.closed = False

        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert http.post("/completions", json=BODY).status_code == 200
    assert [row.outcome for row in eventually(lambda: rows(fragile, key, RequestRecord))] == [200]


def test_who_waits_for_an_engine_when_the_drain_ends_is_not_dispatched_any_more(fragile: House, monkeypatch):
    monkeypatch.setattr("gateway.dispatch.RECONNECT_S", 60.0)
    key, dispatch = fragile.new_tenant("waiting"), fragile.parts.pipeline.dispatch
    no_engine_is_there(fragile)
    with concurrent.futures.ThreadPoolExecutor(1) as pool, fragile.http(key) as http:
        answer = pool.submit(http.post, "/completions", json=BODY)
        eventually(lambda: dispatch._flights)
        fragile.loop.call_soon_threadsafe(dispatch.interrupt_all)
        an_engine_is_there(fragile)
        refused = answer.result()

        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert http.post("/completions", json=BODY).status_code == 200
    assert [row.outcome for row in eventually(lambda: rows(fragile, key, RequestRecord))] == [200]


def test_an_engine_that_dies_between_the_last_token_and_the_close_leaves_an_unbilled_receipt(fragile, monkeypatch):
    key, real = fragile.new_tenant("closing"), Whole.end

    async def end(answer) -> None:
        await asyncio.to_thread(no_engine_is_there, fragile)
        await real(answer)

    with monkeypatch.context() as patch, fragile.http(key) as http:
        patch.setattr(Whole, "end", end)
        assert http.post("/completions", json=BODY).status_code == 200

    an_engine_is_there(fragile)
    (record,) = eventually(lambda: rows(fragile, key, RequestRecord))
    assert (record.outcome, record.price_picousd, record.output_tokens) == (0, 0, 4)
    assert rows(fragile, key, LedgerEntry) == []


@pytest.mark.parametrize(("stream", "form"), [(False, Whole), (True, Streamed)])
def test_an_answer_that_breaks_at_its_very_end_is_not_billed(fragile: House, monkeypatch, stream, form):
    key, real = fragile.new_tenant(f"broken-{stream}"), form.end

    async def end(answer) -> None:
        raise RuntimeError("a bug of ours")

    with monkeypatch.context() as patch, fragile.http(key) as http:
        patch.setattr(form, "end", end)
        answer = http.post("/completions", json=BODY | {"stream": stream})

    assert '"internal"' in answer.text
    assert form.end is real
    (record,) = eventually(lambda: rows(fragile, key, RequestRecord))
    assert (record.outcome, record.billed, record.price_picousd) == (500, False, 0)


def test_a_ticket_is_forgotten_while_the_store_has_not_answered_its_settlement(fragile: House, monkeypatch):
    key, admission = fragile.new_tenant("unanswered", concurrent_requests=1), fragile.parts.pipeline.admission
    seen, real = [], admission.admit

    def admit(call, work):
        seen.append((call, work))
        return real(call, work)

    with monkeypatch.context() as patch, fragile.http(key) as http:
        patch.setattr(type(admission), "admit", lambda self, call, work: admit(call, work))
        assert http.post("/completions", json=BODY).status_code == 200
    eventually(admission.idle.is_set)
    call, work = replace(seen[0][0], request_id="another"), seen[0][1]
    the_store_may_take_long(fragile, monkeypatch)

    async def scenario() -> None:
        async with contextlib.AsyncExitStack() as stack:
            async with admission.admit(call, work):
                stack.enter_context(stopped(fragile.valkey.process.pid))
            assert admission.idle.is_set()

    fragile.on_loop(scenario())
    with fragile.http(key) as http:
        assert http.post("/completions", json=BODY).status_code == 200  # it is settled behind that
