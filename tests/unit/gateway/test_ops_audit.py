"""Every administrative write leaves one event in the audit log, and nobody can take it away unseen."""

import contextlib
import json
import sqlite3
import time
from collections.abc import Callable, Iterator
from typing import Any

import click
import httpx
import pytest
from click.testing import CliRunner
from litestar import post
from ops_client import client_of
from test_ops_slo import document

from gateway.access import handlers_of
from gateway.administration import needs
from gateway.cli import main
from gateway.serve.ops_app import build_ops_app
from tests import plain
from tests.invoicing import charge_on, set_aside_on
from tests.months import stay_within_a_month
from tests.ops_server import OpsServer, ops_server_in_thread


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpsServer]:
    with ops_server_in_thread(tmp_path_factory.mktemp("home"), "--no-demo") as server:
        yield server


@pytest.fixture
def ops(server: OpsServer) -> Iterator[httpx.Client]:
    with client_of(server) as client:
        yield client


def events(ops: httpx.Client) -> list[dict[str, Any]]:
    found, after = [], 0
    while True:
        page = ops.get("/audit", params={"after": after}).json()
        found += page["data"]
        if not page["has_more"]:
            return found
        after = page["next_after"]


Make = Callable[[], str]


def samples(
    tenant: Make, key: Make, operator: Make, invoice: Make, promised: Make, aside: Make
) -> dict[tuple[str, str], Callable[[], tuple[str, dict]]]:
    """A request to every writing route: path below /admin/v1, and its body. A route without one fails the walk."""
    return {
        ("POST", "/tenants"): lambda: ("/tenants", {"name": f"made {tenant()}"}),
        ("PATCH", "/tenants/{tenant_id}"): lambda: (f"/tenants/{tenant()}", {"status": "suspended"}),
        ("DELETE", "/tenants/{tenant_id}"): lambda: (f"/tenants/{tenant()}", {}),
        ("PATCH", "/tenants/{tenant_id}/limits"): lambda: (f"/tenants/{tenant()}/limits", {"weight": 2}),
        ("POST", "/tenants/{tenant_id}/keys"): lambda: (f"/tenants/{tenant()}/keys", {}),
        ("DELETE", "/keys/{key_id}"): lambda: (f"/keys/{key()}", {}),
        ("POST", "/keys/{key_id}/rotate"): lambda: (f"/keys/{key()}/rotate", {}),
        ("PATCH", "/keys/{key_id}/limits"): lambda: (f"/keys/{key()}/limits", {"tokens_per_minute": 9}),
        ("POST", "/rollups/rebuild"): lambda: ("/rollups/rebuild", None),
        ("POST", "/operators"): lambda: ("/operators", {"name": "walked"}),
        ("POST", "/operators/{key_id}/rotate"): lambda: (f"/operators/{operator()}/rotate", {}),
        ("DELETE", "/operators/{key_id}"): lambda: (f"/operators/{operator()}", {}),
        ("POST", "/invoices"): lambda: ("/invoices", {"tenant": tenant(), "period": "2026-01"}),
        ("POST", "/invoices/{invoice_id}/credit-notes"): lambda: (
            f"/invoices/{invoice()}/credit-notes",
            {"reason": "walked"},
        ),
        ("POST", "/tenants/{tenant_id}/credit"): lambda: (
            f"/tenants/{tenant()}/credit",
            {"amount_picousd": 10**12, "reference": "walked"},
        ),
        ("PUT", "/slo-objectives"): lambda: ("/slo-objectives", document(tenant())),
        ("DELETE", "/slo-objectives"): lambda: (f"/slo-objectives?tenant={promised()}&model=tiny&class=standard", {}),
        ("POST", "/set-aside/{request_id}/settle"): lambda: (f"/set-aside/{aside()}/settle", None),
        ("POST", "/set-aside/{request_id}/write-off"): lambda: (
            f"/set-aside/{aside()}/write-off",
            {"reason": "walked"},
        ),
        ("POST", "/rate-cards"): lambda: ("/rate-cards", {"effective_from": int(time.time()) + 1000}),
    }


def writing_routes(app) -> list[tuple[str, str]]:
    routes = ((method, path.removeprefix("/admin/v1")) for method, path, _ in handlers_of(app))
    return [(method, path) for method, path in routes if method not in ("GET", "HEAD")]


