"""The ledger for other systems: CloudEvents and meter events, as pages and as lines."""

import asyncio
import json
import re
import uuid
from collections.abc import Iterator

import httpx
import pytest
from click.testing import CliRunner
from ops_client import client_of, error_of

from gateway.cli import main
from tenants.database import Database
from tenants.ledger import Ledger, entry_id
from tenants.meter import RequestContext
from tenants.pricing import RateCard, default_prices
from tenants.settled import SettledRequest
from tests.ops_server import OpsServer, ops_server_in_thread

AT_NS = 1_900_000_800_123_456_789
CARDS = {"rc_1": RateCard("rc_1", 1, 0, default_prices())}
REQUEST = str(uuid.UUID(int=7))


def settled(tenant_id: str, request_id: str) -> SettledRequest:
    context = RequestContext(
        **{"tenant_id": tenant_id, "key_id": "k1", "request_id": request_id, "attempt": 0, "base_model": "tiny"},
        **{"model": "pirate", "adapter_version_id": "adv_1", "flow_class": "batch", "rate_card_id": "rc_1"},
        admitted_unix_ns=AT_NS,
    )
    return SettledRequest(context, 200, 20, 16, 5, 1, 2, 3, 4, 5, 6, 7, AT_NS)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpsServer]:
    """Two tenants with a request each; the first has a billing reference."""
    with ops_server_in_thread(tmp_path_factory.mktemp("home"), "--no-demo") as server:
        with client_of(server) as ops:
            ids = [ops.post("/tenants", json={"name": name}).json()["id"] for name in ("told", "silent")]
            ops.patch(f"/tenants/{ids[0]}", json={"billing_reference": "cus_1"}).raise_for_status()
        requests = [settled(ids[0], REQUEST), settled(ids[1], str(uuid.UUID(int=8)))]
        asyncio.run(post(server, requests))
        yield server


async def post(server: OpsServer, requests: list[SettledRequest]) -> None:
    database = Database(server.settings.database_url)
    await database.start()
    async with database.transaction() as session:
        await Ledger().post(session, requests, CARDS)
    await database.close()


@pytest.fixture
def ops(server: OpsServer) -> Iterator[httpx.Client]:
    with client_of(server) as client:
        yield client


def test_each_entry_is_a_cloud_event_under_its_permanent_name(ops: httpx.Client):
    page = ops.get("/exports/cloudevents").json()

    event = page["data"][0]
    told = next(tenant for tenant in ops.get("/tenants").json()["data"] if tenant["name"] == "told")
    assert len(page["data"]) == 8
    assert event | {"data": None} == {
        "specversion": "1.0",
        "id": entry_id(REQUEST, "input_uncached_tokens"),
        "source": "/tenora/ledger",
        "type": "tenora.usage.input_uncached_tokens",
        "subject": told["id"],
        "time": "2030-03-17T18:00:00.123456789Z",
        "datacontenttype": "application/json",
        "data": None,
    }
    assert event["data"] == {
        **{"request_id": REQUEST, "key_id": "k1", "meter": "input_uncached_tokens", "quantity": 4},
        **{"unit_price_picousd": 50_000, "amount_picousd": 200_000, "model": "pirate", "base_model": "tiny"},
        **{"flow_class": "batch", "rate_card_id": "rc_1"},
    }


def test_a_batch_is_the_bare_list_with_the_way_on_in_a_header(ops: httpx.Client):
    accept = {"accept": "application/cloudevents-batch+json"}

    answer = ops.get("/exports/cloudevents", params={"limit": 3}, headers=accept)

    page = ops.get("/exports/cloudevents", params={"limit": 3}).json()
    assert answer.headers["content-type"] == "application/cloudevents-batch+json"
    assert (answer.json(), answer.headers["x-next-after"]) == (page["data"], page["next_after"])


@pytest.mark.parametrize("kind", ["cloudevents", "meter-events"])
def test_pages_follow_each_other_and_the_last_one_can_be_asked_again(ops: httpx.Client, kind: str):
    whole = ops.get(f"/exports/{kind}", params={"limit": 1000}).json()
    found, after, more = [], "1.0", True
    while more:
        page = ops.get(f"/exports/{kind}", params={"after": after, "limit": 3}).json()
        found += page["data"]
        after, more = page["next_after"], page["has_more"]

    assert found == whole["data"]
    assert ops.get(f"/exports/{kind}", params={"after": after}).json()["data"] == []


def test_meter_events_are_of_tenants_with_a_billing_reference_and_the_others_are_counted(ops: httpx.Client):
    page = ops.get("/exports/meter-events").json()

    assert page["num_without_reference"] == 4
    assert {event["event_name"]: event for event in page["data"]} == {
        meter: {
            "event_name": meter,
            "identifier": entry_id(REQUEST, meter),
            "timestamp": AT_NS // 10**9,
            "payload": {"stripe_customer_id": "cus_1", "value": value},
        }
        for meter, value in (
            ("input_uncached_tokens", "4"),
            ("input_cached_tokens", "16"),
            ("output_tokens", "5"),
            ("requests", "1"),
        )
    }
    assert all(len(event["identifier"]) <= 100 for event in page["data"])


@pytest.mark.parametrize("query", [{"after": "x"}, {"after": "0.0"}, {"after": "1"}, {"limit": 0}, {"limit": 1001}])
def test_a_bad_query_is_400_and_named(ops: httpx.Client, query: dict):
    status, _, param = error_of(ops.get("/exports/cloudevents", params=query))

    assert (status, param) == (400, next(iter(query)))


@pytest.mark.parametrize("reference", ["", "two words", "x" * 65, "ü"])
def test_a_billing_reference_is_short_ascii_and_null_takes_it_away(ops: httpx.Client, reference: str):
    path = f"/tenants/{ops.post('/tenants', json={'name': f'ref-{len(reference)}-{reference[:1]}'}).json()['id']}"

    assert error_of(ops.patch(path, json={"billing_reference": reference}))[::2] == (400, "billing_reference")
    assert ops.patch(path, json={"billing_reference": "cus_2"}).json()["billing_reference"] == "cus_2"
    assert ops.patch(path, json={"time_zone": "Asia/Kolkata"}).json()["billing_reference"] == "cus_2"
    assert ops.patch(path, json={"billing_reference": None}).json()["billing_reference"] is None


def test_the_command_line_writes_an_event_a_line_and_says_where_to_go_on(server: OpsServer, ops: httpx.Client):
    where = ["--ops-url", server.url, "--operator-key", server.credentials.operator_key]

    result = CliRunner().invoke(main, ["export", "cloudevents", *where])

    events = ops.get("/exports/cloudevents", params={"limit": 1000}).json()["data"]
    assert [json.loads(line) for line in result.stdout.splitlines()] == events
    place = re.fullmatch(r"--after (\S+)\n", result.stderr)
    again = CliRunner().invoke(main, ["export", "meter-events", "--after", place[1], *where])
    assert (again.exit_code, again.stdout) == (0, "")
