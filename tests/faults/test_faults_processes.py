"""Processes are killed while eight streams run: what was promised holds, and the next request works."""

import concurrent.futures
import signal
import sqlite3
import threading

import httpx
import psutil

from tests import plain
from tests.served import DEFAULT_MODEL, Served, eventually

BODY = {"model": DEFAULT_MODEL, "prompt": "Once upon a time", "max_tokens": 120, "ignore_eos": True, "stream": True}


def sql(served: Served, query: str, *arguments) -> list[tuple]:
    with sqlite3.connect(f"file:{served.home / 'tenora.db'}?mode=ro", uri=True) as db:
        return db.execute(query, arguments).fetchall()


class Streams:
    """Eight streamed completions at once; ``texts`` is what each got, ``ended`` how it ended."""

    def __init__(self, served: Served, key: str, label: str, num: int = 8) -> None:
        self.served, self.key, self.label = served, key, label
        self.first = [threading.Event() for _ in range(num)]
        self._pool = concurrent.futures.ThreadPoolExecutor(num)
        self._results = [self._pool.submit(self._run, i) for i in range(num)]

    def _run(self, i: int) -> str:
        text = ""
        try:
            with (
                plain.client() as http,
                http.stream(
                    "POST",
                    f"{self.served.url}/completions",
                    json=BODY,
                    headers={"authorization": f"Bearer {self.key}", "x-request-id": f"{self.label}-{i}"},
                ) as response,
            ):
                for piece in response.iter_text():
                    text += piece
                    self.first[i].set()
        except httpx.HTTPError as error:
            return text + f"\nBROKEN {type(error).__name__}"
        return text

    def wait_all_running(self) -> None:
        assert all(event.wait(60) for event in self.first)

    def results(self) -> list[str]:
        return [result.result(300) for result in self._results]


def next_request_works(served: Served, key: str) -> None:
    def works():
        try:
            answer = plain.post(
                f"{served.url}/completions",
                json=BODY | {"stream": False, "max_tokens": 2},
                headers={"authorization": f"Bearer {key}"},
            )
        except httpx.HTTPError:
            return False
        return answer.status_code == 200

    eventually(works, every_s=0.2)


def engine_is_idle(served: Served) -> bool:
    return served.metric("vllm:num_requests_running") == 0 and served.metric("tenora_kv_blocks", state="used") == 0


def lost_rows(served: Served, label: str) -> list[tuple]:
    return sql(
        served,
        "SELECT label, outcome, price_picousd, output_tokens FROM request_record WHERE label LIKE ?",
        f"{label}-%",
    )


def test_a_gateway_killed_mid_stream_loses_its_streams_once_and_unbilled(smollm: Served):
    key = smollm.new_tenant("gateway-killed", concurrent_requests=8)
    streams = Streams(smollm, key, "gk")
    streams.wait_all_running()
    gateways = smollm.gateways()
    assert len(gateways) == 2

    for gateway in gateways:
        gateway.send_signal(signal.SIGKILL)
    texts = streams.results()

    assert all("[DONE]" not in text for text in texts)
    killed = {gateway.pid for gateway in gateways}
    eventually(lambda: len(smollm.gateways()) == 2 and not killed & {gateway.pid for gateway in smollm.gateways()})
    rows = eventually(lambda: len(found := lost_rows(smollm, "gk")) == 8 and found)
    assert {(outcome, price) for _, outcome, price, _ in rows} == {(0, 0)}
    assert len({name for name, *_ in rows}) == 8
    assert all(tokens > 0 for *_, tokens in rows)
    assert sql(smollm, "SELECT count(*) FROM ledger_entry JOIN request_record USING (request_id)"
                       " WHERE label LIKE 'gk-%' AND ledger_entry.amount_picousd != 0") == [(0,)]  # fmt: skip
    eventually(lambda: engine_is_idle(smollm))
    next_request_works(smollm, key)


def test_an_engine_killed_mid_stream_ends_streams_with_an_error_event_and_bills_nothing(smollm: Served):
    key = smollm.new_tenant("engine-killed")
    streams = Streams(smollm, key, "ek")
    streams.wait_all_running()
    (engine,) = smollm.engines()

    engine.send_signal(signal.SIGKILL)
    texts = streams.results()

    assert all('"engine_lost"' in text and "[DONE]" not in text for text in texts), texts[0][-300:]
    next_request_works(smollm, key)
    assert smollm.engines()[0].pid != engine.pid
    rows = eventually(lambda: len(found := lost_rows(smollm, "ek")) == 8 and found)
    assert {(outcome, price) for _, outcome, price, _ in rows} == {(0, 0)}


def test_a_record_whose_acknowledgement_was_withheld_is_found_after_both_were_killed(smollm: Served):
    key = smollm.new_tenant("ack-withheld")
    before = journaled_bytes(smollm)
    lock = sqlite3.connect(smollm.home / "tenora.db", isolation_level=None, timeout=30)
    lock.execute("BEGIN IMMEDIATE")  # the ledger can't commit, so nothing is acknowledged
    try:
        answer = plain.post(
            f"{smollm.url}/completions",
            json=BODY | {"stream": False, "max_tokens": 3},
            headers={"authorization": f"Bearer {key}", "x-request-id": "withheld-0"},
        )
        assert answer.status_code == 200
        eventually(lambda: journaled_bytes(smollm) > before)
        assert lost_rows(smollm, "withheld") == []
        killed: list[psutil.Process] = [*smollm.engines(), *smollm.gateways()]
        for process in killed:
            process.send_signal(signal.SIGKILL)
    finally:
        lock.execute("ROLLBACK")
        lock.close()

    rows = eventually(lambda: lost_rows(smollm, "withheld"))

    assert [(outcome, tokens) for _, outcome, _, tokens in rows] == [(200, 3)]
    assert rows[0][2] > 0
    next_request_works(smollm, key)


def journaled_bytes(served: Served) -> int:
    (journal,) = served.home.glob("engines/*/journal.log")
    return journal.stat().st_size


def test_a_gateway_told_to_stop_lets_its_streams_finish(smollm: Served):
    key = smollm.new_tenant("gateway-drains")
    streams = Streams(smollm, key, "gd", num=8)
    streams.wait_all_running()

    for gateway in smollm.gateways():
        gateway.send_signal(signal.SIGTERM)
    texts = streams.results()

    assert all("[DONE]" in text for text in texts)
    next_request_works(smollm, key)
