"""What reaches a gateway before it is a request: endless heads, broken ones, several at once. Raw sockets."""

import json
import socket

import pytest
from gateway_harness import House, eventually

from gateway.protocol import MAX_HEAD_BYTES

CHUNK = 16_384


def dial(house: House) -> socket.socket:
    return socket.create_connection(("127.0.0.1", house.port), timeout=20)


def until_end(connection: socket.socket) -> bytes:
    answer = b""
    while data := connection.recv(CHUNK):
        answer += data
    return answer


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
        head = b""
        while b"data: " not in head:
            head += connection.recv(CHUNK)
    request_id = next(line for line in head.decode().split("\r\n") if line.startswith("x-request-id")).split(": ")[1]

    receipt = house.receipt(key, request_id)
    assert receipt["status"] == 499
    eventually(lambda: not house.parts.pipeline.admission._tickets)