def routes_without_event(server: OpsServer, app, ops: httpx.Client) -> list[tuple[str, str]]:
    """Walks the app's own route table, each with an operator that may do all."""
    numbers = iter(range(1000))

    def tenant() -> str:
        answer = ops.post("/tenants", json={"name": f"walk {next(numbers)} {id(numbers)}"})
        assert answer.status_code == 201, answer.text
        return answer.json()["id"]

    def key() -> str:
        return ops.post(f"/tenants/{tenant()}/keys", json={}).json()["id"]

    def operator() -> str:
        return ops.post("/operators", json={"name": "o"}).json()["id"]

    def invoice() -> str:
        owner = tenant()
        stay_within_a_month()
        charge_on(server.settings.database_url, owner, time.time_ns())
        return ops.post(
            "/invoices", json={"tenant": owner, "period": time.strftime("%Y-%m", time.gmtime()), "force": True}
        ).json()["id"]

    def promised() -> str:
        tenant_id = tenant()
        answer = ops.put("/slo-objectives", json=document(tenant_id, model="tiny", **{"class": "standard"}))
        assert answer.status_code == 200, answer.text
        return tenant_id

    def aside() -> str:
        return set_aside_on(server.settings.database_url, tenant(), time.time_ns())

    silent, known = [], samples(tenant, key, operator, invoice, promised, aside)
    for method, path in writing_routes(app):
        if (method, path) not in known:
            silent.append((method, path))
            continue
        where, body = known[method, path]()
        before = len(events(ops))
        answer = ops.request(method, where, json=body)
        assert answer.status_code in (200, 201), (method, path, answer.text)
        if len(events(ops)) != before + 1:
            silent.append((method, path))
    return silent


def test_every_writing_route_leaves_one_event(server: OpsServer, ops: httpx.Client) -> None:
    app = build_ops_app(server.context, server.fleet)

    assert len(writing_routes(app)) >= 11
    assert routes_without_event(server, app, ops) == []


def test_a_planted_route_without_an_event_is_found(server: OpsServer, ops: httpx.Client) -> None:
    @post("/admin/v1/planted", guards=[needs("admin")])
    async def planted() -> dict[str, str]:
        return {}

    app = build_ops_app(server.context, server.fleet)
    app.register(planted)

    assert ("POST", "/planted") in writing_routes(app)
    assert ("POST", "/planted") in routes_without_event(server, app, ops)


def test_every_route_of_the_admin_api_wants_an_operators_key(server: OpsServer) -> None:
    routes = [(m, p) for m, p, _ in handlers_of(build_ops_app(server.context, server.fleet)) if p.startswith("/admin")]
    assert len(routes) >= 25
    for method, path in routes:
        assert plain.request(method, server.url + path.replace("{", "").replace("}", "")).status_code == 401, path


def test_an_event_says_who_did_what_and_how_it_was_before_and_after(ops: httpx.Client) -> None:
    tenant_id = ops.post("/tenants", json={"name": "described"}).json()["id"]
    ops.patch(f"/tenants/{tenant_id}/limits", json={"weight": 7})
    key = ops.post(f"/tenants/{tenant_id}/keys", json={"name": "ci"}).json()

    created, limited, made = events(ops)[-3:]

    assert (created["action"], created["target"], created["before"]) == ("tenant.create", tenant_id, None)
    assert created["actor"]["name"] == "first start"
    assert (limited["action"], limited["before"]["limits"]["weight"], limited["after"]["limits"]["weight"]) == (
        "tenant.set_limits",
        1,
        7,
    )
    assert (made["action"], made["target"]) == ("key.create", key["id"])
    assert made["prev_hash"] == limited["hash"]
    assert key["api_key"] not in json.dumps(events(ops))


def test_what_a_first_start_makes_is_in_the_log_too(ops: httpx.Client) -> None:
    first = events(ops)[:2]
    assert {event["action"] for event in first} == {"rate_card.create", "operator.create"}
    assert all(event["actor"] == {"key_id": None, "name": "server"} for event in first)


def test_a_refused_write_leaves_no_event(ops: httpx.Client) -> None:
    tenant_id = ops.post("/tenants", json={"name": "refused"}).json()["id"]
    before = len(events(ops))
    assert ops.patch(f"/tenants/{tenant_id}/limits", json={"weight": 0}).status_code == 400
    assert ops.post("/tenants", json={"name": "refused"}).status_code == 409
    assert ops.delete("/keys/absent").status_code == 404
    assert len(events(ops)) == before


@pytest.mark.parametrize("query", [{"limit": 0}, {"limit": 1001}, {"after": -1}, {"colour": "red"}])
def test_a_page_of_the_log_that_cannot_be_is_refused(ops: httpx.Client, query: dict) -> None:
    assert ops.get("/audit", params=query).status_code == 400


