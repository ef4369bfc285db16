"""Keys, operators and tenants through the admin API: what lives on, what ends, and what a lost store changes."""

import asyncio
import json
import signal
from collections.abc import Iterator
from itertools import count

import httpx
import pytest
from ops_client import client_of, error_of, eventually

from gateway.failures import MAX_FAILURES
from gateway.views.export import PARTS
from tenants.limits import KEY_SCOPES
from tenants.tables import LedgerEntry, Tenant, metadata
from tests import plain
from tests.ops_server import OpsServer, ops_server, ops_server_in_thread, settings_of
from tests.stores import valkey_server

numbers = count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpsServer]:
    with ops_server_in_thread(tmp_path_factory.mktemp("home"), "--no-demo") as server:
        yield server


@pytest.fixture
def ops(server: OpsServer) -> Iterator[httpx.Client]:
    with client_of(server) as client:
        yield client


@pytest.fixture
def tenant_id(ops: httpx.Client) -> str:
    return ops.post("/tenants", json={"name": f"tenant {next(numbers)}"}).json()["id"]


def new_key(ops: httpx.Client, tenant_id: str, **fields) -> dict:
    answer = ops.post(f"/tenants/{tenant_id}/keys", json=fields)
    assert answer.status_code == 201, answer.text
    return answer.json()


# ── scopes and expiry ────────────────────────────────────────────────────────────────────────────


