"""The ops API over SQLite and Valkey, spoken to over HTTP: scopes, tenants, limits, keys, ledger, health."""

import asyncio
import json
import time
from collections.abc import Iterator

import httpx
import pytest
from ops_client import client_of, error_of, eventually
from sqlmodel import select

from tenants import keys
from tenants.database import Database
from tenants.key_repository import OperatorRepository
from tenants.tables import Event, LedgerEntry
from tests import plain
from tests.invoicing import charge_on
from tests.months import stay_within_a_month
from tests.ops_server import OpsServer, ops_server_in_thread


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpsServer]:
    with ops_server_in_thread(tmp_path_factory.mktemp("home"), "--demo") as server:
        yield server


@pytest.fixture
def ops(server: OpsServer) -> Iterator[httpx.Client]:
    with client_of(server, server.credentials.operator_key) as client:
        yield client


def make_operator(server: OpsServer, *scopes: str) -> str:
    """Another operator's key, as its owner holds it."""

    async def work() -> str:
        database = Database(server.settings.database_url)
        await database.start()
        new = keys.issue("ops", server.context.secrets)
        async with database.transaction() as session:
            await OperatorRepository(session).create(new, "another", scopes)
        await database.close()
        return new.minted.text

    return asyncio.run(work())


# ── who may ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("key", ["", "Bearer", "Bearer nonsense", "Bearer tn_ops_" + "0" * 36, "Basic x"])
def test_without_an_operator_key_nothing_is_told(server: OpsServer, key: str) -> None:
    answer = plain.get(f"{server.url}/admin/v1/tenants", headers={"authorization": key})
    assert error_of(answer) == (401, "invalid_api_key", None)


def test_a_tenants_key_opens_nothing_here(server: OpsServer) -> None:
    with client_of(server, server.credentials.tenants["acme"].api_key) as client:
        assert error_of(client.get("/tenants"))[0] == 401


def test_a_key_does_what_its_scopes_name_and_no_more(server: OpsServer, ops: httpx.Client) -> None:
    tenant_id = server.credentials.tenants["acme"].tenant_id
    reader, biller = make_operator(server, "read"), make_operator(server, "billing")
    ops.patch(f"/tenants/{tenant_id}", json={"time_zone": "UTC"})  # a change: the epoch tells of the new keys too

    with client_of(server, reader) as client:
        eventually(lambda: client.get("/tenants").status_code == 200)
        assert error_of(client.post("/tenants", json={"name": "x"})) == (403, "insufficient_scope", None)
        assert error_of(client.get("/rate-cards"))[0] == 403
    with client_of(server, biller) as client:
        assert client.get("/rate-cards").status_code == 200
        assert client.get("/ledger", params={"tenant_id": tenant_id}).status_code == 200
        assert error_of(client.get("/tenants"))[0] == 403


# ── tenants and limits ───────────────────────────────────────────────────────────────────────────


def test_a_tenant_is_made_listed_and_shown(ops: httpx.Client) -> None:
    made = ops.post("/tenants", json={"name": "globex", "time_zone": "Asia/Kolkata", "limits": {"weight": 3}})
    assert made.status_code == 201
    tenant = made.json()
    assert tenant["id"].startswith("ten_")
    assert (tenant["status"], tenant["time_zone"], tenant["limits"]["weight"]) == ("active", "Asia/Kolkata", 3)
    assert tenant["limits"]["requests_per_minute"] is None
    assert ops.get(f"/tenants/{tenant['id']}").json() == tenant
    assert tenant in ops.get("/tenants").json()["data"]


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ({"name": "acme"}, (409, "name_taken", "name")),
        ({"name": ""}, (400, None, "name")),
        ({"name": "n", "time_zone": "Mars/Olympus"}, (400, None, "time_zone")),
        ({"name": "n", "billing_anchor_day": 32}, (400, None, "billing_anchor_day")),
        ({"name": "n", "limits": {"weight": 0}}, (400, None, "weight")),
        ({"name": "n", "limits": {"unheard_of": 1}}, (400, None, "unheard_of")),
        ({"name": 5}, (400, None, "name")),
        ({"name": "n", "colour": "red"}, (400, None, "colour")),
        ({}, (400, None, "name")),
        ({"name": "ten_x"}, (400, None, "name")),
    ],
)
def test_a_tenant_that_cannot_be_is_refused_by_name(ops: httpx.Client, body: dict, wanted: tuple) -> None:
    assert error_of(ops.post("/tenants", json=body)) == wanted


def test_a_body_that_is_no_json_is_a_400(ops: httpx.Client) -> None:
    for content in (b"{", b"\xff\xfe", b"[1]", b"", b'{"limits":' * 100_000):
        answer = ops.post("/tenants", content=content, headers={"content-type": "application/json"})
        assert error_of(answer)[0] == 400