def test_records_that_were_set_aside_are_listed_settled_and_written_off(server: OpsServer, ops: httpx.Client) -> None:
    tenant_id = ops.post("/tenants", json={"name": "set aside"}).json()["id"]
    database, now = server.settings.database_url, time.time_ns()
    known = set_aside_on(database, tenant_id, now)
    unknown = set_aside_on(database, tenant_id, now, rate_card_id="rc_unknown")

    def tenora(*arguments: str) -> Any:
        where = ["--json", "--home", str(server.home), "--ops-url", server.url]
        result = CliRunner().invoke(main, ["set-aside", *arguments, *where])
        return json.loads(result.stdout) if result.exit_code == 0 else result.output

    refused = tenora("settle", unknown)
    answers = [tenora("settle", known), tenora("write-off", unknown, "--reason", "a card that is lost")]
    again = [tenora("settle", known), tenora("write-off", unknown, "--reason", "once more")]
    too_late = tenora("write-off", known, "--reason", "a mistake")
    listed = {row["request_id"]: row["state"] for row in tenora("list")["data"]}
    charged = ops.get("/ledger", params={"tenant_id": tenant_id}).json()["data"]

    assert "rate card is still unknown" in refused
    assert [answer["state"] for answer in answers] == ["settled", "written_off"]
    assert again == answers
    assert "a credit note gives back" in too_late
    assert (listed[known], listed[unknown]) == ("settled", "written_off")
    assert {entry["request_id"] for entry in charged} == {known}
    done = [(event["action"], event["target"]) for event in events(ops)][-2:]
    assert done == [("ledger.settle", known), ("ledger.write_off", unknown)]
    assert ops.post("/set-aside/absent/settle").status_code == 404
    too_many = {"attempt": 1 << 63, "reason": "none"}
    assert ops.post("/set-aside/absent/write-off", json=too_many).status_code == 400


# ── tenora audit ─────────────────────────────────────────────────────────────────────────────────


def audit(server: OpsServer, *arguments: str) -> tuple[int, str]:
    """The exit code and what was printed, in this process: its error becomes one line."""
    result = CliRunner().invoke(main, ["audit", "--home", str(server.home), *arguments], standalone_mode=False)
    if isinstance(result.exception, click.ClickException):
        return result.exception.exit_code, result.exception.format_message()
    return result.exit_code, result.stdout


@pytest.fixture
def damaged(server: OpsServer) -> Iterator[Callable[[str], None]]:
    """Runs statements on the server's database; afterwards the log is as it was."""
    with contextlib.closing(sqlite3.connect(server.home / "tenora.db", isolation_level=None)) as db:
        rows = db.execute("SELECT * FROM audit_event").fetchall()
        for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
            db.execute(f"DROP TRIGGER {name}")  # they would refuse what an attacker does behind their back
        yield db.execute
        db.execute("DELETE FROM audit_event")
        db.executemany(f"INSERT INTO audit_event VALUES ({', '.join('?' * len(rows[0]))})", rows)


def test_the_command_finds_a_whole_log_whole_and_prints_its_head(server: OpsServer, ops: httpx.Client) -> None:
    code, printed = audit(server, "--head")
    last = events(ops)[-1]
    assert (code, printed.strip()) == (0, f"{last['number']}:{last['hash']}")
    ops.post("/tenants", json={"name": "after the head"})
    code, printed = audit(server, "--json", "--expect", printed.strip())
    assert (code, json.loads(printed)["audit_log"]["breaches"]) == (0, [])
    assert json.loads(printed)["audit_log"]["events"] == last["number"] + 1


@pytest.mark.parametrize(
    ("statement", "says"),
    [
        ("UPDATE audit_event SET actor = 'nobody' WHERE number = 2", "event 2 was changed"),
        ("DELETE FROM audit_event WHERE number = 2", "event 2 is missing"),
        ("DELETE FROM audit_event WHERE number = (SELECT max(number) FROM audit_event)", "is not on the chain"),
    ],
)
def test_the_command_finds_what_was_tampered_with(server: OpsServer, damaged, statement: str, says: str) -> None:
    damaged(statement)
    code, message = audit(server)
    assert code == 1
    assert says in message


def test_the_command_finds_a_log_without_the_head_that_it_printed(server: OpsServer, ops: httpx.Client) -> None:
    assert audit(server, "--head")[0] == 0
    kept = server.home / "audit.head"
    number, _, digest = kept.read_text().strip().partition(":")
    kept.write_text(f"{number}:{digest[::-1]}\n")
    code, message = audit(server)
    kept.unlink()
    assert (code, "is not on the chain" in message) == (1, True)
    assert audit(server)[0] == 0


def test_a_head_that_is_none_or_a_home_without_a_database_is_one_line(server: OpsServer, tmp_path) -> None:
    assert "NUMBER:HASH" in audit(server, "--expect", "5:zz")[1]
    result = CliRunner().invoke(main, ["audit", "--home", str(tmp_path)], standalone_mode=False)
    assert "--home" in result.exception.format_message()
    assert not (tmp_path / "tenora.db").exists()