def test_a_key_has_all_scopes_unless_some_are_named(server: OpsServer, ops: httpx.Client, tenant_id: str):
    every, some = new_key(ops, tenant_id), new_key(ops, tenant_id, scopes=["usage", "inference", "usage"])
    assert every["scopes"] == sorted(KEY_SCOPES)
    assert some["scopes"] == ["inference", "usage"]
    principal = eventually(lambda: server.context.directory.authenticate(some["api_key"]))
    assert principal.scopes == {"inference", "usage"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"scopes": []}, "scopes"),
        ({"scopes": ["root"]}, "scopes"),
        ({"scopes": "usage"}, "scopes"),
        ({"expires_at": 1}, "expires_at"),
        ({"expires_at": 1 << 40}, "expires_at"),
        ({"class": "gold"}, "class"),
        ({"name": "x" * 65}, "name"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_a_key_that_cannot_be_is_refused_by_name(ops: httpx.Client, tenant_id: str, body: dict, param: str):
    assert error_of(ops.post(f"/tenants/{tenant_id}/keys", json=body)) == (400, None, param)
    assert ops.get(f"/tenants/{tenant_id}/keys").json()["data"] == []


# ── rotation ─────────────────────────────────────────────────────────────────────────────────────


def test_a_rotated_key_lives_on_for_a_day_beside_its_successor(server: OpsServer, ops: httpx.Client, tenant_id: str):
    old = new_key(ops, tenant_id, name="ci", scopes=["inference"])
    ops.patch(f"/keys/{old['id']}/limits", json={"model": "m", "tokens_per_minute": 5})

    new = ops.post(f"/keys/{old['id']}/rotate").json()

    directory = server.context.directory
    assert eventually(lambda: directory.authenticate(new["api_key"])).scopes == {"inference"}
    assert directory.authenticate(old["api_key"])
    shown = ops.get(f"/keys/{old['id']}").json()
    assert shown["revoked_at"] is None
    assert 86_390 <= shown["expires_at"] - new["created_at"] <= 86_401
    assert new["expires_at"] is None
    assert new["limits"]["scoped"] == [
        {
            "model": "m",
            "adapter": None,
            "requests_per_minute": None,
            "tokens_per_minute": 5,
            "concurrent_requests": None,
            "spend_limit_picousd_per_month": None,
        }
    ]


def test_an_overlap_never_lengthens_a_keys_life(ops: httpx.Client, tenant_id: str):
    soon = new_key(ops, tenant_id)["created_at"] + 100
    old = new_key(ops, tenant_id, expires_at=soon)
    new = ops.post(f"/keys/{old['id']}/rotate", json={"overlap_seconds": 5000}).json()
    assert ops.get(f"/keys/{old['id']}").json()["expires_at"] == new["expires_at"] == soon


def test_without_overlap_the_old_key_ends_at_once(server: OpsServer, ops: httpx.Client, tenant_id: str):
    old = new_key(ops, tenant_id)
    eventually(lambda: server.context.directory.authenticate(old["api_key"]))
    ops.post(f"/keys/{old['id']}/rotate", json={"overlap_seconds": 0})
    eventually(lambda: server.context.directory.authenticate(old["api_key"]) is None)
    assert error_of(ops.post(f"/keys/{old['id']}/rotate"))[0] == 400


@pytest.mark.parametrize("body", [b'{"overlap_seconds": -1}', b'{"overlap_seconds": 2592001}', b'{"overlap": 1}', b"{"])
def test_an_overlap_that_cannot_be_is_refused(ops: httpx.Client, tenant_id: str, body: bytes):
    key = new_key(ops, tenant_id)
    assert ops.post(f"/keys/{key['id']}/rotate", content=body).status_code == 400
    assert len(ops.get(f"/tenants/{tenant_id}/keys").json()["data"]) == 1


# ── limits of a key ──────────────────────────────────────────────────────────────────────────────


def test_a_keys_limits_by_model_and_adapter_change_one_by_one(server: OpsServer, ops: httpx.Client, tenant_id: str):
    path = f"/keys/{(key := new_key(ops, tenant_id))['id']}/limits"
    ops.patch(path, json={"requests_per_minute": 60, "model": None})
    ops.patch(path, json={"model": "m", "requests_per_minute": 5, "concurrent_requests": 2})
    ops.patch(path, json={"adapter": "m", "tokens_per_minute": 7, "spend_limit_picousd_per_month": 10**18})
    limits = ops.patch(path, json={"model": "m", "concurrent_requests": None}).json()

    assert limits["requests_per_minute"] == 60
    fields = ("model", "adapter", "requests_per_minute", "tokens_per_minute", "spend_limit_picousd_per_month")
    assert {tuple(scope[field] for field in fields) for scope in limits["scoped"]} == {
        ("m", None, 5, None, None),
        (None, "m", None, 7, 10**18),
    }
    directory = server.context.directory
    eventually(lambda: len(getattr(directory.authenticate(key["api_key"]), "scoped_limits", ())) == 2)
    assert len(ops.patch(path, json={"model": "m", "requests_per_minute": None}).json()["scoped"]) == 1


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"model": "m", "adapter": "a", "requests_per_minute": 1}, "adapter"),
        ({"model": "", "requests_per_minute": 1}, "model"),
        ({"model": 5, "requests_per_minute": 1}, "model"),
        ({"model": "m" * 65, "requests_per_minute": 1}, "model"),
        ({"model": "m", "spend_limit_picousd_per_month": -1}, "spend_limit_picousd_per_month"),
        ({"model": "m", "max_adapters": 1}, "max_adapters"),
        ({"model": "m", "requests_per_minute": -1}, "requests_per_minute"),
        ({"model": "m", "requests_per_minute": 10**11 + 1}, "requests_per_minute"),
        ({"weight": 2}, "weight"),
        ({"colour": 2}, "colour"),
    ],
)
def test_a_keys_limit_that_cannot_be_is_refused_by_name(ops: httpx.Client, tenant_id: str, changes: dict, param: str):
    path = f"/keys/{new_key(ops, tenant_id)['id']}/limits"
    before = ops.get(path).json()
    assert error_of(ops.patch(path, json=changes)) == (400, None, param)
    assert ops.get(path).json() == before


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("weight", 1001),
        ("weight", True),
        ("weight", 1.5),
        ("default_output_tokens", 0),
        ("default_output_tokens", 10**9 + 1),
        ("max_adapters", 10**6 + 1),
        ("max_adapter_rank", 65_537),
        ("max_adapter_bytes", (1 << 40) + 1),
        ("max_storage_bytes", (1 << 50) + 1),
        ("spend_limit_picousd_per_month", 1 << 63),
        ("tokens_per_minute", 10**11 + 1),
        ("max_class", "gold"),
        ("unheard_of", 1),
    ],
)
def test_every_limit_of_a_tenant_has_bounds(ops: httpx.Client, tenant_id: str, field: str, value):
    assert error_of(ops.patch(f"/tenants/{tenant_id}/limits", json={field: value})) == (400, None, field)


# ── operators ────────────────────────────────────────────────────────────────────────────────────


def test_an_operator_is_made_listed_rotated_and_revoked(server: OpsServer, ops: httpx.Client):
    made = ops.post("/operators", json={"name": "Anna", "scopes": ["billing", "read"]}).json()
    text = made.pop("operator_key")
    assert (made["name"], made["scopes"], text[:7]) == ("Anna", ["billing", "read"], "tn_ops_")
    assert made in ops.get("/operators").json()["data"]
    eventually(lambda: server.context.directory.authenticate_operator(text))
    with client_of(server, text) as anna:
        assert anna.get("/tenants").status_code == 200
        assert error_of(anna.post("/operators", json={"name": "x"})) == (403, "insufficient_scope", None)

    new = ops.post(f"/operators/{made['id']}/rotate", json={"overlap_seconds": 0}).json()
    eventually(lambda: server.context.directory.authenticate_operator(text) is None)
    assert eventually(lambda: server.context.directory.authenticate_operator(new["operator_key"])).name == "Anna"
    assert ops.delete(f"/operators/{new['id']}").json() == {"id": new["id"], "object": "operator", "deleted": True}
    eventually(lambda: server.context.directory.authenticate_operator(new["operator_key"]) is None)


