"""Objectives and SLO reports over the ops API, and with the `tenora` command."""

import asyncio
import csv
import io
import json
import time
from collections.abc import Iterator

import httpx
import pytest
import yaml
from click.testing import CliRunner
from ops_client import client_of, error_of

from gateway.cli import main
from tenants.database import Database
from tenants.ledger import Ledger
from tenants.page import PAGE_CSP
from tenants.slo.sums import SloFold
from tests.ops_server import OpsServer, ops_server_in_thread
from tests.slo_requests import CARD, booked


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpsServer]:
    with ops_server_in_thread(tmp_path_factory.mktemp("home"), "--no-demo") as server:
        yield server


@pytest.fixture
def ops(server: OpsServer) -> Iterator[httpx.Client]:
    with client_of(server) as client:
        yield client


def new_tenant(ops: httpx.Client, name: str, **more) -> str:
    return ops.post("/tenants", json={"name": name, **more}).json()["id"]


def document(tenant_id: str, value: float = 0.5, sli: str = "ttft", **more) -> dict:
    source = {"metricSource": {"type": "tenora", "spec": {"sli": sli, "tenant": tenant_id, **more}}}
    return {
        "apiVersion": "openslo/v1",
        "kind": "SLO",
        "metadata": {"name": f"{sli}-goal"},
        "spec": {
            "service": "tenora",
            "indicator": {"metadata": {"name": "x"}, "spec": {"thresholdMetric": source}},
            "timeWindow": [{"duration": "30d", "isRolling": True}],
            "budgetingMethod": "Occurrences",
            "objectives": [{"op": "lte", "value": value, "target": 0.95}],
        },
    }


def put(ops: httpx.Client, *documents: dict) -> httpx.Response:
    return ops.put("/slo-objectives", content=yaml.safe_dump_all(documents))


def serve(server: OpsServer, tenant_id: str, *outcomes: int, ago_s: int = 0) -> None:
    """Requests that end now, or so long ago."""

    async def run() -> None:
        database = Database(server.settings.database_url)
        await database.start()
        now, numbers = time.time() - ago_s, range(hash(tenant_id) % 10**9, 1 << 62)
        requests = [
            booked(n, outcome, at_s=now, tenant_id=tenant_id) for n, outcome in zip(numbers, outcomes, strict=False)
        ]
        async with database.transaction() as session:
            await Ledger((SloFold(),)).post(session, requests, {"rc_1": CARD})
        await database.close()

    asyncio.run(run())


def until_now() -> dict:
    """An interval that holds this minute whole."""
    this_minute = int(time.time()) // 60 * 60
    return {"start": this_minute - 3600, "end": this_minute + 120}


def test_objectives_come_in_and_go_out_as_openslo(ops):
    tenant_id, began_s = new_tenant(ops, "in-and-out"), time.time()

    set_ones = put(ops, document(tenant_id), document(tenant_id, 30, "e2e", model="support", **{"class": "batch"}))
    assert set_ones.status_code == 200
    assert [(each["sli"], each["threshold_ns"], each["version"]) for each in set_ones.json()["data"]] == [
        ("ttft", 500_000_000, 1),
        ("e2e", 30_000_000_000, 1),
    ]
    text = ops.get("/slo-objectives", params={"tenant": tenant_id, "format": "openslo"})
    assert text.headers["content-type"].startswith("application/yaml")
    again = ops.put("/slo-objectives", content=text.text)
    assert {each["id"] for each in again.json()["data"]} == {each["id"] for each in set_ones.json()["data"]}
    assert all(each["effective_at"] > began_s - 1 for each in again.json()["data"])


def test_a_change_leaves_its_history_and_an_audit_event(ops):
    tenant_id = new_tenant(ops, "with-history")
    put(ops, document(tenant_id, 0.5))
    put(ops, document(tenant_id, 0.25))
    gone = ops.delete("/slo-objectives", params={"tenant": tenant_id, "model": "*", "class": "*"})

    assert gone.json() == {"object": "slo_objective", "tenant_id": tenant_id, "deleted": True, "num_objectives": 1}
    assert ops.get("/slo-objectives", params={"tenant": tenant_id}).json()["data"] == []
    history = ops.get("/slo-objectives", params={"tenant": tenant_id, "history": "true"}).json()["data"]
    assert [(each["version"], each["threshold_ms"], each["retired"]) for each in history] == [
        (1, 500, False),
        (2, 250, False),
        (3, 250, True),
    ]
    events = [each for each in ops.get("/audit", params={"limit": 1000}).json()["data"] if each["target"] == tenant_id]
    assert [each["action"] for each in events] == ["tenant.create", "slo.set", "slo.set", "slo.delete"]
    assert events[2]["before"]["objectives"][0]["threshold_ms"] == 500
    assert events[3]["after"] == {"objectives": []}


