"""How the tests of the ops port speak to it."""

import time
from collections.abc import Callable
from typing import Any

import httpx

from tests import plain
from tests.ops_server import OpsServer


def client_of(server: OpsServer, key: str = "") -> httpx.Client:
    """With that key, or with the home's own."""
    key = key or server.credentials.operator_key
    return plain.client(base_url=f"{server.url}/admin/v1", headers={"authorization": f"Bearer {key}"})


def error_of(answer: httpx.Response) -> tuple[int, str | None, str | None]:
    body = answer.json()["error"]
    assert set(body) >= {"message", "type", "param", "code"}
    return answer.status_code, body["code"], body["param"]


def eventually(check: Callable[[], Any]) -> Any:
    """Its first true result; fails when there is none in a minute, on however busy a machine."""
    deadline = time.monotonic() + 60
    while not (found := check()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found
