"""What reaches a gateway before it is a request: endless heads, broken ones, several at once. Raw sockets."""

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Iterator

import pytest
from gateway_harness import House, eventually

from gateway.app import build_app
from gateway.main import _Server, _uvicorn_config
from gateway.protocol import MAX_HEAD_BYTES, Bounds, _OneWriteATurn

CHUNK = 16_384


def dial(house: House, port: int = 0) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port or house.port), timeout=60)


@contextlib.contextmanager
def another_port(house: House, bounds: Bounds) -> Iterator[int]:
    with another_server(house, bounds) as (port, _):
        yield port


@contextlib.contextmanager
def another_server(house: House, bounds: Bounds) -> Iterator[tuple[int, _Server]]:
    """The house's gateway behind other bounds."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = _Server(_uvicorn_config(build_app(house.parts), bounds))
    serving = asyncio.run_coroutine_threadsafe(server.serve(sockets=[listener]), house.loop)
    eventually(lambda: server.started)
    try:
        yield listener.getsockname()[1], server
    finally:
        server.should_exit = True
        serving.result(60)


@pytest.fixture(scope="module")
def hasty(house: House) -> Iterator[int]:
    """A port where nothing may take longer than a moment."""
    with another_port(house, Bounds(receive_s=0.2, idle_s=0.2)) as port:
        yield port


def until_end(connection: socket.socket) -> bytes:
    answer = b""
    while data := connection.recv(CHUNK):
        answer += data
    return answer


def next_answer(connection: socket.socket) -> bytes:
    """One whole answer that says how long it is."""
    head, _, body = until(connection, b"\r\n\r\n").partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    while len(body) < length:
        body += some(connection)
    return head + b"\r\n\r\n" + body


def until(connection: socket.socket, wanted: bytes) -> bytes:
    """All that comes until that has come."""
    answer = b""
    while wanted not in answer:
        answer += some(connection)
    return answer


def some(connection: socket.socket) -> bytes:
    data = connection.recv(CHUNK)
    assert data, "the connection was closed"
    return data


def post(key: str, **body) -> bytes:
    content = json.dumps({"model": "tiny", "prompt": [5, 6, 7], "temperature": 0, "ignore_eos": True} | body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Length: {len(content)}"
    return head.encode() + b"\r\n\r\n" + content


@pytest.mark.parametrize(
    ("start", "more"),
    [
        (b"GET /v1/models HTTP/1.1\r\nX: ", b"a" * CHUNK),
        (b"GET /v1/models HTTP/1.1\r\n", b"a: b\r\n" * (CHUNK // 6)),
        (b"GET /", b"a" * CHUNK),
        (b"POST /v1/models HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n", b"a: b\r\n" * (CHUNK // 6)),
    ],
    ids=["one long header", "many headers", "a long path", "trailers"],
)
def test_a_head_without_an_end_is_cut_off(house: House, start: bytes, more: bytes):
    with dial(house) as connection:
        connection.sendall(start)
        with pytest.raises(ConnectionError):
            connection.sendall(more * (100 * MAX_HEAD_BYTES // CHUNK))


def test_a_head_that_is_too_large_is_431_in_our_shape(house: House):
    with dial(house) as connection:
        connection.sendall(b"GET /v1/models HTTP/1.1\r\nX: a")
        connection.sendall(b"a" * MAX_HEAD_BYTES)
        head, _, body = until_end(connection).partition(b"\r\n\r\n")

    assert head.startswith(b"HTTP/1.1 431 ")
    assert b"\r\nx-request-id: " in head
    assert json.loads(body)["error"]["code"] == "headers_too_large"


def test_a_body_of_any_length_is_no_head(house: House, key: str):
    request = post(key, max_tokens=1, user="u" * 3)
    head, _, body = request.partition(b"\r\n\r\n")
    padded = body + b" " * (8 * MAX_HEAD_BYTES)
    with dial(house) as connection:
        connection.sendall(head.replace(b": %d" % len(body), b": %d" % len(padded)) + b"\r\n\r\n" + padded)
        assert connection.recv(CHUNK).startswith(b"HTTP/1.1 200 ")


def test_what_is_no_http_is_400_in_our_shape(house: House):
    with dial(house) as connection:
        connection.sendall(b"what is this?\r\n\r\n")
        head, _, body = until_end(connection).partition(b"\r\n\r\n")

    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


def test_a_caller_who_leaves_is_seen_by_the_request_that_runs_although_another_waits_behind_it(house: House):
    key = house.new_tenant("pipelining", concurrent_requests=4)
    with dial(house) as connection:
        connection.sendall(post(key, max_tokens=120, n=8, stream=True) + post(key, max_tokens=1))
        head = until(connection, b"data: ")
    request_id = next(line for line in head.decode().split("\r\n") if line.startswith("x-request-id")).split(": ")[1]

    receipt = house.receipt(key, request_id)
    assert receipt["status"] == 499
    eventually(lambda: not house.parts.pipeline.admission.tickets)


PUT = b"PUT /v1/adapters/a/files/adapter_model.safetensors HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\n"
LATE = {
    "half a head": b"GET /v1/models HTTP/1.1\r\nHost: ",
    "no body": PUT + b"Content-Length: 5000\r\n\r\n",
    "half a body": PUT + b"Content-Length: 5000\r\n\r\n" + b"x" * 100,
    "half a chunk": PUT + b"Transfer-Encoding: chunked\r\n\r\n1000\r\nabc",
}


@pytest.mark.parametrize("what", LATE)
def test_a_request_that_stops_coming_is_408_and_ends_its_connection(house: House, key: str, hasty: int, what: str):
    with dial(house, hasty) as connection:
        connection.sendall(LATE[what].replace(b"%s", key.encode()))
        head, _, body = until_end(connection).partition(b"\r\n\r\n")

    assert head.startswith(b"HTTP/1.1 408 ")
    assert json.loads(body)["error"]["code"] == "request_timeout"


@pytest.mark.parametrize("start", [PUT + b"Content-Length: 50000\r\n\r\n", b"GET /v1/models HTTP/1.1\r\nX: "])
def test_a_request_that_comes_a_byte_at_a_time_is_408(house: House, key: str, hasty: int, start: bytes):
    ended = threading.Event()
    with dial(house, hasty) as connection:
        connection.sendall(start.replace(b"%s", key.encode()))

        def drip() -> None:
            with contextlib.suppress(OSError):
                while not ended.wait(0.02):
                    connection.sendall(b"x")

        thread = threading.Thread(target=drip)
        thread.start()
        answer = connection.recv(CHUNK)
        ended.set()
        thread.join()

    assert answer.startswith(b"HTTP/1.1 408 ")


def test_a_connection_on_which_nothing_was_said_is_closed_without_a_word(house: House, hasty: int):
    with dial(house, hasty) as connection:
        assert until_end(connection) == b""


def test_a_connection_between_requests_is_kept_for_a_while_and_closed(house: House, key: str):
    with another_port(house, Bounds(idle_s=2)) as port, dial(house, port) as connection:
        for _ in range(2):
            connection.sendall(post(key, max_tokens=1))
            assert next_answer(connection).startswith(b"HTTP/1.1 200 ")
        assert until_end(connection) == b""


def test_an_answer_may_take_longer_than_a_request_although_the_next_is_half_there(house: House, key: str, hasty: int):
    with dial(house, hasty) as connection:
        connection.sendall(post(key, max_tokens=120, n=32, stream=True) + b"GET /v1/mod")
        answer = until_end(connection)

    assert b"data: [DONE]" in answer


def test_one_connection_too_many_is_503_and_the_others_are_served(house: House, key: str):
    with (
        another_port(house, Bounds(max_connections=2)) as port,
        dial(house, port) as first,
        dial(house, port) as second,
    ):
        for connection in (first, second):
            connection.sendall(post(key, max_tokens=1))
            assert next_answer(connection).startswith(b"HTTP/1.1 200 ")
        with dial(house, port) as third:
            head, _, body = until_end(third).partition(b"\r\n\r\n")
        first.sendall(post(key, max_tokens=1))
        assert next_answer(first).startswith(b"HTTP/1.1 200 ")

    assert head.startswith(b"HTTP/1.1 503 ")
    assert b"\r\nretry-after: " in head
    assert json.loads(body)["error"]["code"] == "overloaded"


@pytest.mark.parametrize(
    ("line", "status"),
    [("CONNECT x:443", 400), ("CONNECT /v1/models", 405), ("NONSENSE /v1/models", 400), ("TRACE /v1/models", 405)],
)
def test_methods_of_proxies_and_of_nobody_are_refused_in_our_shape(house: House, line: str, status: int):
    with dial(house) as connection:
        connection.sendall(f"{line} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        head, _, body = until_end(connection).partition(b"\r\n\r\n")

    assert head.startswith(f"HTTP/1.1 {status} ".encode())
    assert b"\r\nx-request-id: " in head
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


# ── answers ──────────────────────────────────────────────────────────────────────────────────────


def test_a_caller_that_takes_nothing_of_its_answers_is_cut_off(house: House):
    ask = b"GET /v1/openapi.json HTTP/1.1\r\nHost: x\r\n\r\n"
    with another_server(house, Bounds(send_s=0.2)) as (port, server), dial(house, port) as connection:
        connection.sendall(ask)
        size = len(next_answer(connection))
        asked = 64 + (16 << 20) // size  # more than any socket buffers

        connection.sendall(ask * asked)
        eventually(lambda: not server.server_state.connections)

        with contextlib.suppress(ConnectionError):
            assert len(until_end(connection)) < asked * size


def test_what_is_written_in_one_turn_of_the_loop_leaves_in_one_piece():
    class Transport(asyncio.Transport):
        def __init__(self) -> None:
            self.written: list[bytes] = []
            self.closed = False

        def write(self, data: bytes) -> None:
            self.written.append(data)

        def close(self) -> None:
            self.closed = True

    async def main():
        transport = Transport()
        gathering = _OneWriteATurn(transport)
        gathering.write(b"head")
        gathering.write(b"body")
        await asyncio.sleep(0)
        gathering.write(b"next")
        gathering.close()

        assert (transport.written, transport.closed) == ([b"headbody", b"next"], True)

    asyncio.run(main())