def test_the_last_key_that_may_administer_cannot_be_revoked(ops: httpx.Client):
    (first,) = [k for k in ops.get("/operators").json()["data"] if "admin" in k["scopes"] and not k["revoked_at"]]
    assert error_of(ops.delete(f"/operators/{first['id']}")) == (409, "last_administrator", None)
    assert ops.get("/operators").status_code == 200


@pytest.mark.parametrize(
    ("body", "param"), [({"name": ""}, "name"), ({"name": "n", "scopes": ["root"]}, "scopes"), ({}, "name")]
)
def test_an_operator_that_cannot_be_is_refused_by_name(ops: httpx.Client, body: dict, param: str):
    assert error_of(ops.post("/operators", json=body)) == (400, None, param)


# ── tenants ──────────────────────────────────────────────────────────────────────────────────────


def test_a_renamed_tenant_keeps_its_id_and_keys(server: OpsServer, ops: httpx.Client, tenant_id: str):
    key = new_key(ops, tenant_id)
    renamed = ops.patch(f"/tenants/{tenant_id}", json={"name": "a new name"})
    assert (renamed.json()["id"], renamed.json()["name"]) == (tenant_id, "a new name")
    directory = server.context.directory
    eventually(lambda: getattr(directory.authenticate(key["api_key"]), "tenant_name", "") == "a new name")
    other = ops.post("/tenants", json={"name": "another"}).json()["id"]
    assert error_of(ops.patch(f"/tenants/{other}", json={"name": "a new name"})) == (409, "name_taken", "name")


def book(server: OpsServer, tenant_id: str) -> None:
    from tenants.database import Database

    async def work() -> None:
        database = Database(server.settings.database_url)
        await database.start()
        names = {"key_id": "k", "model": "m", "base_model": "m", "flow_class": "standard", "rate_card_id": "rc"}
        money = {"quantity": 2, "unit_price_picousd": 5, "amount_picousd": 10}
        async with database.transaction() as session:
            for number in range(1203):  # more than two pages of an export
                row = {"entry_id": f"{tenant_id}{number:04}", "request_id": "r", "occurred_unix_ns": number}
                session.add(LedgerEntry(tenant_id=tenant_id, meter="output_tokens", **row, **names, **money))
        await database.close()

    asyncio.run(work())


def test_an_export_is_everything_but_secrets_and_says_where_it_ends(
    server: OpsServer, ops: httpx.Client, tenant_id: str
):
    key = new_key(ops, tenant_id, name="ci")
    book(server, tenant_id)

    answer = ops.get(f"/tenants/{tenant_id}/export")

    assert answer.headers["content-type"].startswith("application/x-ndjson")
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert [line["object"] for line in lines[:2]] == ["tenant", "api_key"]
    assert lines[1]["id"] == key["id"]
    assert len({line["id"] for line in lines if line["object"] == "ledger_entry"}) == 1203
    assert lines[-1] == {"object": "end", "lines": len(lines) - 1}
    assert "digest" not in answer.text
    assert key["api_key"] not in answer.text


NOT_EXPORTED = {
    "idempotent_request": "answers, encrypted under what their callers alone have",
    "spend_total": "sums of the ledger",
    "usage_series": "sums of the ledger",
    "wallet_hold": "what runs now, or has become a record",
}


def test_every_table_of_tenants_is_exported_or_says_why_not():
    exported = {table.__tablename__ for table, *_ in PARTS} | {Tenant.__tablename__}

    of_tenants = {name for name, table in metadata.tables.items() if "tenant_id" in table.columns}

    assert of_tenants - exported == set(NOT_EXPORTED)


def test_an_export_has_what_was_paid_in_advance(ops: httpx.Client, tenant_id: str):
    for reference, usd in (("PAYMENT-1", 5), ("PAYMENT-2", 7)):
        body = {"amount_picousd": usd * 10**12, "reference": reference}
        assert ops.post(f"/tenants/{tenant_id}/credit", json=body).status_code in (200, 201)

    lines = [json.loads(line) for line in ops.get(f"/tenants/{tenant_id}/export").text.splitlines()]

    grants = [(line["reference"], line["amount_picousd"]) for line in lines if line["object"] == "wallet_grant"]
    assert grants == [("PAYMENT-1", 5 * 10**12), ("PAYMENT-2", 7 * 10**12)]
    assert [line["granted_picousd"] for line in lines if line["object"] == "wallet"] == [12 * 10**12]