def test_limits_change_one_by_one_and_null_takes_one_away(ops: httpx.Client) -> None:
    tenant_id = ops.post("/tenants", json={"name": "limits"}).json()["id"]

    ops.patch(f"/tenants/{tenant_id}/limits", json={"requests_per_minute": 60, "concurrent_requests": 2})
    answer = ops.patch(f"/tenants/{tenant_id}/limits", json={"requests_per_minute": None, "max_class": "batch"})

    limits = answer.json()
    assert (limits["requests_per_minute"], limits["concurrent_requests"], limits["max_class"]) == (None, 2, "batch")
    assert ops.get(f"/tenants/{tenant_id}/limits").json() == limits


def events_of(server: OpsServer, tenant_id: str) -> list[tuple[str, int]]:
    """(kind, percent), as written."""

    async def work() -> list[tuple[str, int]]:
        database = Database(server.settings.database_url)
        await database.start()
        async with database.session() as session:
            rows = (await session.exec(select(Event).where(Event.tenant_id == tenant_id))).all()
        await database.close()
        return [(row.kind, json.loads(row.data)["percent"]) for row in rows]

    return asyncio.run(work())


def test_a_limit_that_is_set_below_what_is_spent_is_told_at_once(server: OpsServer, ops: httpx.Client) -> None:
    stay_within_a_month()
    tenant_id = ops.post("/tenants", json={"name": "overspent"}).json()["id"]
    charge_on(server.settings.database_url, tenant_id, time.time_ns())  # a few dollars

    ops.patch(f"/tenants/{tenant_id}/limits", json={"spend_alerts": [50, 100], "spend_limit_picousd_per_month": 10**12})

    assert sorted(events_of(server, tenant_id)) == [("budget.alert", 50), ("budget.alert", 100)]


def test_a_class_that_is_none_is_refused_by_the_name_that_the_caller_used(ops: httpx.Client) -> None:
    tenant_id = ops.post("/tenants", json={"name": "no such class"}).json()["id"]
    assert error_of(ops.post(f"/tenants/{tenant_id}/keys", json={"class": "gold"})) == (400, None, "class")


def test_a_limit_that_cannot_be_changes_nothing(ops: httpx.Client) -> None:
    tenant_id = ops.post("/tenants", json={"name": "unchanged"}).json()["id"]
    before = ops.get(f"/tenants/{tenant_id}/limits").json()
    for changes in ({"requests_per_minute": -1}, {"weight": None}, {"weight": 5, "max_class": "vip"}, {"x": 1}):
        assert error_of(ops.patch(f"/tenants/{tenant_id}/limits", json=changes))[0] == 400
    assert ops.get(f"/tenants/{tenant_id}/limits").json() == before


def test_a_suspended_tenants_keys_are_refused_within_a_second(server: OpsServer, ops: httpx.Client) -> None:
    tenant_id = ops.post("/tenants", json={"name": "suspended"}).json()["id"]
    key = ops.post(f"/tenants/{tenant_id}/keys", json={}).json()["api_key"]
    eventually(lambda: server.context.directory.authenticate(key))

    ops.patch(f"/tenants/{tenant_id}", json={"status": "suspended"})
    eventually(lambda: server.context.directory.authenticate(key) is None)

    ops.patch(f"/tenants/{tenant_id}", json={"status": "active"})
    eventually(lambda: server.context.directory.authenticate(key))


def test_what_is_not_there_is_not_found(ops: httpx.Client) -> None:
    for path in (
        "/tenants/ten_0",
        "/tenants/ten_0/limits",
        "/tenants/ten_0/keys",
        "/keys/absent",
        "/keys/x/limits",
        "/operators/x",
        "/tenants/ten_0/export",
    ):
        assert error_of(ops.get(path)) == (404, "not_found", None)
    assert error_of(ops.delete("/keys/absent"))[0] == 404
    assert error_of(ops.get("/nowhere"))[0] == 404
    assert "/admin/v1/nowhere" in ops.get("/nowhere").text
    assert error_of(ops.put("/tenants", json={}))[0] == 405
    assert ops.put("/tenants", json={}).headers["allow"] == "GET, HEAD, POST"


def test_a_name_that_would_break_its_line_of_a_list_is_refused(server: OpsServer, ops: httpx.Client) -> None:
    tenant_id = server.credentials.tenants["acme"].tenant_id

    for path in ("/tenants", f"/tenants/{tenant_id}/keys", "/operators"):
        assert error_of(ops.post(path, json={"name": "two\nlines"})) == (400, None, "name")


# ── keys ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_key_is_shown_once(server: OpsServer, ops: httpx.Client) -> None:
    tenant_id = server.credentials.tenants["acme"].tenant_id
    made = ops.post(f"/tenants/{tenant_id}/keys", json={"name": "ci", "class": "batch", "expires_at": 4_000_000_000})
    assert made.status_code == 201
    key = made.json()
    text = key.pop("api_key")

    assert text.startswith("tn_live_")
    assert (key["name"], key["class"], key["last4"], key["expires_at"]) == ("ci", "batch", text[-4:], 4_000_000_000)
    listed = ops.get(f"/tenants/{tenant_id}/keys")
    assert key in listed.json()["data"]
    assert text not in listed.text
    eventually(lambda: server.context.directory.authenticate(text))