def test_what_is_no_document_of_ours_is_refused(ops):
    tenant_id = new_tenant(ops, "refused")

    assert error_of(put(ops, document("ten_nobody"))) == (404, "not_found", None)
    assert error_of(ops.put("/slo-objectives", content=b"a: &x 1")) == (400, None, "document")
    assert error_of(put(ops, document(tenant_id) | {"surprise": 1})) == (400, None, "document")
    assert error_of(put(ops, document(tenant_id), document("ten_other"))) == (400, None, "document")
    assert error_of(ops.put("/slo-objectives", content=b" " * 70_000)) == (413, "payload_too_large", None)
    assert error_of(ops.delete("/slo-objectives", params={"tenant": tenant_id, "model": "*", "class": "*"}))[0] == 404
    assert ops.get("/slo-objectives", params={"tenant": tenant_id}).json()["data"] == []


def test_a_report_has_the_same_numbers_in_each_of_its_forms(server, ops):
    tenant_id = new_tenant(ops, "<b>=1+1", time_zone="Asia/Kolkata")
    serve(server, tenant_id, 200, 200, 503, 499, ago_s=120)
    over = until_now()["end"] - 120  # of an interval that is over, each report is the same
    asked = {"tenant": tenant_id, "start": over - 3600, "end": over}

    told = ops.get("/reports/slo", params=asked).json()
    text = ops.get("/reports/slo", params=asked | {"format": "csv"})
    page = ops.get("/reports/slo", params=asked | {"format": "html"})

    assert (told["total"]["valid"], told["total"]["good"]) == (4, 2)
    assert told["total"]["attainment"]["availability"]["ratio"] == 0.75
    total, row = csv.DictReader(io.StringIO(text.text))
    assert (total["valid"], total["attainment_availability_ratio"], total["latency_ttft_p99_ns"]) == (
        "4",
        "0.75",
        "n/a",
    )
    assert (row["model"], row["class"], row["latency_ttft_count"]) == ("smollm2", "standard", "4")
    assert text.headers["content-type"].startswith("text/csv")
    assert page.headers["content-security-policy"].startswith(PAGE_CSP)
    assert "&lt;b&gt;=1+1" in page.text
    assert "<b>" not in page.text
    assert "75.000 % (3 of 4;" in page.text
    assert told["document_hash"] in page.text


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tenant": ""}, "tenant"),
        ({"start": "yesterday"}, "start"),
        ({"end": "2026-13-01"}, "end"),
        ({"start": "61"}, "start"),
        ({"start": "2030-01-01", "end": "2029-01-01"}, "end"),
        ({"group": "key"}, "group"),
        ({"format": "pdf"}, "format"),
        ({"format": "csv", "table": "secrets"}, "table"),
        ({"table": "secrets"}, "table"),
    ],
)
def test_a_query_that_makes_no_sense_is_refused_by_its_name(ops, change, param):
    tenant_id = ops.get("/tenants").json()["data"][0]["id"]

    assert error_of(ops.get("/reports/slo", params={"tenant": tenant_id} | change)) == (400, None, param)


def test_dates_are_the_tenants_own(ops):
    tenant_id = new_tenant(ops, "berliner", time_zone="Europe/Berlin")

    told = ops.get("/reports/slo", params={"tenant": tenant_id, "start": "2026-10-25", "end": "2026-10-26"}).json()

    assert (told["local_start"], told["local_end"]) == ("2026-10-25T00:00:00+02:00", "2026-10-26T00:00:00+01:00")
    assert told["end"] - told["start"] == 25 * 3600
    assert len(told["hours"]) == 25


def tenora(server: OpsServer, *arguments: str, text: str | None = None) -> str:
    where = ["--home", str(server.home), "--ops-url", server.url]
    done = CliRunner().invoke(main, [*arguments, *where], input=text, catch_exceptions=False)
    assert (done.exit_code, done.stderr) == (0, "")
    return done.stdout


def test_the_command_line_sets_exports_reports_and_deletes(server, ops, tmp_path):
    tenant_id = new_tenant(ops, "by-hand")
    serve(server, tenant_id, 200)

    tenora(server, "slo", "apply", "-", text=yaml.safe_dump(document(tenant_id)))
    exported = tenora(server, "slo", "export", "by-hand")
    assert json.loads(tenora(server, "slo", "show", "by-hand", "--json"))["data"][0]["name"] == "ttft-goal"
    assert yaml.safe_load(exported)["spec"]["objectives"] == [{"target": 0.95, "op": "lte", "value": 0.5}]
    page = tmp_path / "report.html"
    interval = [f"--{name}={value}" for name, value in until_now().items()]
    tenora(server, "report", "slo", "by-hand", *interval, "--format", "html", "--output", str(page))
    assert page.read_text().startswith("<!doctype html>")
    assert json.loads(tenora(server, "report", "slo", "by-hand", *interval, "--json"))["total"]["valid"] == 1
    tenora(server, "slo", "delete", "by-hand")
    assert tenora(server, "slo", "export", "by-hand") == ""


def test_every_new_command_says_what_it_does():
    assert {"apply", "show", "export", "delete"} <= set(main.commands["slo"].commands)
    assert "slo" in main.commands["report"].commands