def test_a_deleted_tenant_is_gone_but_for_the_books(server: OpsServer, ops: httpx.Client, tenant_id: str):
    name = ops.get(f"/tenants/{tenant_id}").json()["name"]
    key = new_key(ops, tenant_id)
    eventually(lambda: server.context.directory.authenticate(key["api_key"]))
    book(server, tenant_id)
    staged = server.context.blobs.stage()
    staged.write_bytes(b"weights")
    blob = server.context.blobs.publish(tenant_id, "ab" * 32, staged)

    deleted = ops.delete(f"/tenants/{tenant_id}")

    assert (deleted.status_code, deleted.json()["deleted"]) == (200, True)
    eventually(lambda: server.context.directory.authenticate(key["api_key"]) is None)
    assert not blob.parent.exists()
    for path in (f"/tenants/{tenant_id}", f"/tenants/{tenant_id}/keys", f"/keys/{key['id']}"):
        assert error_of(ops.get(path)) == (404, "not_found", None)
    for call in (ops.delete(f"/tenants/{tenant_id}"), ops.post(f"/tenants/{tenant_id}/keys", json={})):
        assert call.status_code == 404
    assert tenant_id not in ops.get("/tenants").text
    assert len(ops.get("/ledger", params={"tenant_id": tenant_id, "limit": 1000}).json()["data"]) == 1000
    assert ops.post("/tenants", json={"name": name}).json()["id"] != tenant_id  # its name is free


# ── the port itself ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("method", ["OPTIONS", "TRACE"])
@pytest.mark.parametrize("path", ["/admin/v1/tenants", "/admin/v1/keys/x/limits", "/healthz", "/nowhere"])
def test_methods_that_nobody_asked_for_are_refused_with_and_without_a_key(server: OpsServer, method: str, path: str):
    for key in ("", server.credentials.operator_key):
        answer = plain.request(method, server.url + path, headers={"authorization": f"Bearer {key}"} if key else {})
        known = path != "/nowhere"
        assert error_of(answer) == ((405, "method_not_allowed", None) if known else (404, "not_found", None))


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/metrics"])
def test_who_probes_by_head_is_answered_as_by_get(server: OpsServer, path: str):
    asked, got = plain.request("HEAD", server.url + path), plain.get(server.url + path)

    assert (asked.status_code, asked.content) == (got.status_code, b"")


def test_after_many_wrong_keys_an_address_is_told_to_wait_and_operators_pass(tmp_path):
    with ops_server_in_thread(tmp_path, "--no-demo") as server, client_of(server, "tn_ops_" + "0" * 36) as guesser:
        answers = [guesser.get("/tenants") for _ in range(MAX_FAILURES + 20)]
        assert {answer.status_code for answer in answers} == {401, 429}
        refused = next(answer for answer in answers if answer.status_code == 429)  # later ones may be let through again
        assert int(refused.headers["retry-after"]) >= 1
        with client_of(server) as ops:
            assert ops.get("/tenants").status_code == 200


# ── without the store ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("lost", ["stopped", "killed"])
def test_keys_made_rotated_and_revoked_while_the_store_is_away_are_answered_and_in_force(tmp_path, lost: str):
    async def main() -> None:
        with valkey_server() as store:
            async with (
                ops_server(settings_of(tmp_path, store.url, "--no-demo")) as server,
                plain.async_client(
                    base_url=f"{server.url}/admin/v1",
                    headers={"authorization": f"Bearer {server.credentials.operator_key}"},
                ) as ops,
            ):
                directory = server.context.directory
                tenant_id = (await ops.post("/tenants", json={"name": "t"})).json()["id"]
                if lost == "stopped":
                    store.process.send_signal(signal.SIGSTOP)
                else:
                    store.process.kill()

                made = await ops.post(f"/tenants/{tenant_id}/keys", json={})
                assert made.status_code == 201
                await _becomes(lambda: directory.authenticate(made.json()["api_key"]))

                rotated = await ops.post(f"/keys/{made.json()['id']}/rotate", json={"overlap_seconds": 0})
                assert rotated.status_code == 201
                await _becomes(lambda: directory.authenticate(rotated.json()["api_key"]))
                assert directory.authenticate(made.json()["api_key"]) is None

                assert (await ops.delete(f"/keys/{rotated.json()['id']}")).status_code == 200
                await _becomes(lambda: directory.authenticate(rotated.json()["api_key"]) is None)

    asyncio.run(main())


async def _becomes(condition) -> None:
    """The bound is only for a failing test."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)
