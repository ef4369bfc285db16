"""The framework's traps that we met, each with what shows that we aren't in it.

Elsewhere: a 100,000-deep body of a completion is 400 (``test_e2e_bad_input``); a settlement goes on when its request is
cancelled (``test_gateway_money``); callers who leave (``test_gateway_http``); uploads past the framework's limit of
10 MB (``test_e2e_uploads``).
"""

import json
import re
import socket
from pathlib import Path

import httpx
import pytest
from gateway_harness import House, eventually

from gateway.access import handlers_of
from gateway.app import public_app
from gateway.openapi.document import document
from gateway.schemas import MAX_BODY_BYTES

TESTS = Path(__file__).parents[2]
BODY = {"model": "tiny", "prompt": [5, 6, 7], "temperature": 0, "ignore_eos": True}
DEEP = b"[" * 100_000 + b"]" * 100_000


def test_a_post_answers_201_only_where_it_makes_something(house: House):
    paths = json.loads(document())["paths"]
    for method, path, handler in handlers_of(public_app(house.parts)):
        told = {int(status) for status in paths[path][method.lower()]["responses"] if status < "300"}
        assert told == {handler.status_code}, (method, path)


def num_decoding_steps(house: House) -> float:
    engine = house.parts.catalog.models["tiny"].engines[0]
    (steps,) = (each for each in house.on_loop(engine.stats(timeout_s=60)) if each.name == "tenora_batch_tokens")
    return sum(value for part, of, value in steps.samples if part == "_count" and of["phase"] == "decode")


def test_a_handler_that_does_not_stream_ends_when_its_caller_leaves(house: House):
    key, before = house.new_tenant("leaves-early", concurrent_requests=1), num_decoding_steps(house)
    body = json.dumps(BODY | {"max_tokens": 120, "n": 64})
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\ncontent-length: {len(body)}"
    with socket.create_connection(("127.0.0.1", house.port)) as connection:
        connection.sendall(f"{head}\r\n\r\n{body}".encode())
        eventually(lambda: num_decoding_steps(house) > before)

    eventually(lambda: not house.parts.pipeline.admission.tickets)
    with house.http(key) as http:
        usage = eventually(lambda: _usage(http))
    assert 0 < usage["output_tokens"] < 64 * 120


def _usage(http: httpx.Client) -> dict | None:
    results = http.get("/organization/usage/completions", params={"start_time": 0}).json()["data"][-1]["results"]
    return results[0] if results and results[0]["output_tokens"] else None


def test_a_settlement_outlives_its_request(house: House):
    """The framework cancels what a handler awaits in ``finally`` again, unless it is shielded."""
    key = house.new_tenant("settles", concurrent_requests=1)
    for _ in range(5):
        with (
            house.http(key) as http,
            http.stream("POST", "/completions", json=BODY | {"max_tokens": 120, "stream": True, "n": 8}) as answer,
        ):
            assert answer.status_code == 200, "the lease of the one before is free"
            next(answer.iter_lines())
        eventually(lambda: not house.parts.pipeline.admission.tickets)


def test_no_handler_is_given_a_session_that_ends_before_its_stream(house: House):
    app = public_app(house.parts)

    assert not app.dependencies
    assert [path for _, path, handler in handlers_of(app) if handler.dependencies] == []


@pytest.mark.parametrize("path", ["/chat/completions", "/completions", "/adapters/a/commit", "/adapters/a/rollback"])
def test_a_body_nested_without_end_is_400(house: House, key: str, path: str):
    with house.http(key) as http:
        answers = [http.post(path, content=body) for body in (DEEP, b'{"model": "tiny", "x": ' + DEEP + b"}")]

    assert {answer.status_code for answer in answers} == {400}


def test_a_body_over_our_own_limit_is_413_on_every_route_that_reads_json(house: House, key: str):
    body = b" " * (MAX_BODY_BYTES + 1)
    with house.http(key) as http:
        answers = [
            http.post(path, content=body)
            for path in ("/chat/completions", "/completions", "/adapters/a/commit", "/adapters/a/rollback")
        ]

    assert {(each.status_code, each.json()["error"]["code"]) for each in answers} == {(413, "payload_too_large")}


def test_streams_are_tested_on_a_real_server():
    """The framework's own test client never sees a stream's first chunk."""
    own = re.compile(r"^\s*(from|import) litestar\.testing", re.M)

    assert [path.name for path in TESTS.rglob("test_*.py") if own.search(path.read_text())] == []
