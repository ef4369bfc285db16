"""Invoices over the ops API, the command line and, for their tenant, the public API."""

import csv
import io
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal

import httpx
import pytest
from click.testing import CliRunner
from gateway_harness import House
from ops_client import client_of, error_of

from gateway.cli import main
from tenants.page import PAGE_CSP
from tests.invoicing import charge_on, instant
from tests.months import stay_within_a_month
from tests.ops_server import OpsServer, ops_server_in_thread


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpsServer]:
    with ops_server_in_thread(tmp_path_factory.mktemp("home"), "--no-demo", "--issuer", "Lovelace & Sons") as server:
        yield server


@pytest.fixture
def ops(server: OpsServer) -> Iterator[httpx.Client]:
    with client_of(server) as client:
        yield client


def charged_tenant(server: OpsServer, ops: httpx.Client, name: str) -> str:
    tenant_id = ops.post("/tenants", json={"name": name}).json()["id"]
    charge_on(server.settings.database_url, tenant_id, instant("2026-01-20"))
    return tenant_id


def picousd(text: str) -> int:
    return int(Decimal(text) * 10**12)


def test_an_invoice_is_issued_once_and_shown_as_json_csv_and_a_page(server: OpsServer, ops: httpx.Client):
    tenant_id = charged_tenant(server, ops, "=cmd|<script>")
    first = ops.post("/invoices", json={"tenant": tenant_id, "period": "2026-01"})
    second = ops.post("/invoices", json={"tenant": tenant_id, "period": "2026-01"})

    assert (first.status_code, second.status_code) == (201, 200)
    invoice = first.json()
    assert second.json() == invoice
    path = f"/invoices/{invoice['id']}"
    assert ops.get(path).json() == invoice
    assert (invoice["issuer"], invoice["period"], invoice["currency"]) == ("Lovelace & Sons", "2026-01-01", "USD")
    assert sum(line["amount_picousd"] for line in invoice["lines"]) == picousd(invoice["total"]) > 0
    assert sum(Decimal(line["amount"]) for line in invoice["lines"]) == Decimal(invoice["total"])
    listed = ops.get("/invoices", params={"tenant_id": tenant_id}).json()["data"]
    assert listed == [{name: value for name, value in invoice.items() if name != "lines"}]

    answer = ops.get(path, params={"format": "csv"})
    rows = list(csv.DictReader(io.StringIO(answer.text, newline="")))
    assert answer.headers["content-type"] == "text/csv; charset=utf-8"
    assert [row["amount_picousd"] for row in rows] == [str(line["amount_picousd"]) for line in invoice["lines"]]

    answer = ops.get(path, params={"format": "html"})
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["content-security-policy"].startswith(PAGE_CSP)
    assert "=cmd|&lt;script&gt;" in answer.text
    assert "<script" not in answer.text
    assert error_of(ops.get(path, params={"format": "pdf"})) == (400, None, "format")


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ({"period": "2999-01"}, (400, None, "period")),
        ({"period": "2999-01", "force": True}, (400, None, "period")),
        ({"period": "January"}, (400, None, "period")),
        ({"tenant": "ten_0"}, (404, "not_found", None)),
        ({"colour": "red"}, (400, None, "colour")),
    ],
)
def test_an_invoice_that_cannot_be_is_refused_by_name(server: OpsServer, ops: httpx.Client, body: dict, wanted: tuple):
    tenant_id = ops.post("/tenants", json={"name": f"refused {body}"[:60]}).json()["id"]
    answer = ops.post("/invoices", json={"tenant": tenant_id, "period": "2026-01"} | body)

    assert error_of(answer) == wanted
    assert ops.get("/invoices", params={"tenant_id": tenant_id}).json()["data"] == []


def test_a_month_that_is_not_over_is_a_409(server: OpsServer, ops: httpx.Client):
    stay_within_a_month()
    month = datetime.now(UTC).strftime("%Y-%m")
    tenant_id = ops.post("/tenants", json={"name": "early"}).json()["id"]

    assert error_of(ops.post("/invoices", json={"tenant": tenant_id, "period": month})) == (
        409,
        "period_open",
        "period",
    )
    assert ops.post("/invoices", json={"tenant": tenant_id, "period": month, "force": True}).status_code == 201


def test_what_is_given_back_is_taken_off_the_next_invoice(server: OpsServer, ops: httpx.Client):
    tenant_id = charged_tenant(server, ops, "credited")
    invoice = ops.post("/invoices", json={"tenant": tenant_id, "period": "2026-01"}).json()
    path = f"/invoices/{invoice['id']}/credit-notes"
    line = next(line for line in invoice["lines"] if line["meter"] == "output_tokens")
    asked = {"reason": "outage", "lines": [{"line": line["number"], "amount_cents": 25}]}

    note = ops.post(path, json=asked)
    too_much = ops.post(path, json=asked | {"lines": [{"line": line["number"], "amount_cents": 10**9}]})
    following = ops.post("/invoices", json={"tenant": tenant_id, "period": "2026-02"}).json()

    assert (note.status_code, note.json()["total"], note.json()["reason"]) == (201, "0.25", "outage")
    assert error_of(too_much) == (400, None, "lines")
    assert ops.get(path).json()["data"] == [note.json()]
    assert ops.get(f"{path}/{note.json()['id']}").json() == note.json()
    assert [(each["kind"], each["amount"], each["reference"]) for each in following["lines"]] == [
        ("credit", "-0.25", note.json()["id"]),
        ("rounding", "0.00", None),
    ]
    assert following["total"] == "-0.25"


