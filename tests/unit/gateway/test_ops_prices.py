"""Rate cards over the ops API and the CLI: versions that never change and take effect in the future."""

import time
from collections.abc import Iterator

import httpx
import pytest
from click.testing import CliRunner
from ops_client import client_of, error_of, eventually

from gateway.cli import main
from tests.ops_server import OpsServer, ops_server_in_thread


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpsServer]:
    with ops_server_in_thread(tmp_path_factory.mktemp("home"), "--no-demo") as server:
        yield server


@pytest.fixture
def ops(server: OpsServer) -> Iterator[httpx.Client]:
    with client_of(server) as client:
        yield client


def later(ops: httpx.Client, seconds: int = 1000) -> int:
    newest = ops.get("/rate-cards").json()["data"][-1]["effective_at"]
    return max(newest, int(time.time())) + seconds


def items_of(card: dict) -> dict[tuple[str, str, str], int]:
    return {(item["meter"], item["model"], item["class"]): item["price_picousd"] for item in card["items"]}


def test_a_new_version_has_the_newest_ones_prices_but_for_those_that_it_names(server: OpsServer, ops: httpx.Client):
    before = ops.get("/rate-cards").json()["data"][-1]
    at = later(ops)
    named = {"meter": "output_tokens", "model": "tiny", "class": "batch", "price_picousd": 7}

    answer = ops.post("/rate-cards", json={"effective_from": at, "items": [named]})

    assert answer.status_code == 201
    card = answer.json()
    assert (card["version"], card["effective_at"]) == (before["version"] + 1, at)
    assert items_of(card) == items_of(before) | {("output_tokens", "tiny", "batch"): 7}
    assert ops.get(f"/rate-cards/{card['id']}").json() == card
    assert ops.get("/rate-cards").json()["data"][-2:] == [before, card]
    event = ops.get("/audit", params={"limit": 1000}).json()["data"][-1]
    assert (event["action"], event["target"], event["after"]) == ("rate_card.create", card["id"], card)
    eventually(lambda: card["id"] in server.context.directory.rate_cards)


def test_an_item_that_is_taken_away_leaves_the_more_general_one(ops: httpx.Client):
    item = {"meter": "requests", "model": "tiny", "price_picousd": 5}
    assert ("requests", "tiny", "*") in items_of(
        ops.post("/rate-cards", json={"effective_from": later(ops), "items": [item]}).json()
    )

    gone = ops.post("/rate-cards", json={"effective_from": later(ops), "items": [item | {"price_picousd": None}]})

    assert ("requests", "tiny", "*") not in items_of(gone.json())


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"effective_from": 1}, "effective_from"),
        ({"items": [{"meter": "bandwidth", "price_picousd": 1}]}, "bandwidth"),
        ({"items": [{"meter": "requests", "price_picousd": -1}]}, "requests"),
        ({"items": [{"meter": "requests", "price_picousd": 10**12}]}, "requests"),
        (
            {"items": [{"meter": "adapter_storage_byte_seconds", "price_picousd": 10**8}]},
            "adapter_storage_byte_seconds",
        ),
        ({"items": [{"meter": "requests", "price_picousd": None}]}, "requests"),
    ],
)
def test_a_version_that_cannot_be_is_a_422_that_names_why(ops: httpx.Client, change: dict, param: str):
    before = ops.get("/rate-cards").json()

    answer = ops.post("/rate-cards", json={"effective_from": later(ops), "items": []} | change)

    assert error_of(answer) == (422, "invalid_rate_card", param)
    assert ops.get("/rate-cards").json() == before


def test_a_version_before_one_that_is_published_already_is_refused(ops: httpx.Client):
    at = later(ops)
    assert ops.post("/rate-cards", json={"effective_from": at}).status_code == 201

    assert error_of(ops.post("/rate-cards", json={"effective_from": at - 1}))[0] == 422


def test_prices_are_set_and_shown_from_the_command_line(server: OpsServer, ops: httpx.Client):
    where = ["--home", str(server.home), "--ops-url", server.url]
    in_force = CliRunner().invoke(main, ["price", "show", *where], standalone_mode=False)
    changes = ["output_tokens=250000", "requests:tiny:batch=0"]
    done = CliRunner().invoke(
        main, ["price", "set", *changes, "--effective-from", str(later(ops)), *where], standalone_mode=False
    )

    assert (in_force.exit_code, done.exit_code) == (0, 0), (in_force.output, done.output)
    assert "version 1 " in in_force.output
    assert ["output_tokens", "*", "*", "250000", "0.25"] in [line.split() for line in done.output.splitlines()]
    prices = items_of(ops.get("/rate-cards").json()["data"][-1])
    assert (prices["output_tokens", "*", "*"], prices["requests", "tiny", "batch"]) == (250_000, 0)