def test_a_revoked_key_is_refused_within_a_second(server: OpsServer, ops: httpx.Client) -> None:
    tenant_id = server.credentials.tenants["acme"].tenant_id
    key = ops.post(f"/tenants/{tenant_id}/keys", json={}).json()
    eventually(lambda: server.context.directory.authenticate(key["api_key"]))

    gone = ops.delete(f"/keys/{key['id']}")

    assert (gone.status_code, gone.json()) == (200, {"id": key["id"], "object": "api_key", "deleted": True})
    eventually(lambda: server.context.directory.authenticate(key["api_key"]) is None)
    assert ops.get(f"/keys/{key['id']}").json()["revoked_at"] is not None


def test_a_rotated_key_keeps_its_limits_and_class(server: OpsServer, ops: httpx.Client) -> None:
    tenant_id = server.credentials.tenants["acme"].tenant_id
    old = ops.post(f"/tenants/{tenant_id}/keys", json={"name": "ci", "class": "interactive"}).json()
    limits = ops.patch(f"/keys/{old['id']}/limits", json={"tokens_per_minute": 1000}).json()

    rotated = ops.post(f"/keys/{old['id']}/rotate", json={"overlap_seconds": 0})

    assert rotated.status_code == 201
    new = rotated.json()
    assert (new["name"], new["class"], new["limits"]) == ("ci", "interactive", limits)
    assert new["api_key"] != old["api_key"]
    eventually(lambda: server.context.directory.authenticate(new["api_key"]))
    assert server.context.directory.authenticate(old["api_key"]) is None
    principal = server.context.directory.authenticate(new["api_key"])
    assert principal
    assert principal.key_limits.tokens_per_minute == 1000
    assert error_of(ops.post(f"/keys/{old['id']}/rotate"))[0] == 400


# ── money, machines, health ──────────────────────────────────────────────────────────────────────


def test_the_ledger_shows_one_tenants_entries_newest_first(server: OpsServer, ops: httpx.Client) -> None:
    from tenants.database import Database

    mine, other = (server.credentials.tenants[name].tenant_id for name in ("acme", "blackbeard"))

    async def book() -> None:
        database = Database(server.settings.database_url)
        await database.start()
        async with database.transaction() as session:
            for number in range(5):
                session.add(entry(f"e{number}", mine, number))
            session.add(entry("e9", other, 9))
        await database.close()

    def entry(entry_id: str, tenant_id: str, second: int) -> LedgerEntry:
        names = {"key_id": "k", "model": "m", "base_model": "m", "flow_class": "standard", "rate_card_id": "rc"}
        money = {"quantity": 2, "unit_price_picousd": 50_000, "amount_picousd": 100_000}
        when = {"request_id": f"r{second}", "occurred_unix_ns": (1000 + second) * 10**9}
        return LedgerEntry(entry_id=entry_id, tenant_id=tenant_id, meter="output_tokens", **names, **money, **when)

    asyncio.run(book())

    def ids(**query) -> list[str]:
        return [row["id"] for row in ops.get("/ledger", params={"tenant_id": mine} | query).json()["data"]]

    assert ids() == ["e4", "e3", "e2", "e1", "e0"]
    assert ids(start_time=1001, end_time=1003) == ["e2", "e1"]
    assert ids(request_id="r3") == ["e3"]
    assert ids(limit=2, offset=1) == ["e3", "e2"]
    assert ids(meter="requests") == []
    assert ops.get("/ledger", params={"tenant_id": mine, "limit": 2}).json()["has_more"] is True
    assert ops.get("/ledger", params={"tenant_id": mine, "limit": 5}).json()["has_more"] is False
    for bad in ({}, {"tenant_id": mine, "limit": 0}, {"tenant_id": mine, "colour": "red"}):
        assert error_of(ops.get("/ledger", params=bad))[0] == 400
    assert error_of(ops.get("/ledger", params={"tenant_id": "ten_0"}))[0] == 404


def test_the_default_prices_are_not_zero(ops: httpx.Client) -> None:
    (card,) = ops.get("/rate-cards").json()["data"]
    assert card["version"] == 1
    assert {item["meter"] for item in card["items"]} >= {"input_uncached_tokens", "output_tokens"}
    assert all(item["price_picousd"] > 0 for item in card["items"])


def test_without_engines_it_is_healthy_and_not_ready(server: OpsServer, ops: httpx.Client) -> None:
    assert plain.get(f"{server.url}/healthz").status_code == 200
    ready = plain.get(f"{server.url}/readyz")
    assert (ready.status_code, ready.json()["ready"]) == (503, False)
    assert "no engine" in ready.json()["reasons"]
    assert ops.get("/engines").json() == {"object": "list", "data": []}
    assert ops.get("/models").json() == {"object": "list", "data": []}


def test_no_answer_or_file_holds_a_secret(server: OpsServer, ops: httpx.Client) -> None:
    for path in ("/tenants", f"/tenants/{server.credentials.tenants['acme'].tenant_id}/keys", "/rate-cards"):
        text = ops.get(path).text
        assert "digest" not in text
        assert server.credentials.operator_key not in text
    database = (server.home / "tenora.db").read_bytes() + (server.home / "tenora.db-wal").read_bytes()
    assert server.credentials.operator_key.encode() not in database