def test_invoices_from_the_command_line(server: OpsServer, ops: httpx.Client, tmp_path):
    charged_tenant(server, ops, "cli")
    where = ["--home", str(server.home), "--ops-url", server.url]

    def tenora(*arguments: str) -> str:
        done = CliRunner().invoke(main, [*arguments, *where], standalone_mode=False)
        assert done.exit_code == 0, done.exception
        return done.output

    invoice = json.loads(tenora("invoice", "issue", "cli", "2026-01", "--json"))
    assert invoice["number"] in tenora("invoice", "list", "--tenant", "cli")
    assert "output_tokens" in tenora("invoice", "show", invoice["id"])
    assert tenora("invoice", "show", invoice["number"], "--json") == tenora("invoice", "show", invoice["id"], "--json")
    assert tenora("invoice", "show", invoice["id"], "--format", "csv").startswith("line,kind,")
    assert tenora("invoice", "show", invoice["id"], "--format", "focus").startswith("BilledCost,")
    tenora("invoice", "show", invoice["id"], "--format", "html", "--output", str(tmp_path / "out.html"))
    assert (tmp_path / "out.html").read_text().startswith("<!doctype html>")
    note = json.loads(tenora("invoice", "credit", invoice["id"], "--reason", "<outage>", "--json"))
    tenora("invoice", "note", invoice["id"], note["id"], "--output", str(tmp_path / "note.html"))
    page = (tmp_path / "note.html").read_text()
    assert f"<h1>Credit note {note['number']}</h1>" in page
    assert "<dd>&lt;outage&gt;</dd>" in page
    assert f">{note['total']}</td>" in page
    assert json.loads(tenora("invoice", "note", invoice["id"], note["id"], "--json")) == note


def test_a_credit_note_is_shown_beside_its_own_invoice_only(server: OpsServer, ops: httpx.Client):
    tenant_id = charged_tenant(server, ops, "credited twice")
    one, other = (ops.post("/invoices", json={"tenant": tenant_id, "period": f"2026-0{n}"}).json() for n in (1, 2))
    note = ops.post(f"/invoices/{one['id']}/credit-notes", json={"reason": "outage"}).json()

    assert ops.get(f"/invoices/{one['id']}/credit-notes/{note['id']}").status_code == 200
    assert ops.get(f"/invoices/{other['id']}/credit-notes/{note['id']}").status_code == 404
    assert error_of(ops.get(f"/invoices/{one['id']}/credit-notes/{note['id']}?format=csv")) == (400, None, "format")


def test_a_tenant_sees_its_own_invoices_and_nobody_elses(house: House):
    from invoicing import book, enormous, issue

    from tenants.repositories import RateCardRepository

    key, stranger = house.new_tenant("invoiced"), house.new_tenant("not invoiced")
    database = house.parts.database

    async def make():
        async with database.session() as session:
            card = (await RateCardRepository(session).list_all())[-1]
        await book(database, enormous(house.tenants[key], card, instant("2026-01-20")))
        return (await issue(database, house.tenants[key], "2026-01")).invoice.invoice_id

    invoice_id = house.on_loop(make())
    with house.http(key) as http, house.http(stranger) as other:
        (listed,) = http.get("/organization/invoices").json()["data"]
        shown = http.get(f"/organization/invoices/{invoice_id}")
        page = http.get(f"/organization/invoices/{invoice_id}", params={"format": "html"})
        foreign = other.get(f"/organization/invoices/{invoice_id}")
        absent = other.get("/organization/invoices/inv_0")
        none = other.get("/organization/invoices").json()

    assert listed["id"] == shown.json()["id"] == invoice_id
    assert [line["kind"] for line in shown.json()["lines"]] == ["usage", "usage", "usage", "rounding"]
    assert page.headers["content-security-policy"].startswith(PAGE_CSP)
    assert none["data"] == []
    assert foreign.status_code == absent.status_code == 404
    assert foreign.text.replace(invoice_id, "inv_0") == absent.text


def test_a_tenant_sees_what_was_given_back_of_its_own_invoices_and_nobody_elses(house: House):
    from invoicing import book, enormous, issue

    from tenants.invoices.credit_notes import CreditNoteRepository
    from tenants.repositories import RateCardRepository

    key, stranger = house.new_tenant("given back to"), house.new_tenant("not given back to")
    database = house.parts.database

    async def make() -> tuple[str, str]:
        async with database.session() as session:
            card = (await RateCardRepository(session).list_all())[-1]
        await book(database, enormous(house.tenants[key], card, instant("2026-01-20")))
        issued = await issue(database, house.tenants[key], "2026-01")
        async with database.transaction() as session:
            note = await CreditNoteRepository(session).issue(issued, {1: 25}, "outage", instant("2026-02-02"))
            return issued.invoice.invoice_id, note.credit_note_id

    invoice_id, note_id = house.on_loop(make())
    path = f"/organization/invoices/{invoice_id}/credit-notes"
    with house.http(key) as http, house.http(stranger) as other:
        (listed,) = http.get(path).json()["data"]
        shown = http.get(f"{path}/{note_id}")
        page = http.get(f"{path}/{note_id}", params={"format": "html"})
        absent = http.get(f"{path}/crn_0")
        foreign = [other.get(path), other.get(f"{path}/{note_id}")]

    assert listed == shown.json()
    assert (listed["id"], listed["reason"], listed["total"]) == (note_id, "outage", "0.25")
    assert listed["lines"] == [{"invoice_line": 1, "amount": "0.25"}]
    assert page.headers["content-security-policy"].startswith(PAGE_CSP)
    assert [answer.status_code for answer in (absent, *foreign)] == [404, 404, 404]
