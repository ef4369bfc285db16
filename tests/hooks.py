"""A receiver of webhooks on loopback, and what any receiver does to know that they are ours."""

import base64
import hashlib
import hmac
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Received:
    path: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def event_id(self) -> str:
        return self.headers["webhook-id"]

    @property
    def message(self) -> dict[str, Any]:
        return json.loads(self.body)


class Receiver(ThreadingHTTPServer):
    """``received`` is what came, in its order. ``answer`` says with which status, and may take its time."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.received: list[Received] = []
        self.answer: Callable[[Received], int] = lambda _: 204

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def at(self, path: str) -> list[Received]:
        return [each for each in self.received if each.path == path]


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        got = Received(self.path, {name.lower(): value for name, value in self.headers.items()}, body)
        self.server.received.append(got)
        self.send_response(self.server.answer(got))
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_) -> None:
        pass


@contextmanager
def receiving() -> Iterator[Receiver]:
    with Receiver() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def is_genuine(secret: str, headers: Mapping[str, str], body: bytes) -> bool:
    """As the specification has it; nothing of ours. ``secret`` is whsec_ and base64."""
    key = base64.b64decode(secret.removeprefix("whsec_"))
    signed = b".".join((headers["webhook-id"].encode(), headers["webhook-timestamp"].encode(), body))
    expected = "v1," + base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
    return any(hmac.compare_digest(expected, each) for each in headers["webhook-signature"].split(" "))
