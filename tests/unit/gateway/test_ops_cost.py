"""Reports of costs, usage and charges over all tenants, over the ops API and the CLI."""

import asyncio
import json
import time
from collections.abc import Iterator

import httpx
import pytest
from click.testing import CliRunner
from ops_client import client_of, error_of, eventually
from sqlmodel import update

from gateway.cli import main
from tenants import replica_times
from tenants.database import Database
from tenants.ledger import Ledger
from tenants.meter import RequestContext
from tenants.pricing import RateCard, default_prices
from tenants.replica_times import ReplicaSpan
from tenants.settled import SettledRequest
from tenants.tables import LedgerEntry, UsageRollup
from tests.ops_server import OpsServer, ops_server_in_thread

NOW_S = int(time.time())
NS = 10**9
GPU_HOUR = 3_600 * 10**12  # a picousd a picosecond: 1,000 a ns


async def book(url: str) -> None:
    """A second of one replica, of which two tenants took 300 and 100 ms."""
    database = Database(url)
    await database.start()
    try:
        async with database.transaction() as session:
            requests = [settled("ten_a", 1, 300_000_000), settled("ten_b", 2, 100_000_000)]
            await Ledger().post(session, requests, {"rc_x": RateCard("rc_x", 1, 0, default_prices())})
            accounts = dict.fromkeys(("load_ns", "recompute_ns", "lost_ns"), 0)
            accounts |= {"idle_ns": 590_000_000, "overhead_ns": 10_000_000}
            when = {"until_unix_ns": NOW_S * NS, "wall_ns": NS, "attributed_ns": 400_000_000}
            fit = {"error_ppm": 40_000, "r2_ppm": 980_000}
            await replica_times.post(session, [ReplicaSpan("e-0", 1, 0, "m", **when, **accounts, **fit)])
    finally:
        await database.close()


def settled(tenant_id: str, number: int, gpu_ns: int) -> SettledRequest:
    names = ("key", f"00000000-0000-0000-0000-00000000000{number}", 1, "m", "m", "", "standard", "rc_x")
    context = RequestContext(tenant_id, *names, admitted_unix_ns=NOW_S * NS)
    return SettledRequest(context, 200, 20, 0, 5, 1, 1, 1, 1, 1, 1, gpu_ns, NOW_S * NS)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpsServer]:
    home = tmp_path_factory.mktemp("home")
    with ops_server_in_thread(home, "--no-demo", "--gpu-hour-picousd", str(GPU_HOUR)) as server:
        asyncio.run(book(server.settings.database_url))
        yield server


@pytest.fixture
def ops(server: OpsServer) -> Iterator[httpx.Client]:
    with client_of(server) as client:
        yield client


def test_the_report_has_cost_beside_price_and_every_nanosecond_in_one_row(ops: httpx.Client):
    report = ops.get("/reports/cost").json()

    assert [(row["tenant_id"], row["ns"], row["cost_picousd"]) for row in report["data"]] == [
        ("ten_a", 300_000_000, 300_000_000_000),
        ("ten_b", 100_000_000, 100_000_000_000),
    ]
    for row in report["data"]:
        assert row["price_picousd"] > 0
        assert row["margin_picousd"] == row["price_picousd"] - row["cost_picousd"]
    rows = [*report["data"], report["others"], *report["accounts"]]
    assert sum(row["ns"] for row in rows) == report["total"]["ns"] == NS
    assert [row["spread_ns"] for row in report["data"]] == [450_000_000, 150_000_000]
    assert report["total"]["cost_picousd"] == 10**12
    assert report["cost_model"] == {"error_ratio": pytest.approx(0.04), "r_squared": pytest.approx(0.98)}


def test_rows_behind_the_limit_are_one_row_and_a_price_of_the_question_replaces_the_settings(ops: httpx.Client):
    report = ops.get("/reports/cost", params={"limit": 1, "gpu_hour_picousd": 0, "group_by": "tenant,class"}).json()

    assert [(row["tenant_id"], row["flow_class"]) for row in report["data"]] == [("ten_a", "standard")]
    assert (report["num_others"], report["others"]["ns"]) == (1, 100_000_000)
    assert report["total"]["margin_picousd"] == report["total"]["price_picousd"]


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"group_by": "key"}, "group_by"),
        ({"start_time": 10, "end_time": 5}, "end_time"),
        ({"start_time": 0, "end_time": 1 << 32}, "end_time"),
        ({"limit": 0}, "limit"),
        ({"until": 5}, "until"),
    ],
)
def test_a_question_without_an_answer_is_400_and_names_the_field(ops: httpx.Client, query: dict, param: str):
    answer = ops.get("/reports/cost", params=query)

    status, _, named = error_of(answer)
    assert (status, named) == (400, param)


def test_the_command_line_shows_the_same_report(server: OpsServer):
    where = ["--home", str(server.home), "--ops-url", server.url]
    table = CliRunner().invoke(main, ["report", "cost", *where], catch_exceptions=False)
    exact = CliRunner().invoke(
        main, ["report", "cost", "--group-by", "model", "--json", *where], catch_exceptions=False
    )

    assert table.exit_code == exact.exit_code == 0
    assert "ten_a" in table.output
    assert "(idle)" in table.output
    assert "off by 4.0%" in table.output
    assert json.loads(exact.output)["data"][0]["base_model"] == "m"


def test_old_seconds_of_replicas_become_hours_by_a_command_and_the_report_is_the_same(
    server: OpsServer, ops: httpx.Client
):
    hour_s = (NOW_S - 120 * 86_400) // 3_600 * 3_600
    asyncio.run(book_seconds(server.settings.database_url, hour_s, 3))
    asked = {"start_time": hour_s, "end_time": hour_s + 3_600}
    before = ops.get("/reports/cost", params=asked).json()

    done = [
        json.loads(
            CliRunner().invoke(main, ["rollup", "--json", "--home", str(server.home)], catch_exceptions=False).output
        )
        for _ in range(2)
    ]

    assert done == [{"rolled_up": 3}, {"rolled_up": 0}]
    assert ops.get("/reports/cost", params=asked).json() == before
    assert before["total"]["ns"] == 3 * NS


async def book_seconds(url: str, start_s: int, num: int) -> None:
    """Of a replica without work."""
    database = Database(url)
    await database.start()
    accounts = {"attributed_ns": 0, "load_ns": 0, "recompute_ns": 0, "lost_ns": 0, "idle_ns": NS, "overhead_ns": 0}
    fit = {"error_ppm": 0, "r2_ppm": 0}
    try:
        async with database.transaction() as session:
            times = [(start_s + number) * NS for number in range(num)]
            spans = [
                ReplicaSpan("old-0", 1, number, "m", until_unix_ns=at, wall_ns=NS, **accounts, **fit)
                for number, at in enumerate(times)
            ]
            await replica_times.post(session, spans)
    finally:
        await database.close()


# ── what all tenants used and were charged ───────────────────────────────────────────────────────


def test_an_operator_reads_what_every_tenant_used_and_was_charged_in_the_tenants_own_shape(ops: httpx.Client):
    asked = {"start_time": NOW_S - 60, "end_time": NOW_S + 60, "time_zone": "Asia/Kolkata"}
    used = ops.get("/reports/usage", params=asked | {"group_by": ["project_id", "model"], "bucket_width": "1h"}).json()
    charged = ops.get("/reports/charges", params=asked | {"group_by": "project_id"}).json()
    of_one = ops.get("/reports/usage", params=asked | {"project_ids": "ten_b"}).json()
    margins = ops.get("/reports/cost", params={"start_time": NOW_S - 60, "end_time": NOW_S + 60}).json()

    rows = [row for bucket in used["data"] for row in bucket["results"]]
    assert [(row["project_id"], row["model"], row["output_tokens"]) for row in rows] == [
        ("ten_a", "m", 5),
        ("ten_b", "m", 5),
    ]
    assert {bucket["start_time"] % 3600 for bucket in used["data"][1:]} <= {1800}  # Kolkata's hours
    assert sum(row["num_model_requests"] for bucket in of_one["data"] for row in bucket["results"]) == 1
    prices = {row["project_id"]: row["amount"]["picousd"] for bucket in charged["data"] for row in bucket["results"]}
    assert prices == {row["tenant_id"]: row["price_picousd"] for row in margins["data"]}


@pytest.mark.parametrize("path", ["/reports/usage", "/reports/charges"])
def test_what_everybody_was_charged_is_for_the_scope_billing(server: OpsServer, ops: httpx.Client, path: str):
    text = ops.post("/operators", json={"name": path, "scopes": ["read"]}).json()["operator_key"]
    eventually(lambda: server.context.directory.authenticate_operator(text))
    with client_of(server, text) as reader:
        refused = reader.get(path, params={"start_time": 0})

    assert error_of(refused) == (403, "insufficient_scope", None)
    assert error_of(ops.get(path, params={"start_time": 0, "time_zone": "Nowhere"})) == (400, None, "time_zone")


def test_an_endless_report_begins_with_the_first_charge_of_any_tenant(server: OpsServer, ops: httpx.Client):
    tenant = ops.post("/tenants", json={"name": "first"}).json()["id"]
    asyncio.run(book_entry(server.settings.database_url, tenant))

    found = ops.get("/reports/charges", params={"start_time": 0, "end_time": NOW_S + 60, "limit": 180}).json()

    assert found["data"][0]["start_time"] == NOW_S - 3 * 86_400
    assert found["data"][0]["results"][0]["amount"]["picousd"] == 70


async def book_entry(url: str, tenant_id: str) -> None:
    """An adapter's hour: no request has left it."""
    names = {"entry_id": "e", "request_id": "an hour", "tenant_id": tenant_id, "key_id": "", "model": "a"}
    meter = {"meter": "adapter_storage_byte_seconds", "base_model": "m", "flow_class": "standard"}
    sums = {"rate_card_id": "rc_x", "quantity": 10**7, "unit_price_picousd": 7, "amount_picousd": 70}
    database = Database(url)
    await database.start()
    try:
        async with database.transaction() as session:
            session.add(LedgerEntry(**names, **meter, **sums, occurred_unix_ns=(NOW_S - 3 * 86_400) * NS))
    finally:
        await database.close()


def test_the_command_line_shows_everybodys_usage_and_charges_with_an_operators_key(server: OpsServer):
    where = ["--home", str(server.home), "--ops-url", server.url, "--start-time", str(NOW_S - 60)]
    used = CliRunner().invoke(main, ["report", "usage", "--group-by", "tenant,model", *where], catch_exceptions=False)
    charged = CliRunner().invoke(
        main, ["report", "charges", "--group-by", "tenant", "--time-zone", "Asia/Kolkata", "--json", *where]
    )

    assert used.exit_code == charged.exit_code == 0, (used.output, charged.output)
    assert used.output.split()[:3] == ["FROM", "TENANT", "MODEL"]
    assert {"ten_a", "ten_b"} <= set(used.output.split())
    rows = [row for bucket in json.loads(charged.output)["data"] for row in bucket["results"]]
    assert {row["project_id"] for row in rows} == {"ten_a", "ten_b"}


def test_the_command_line_says_by_what_usage_can_be_parted_and_when_there_was_none(server: OpsServer):
    where = ["--home", str(server.home), "--ops-url", server.url, "--start-time", "1000", "--end-time", "1060"]
    wrong = CliRunner().invoke(main, ["report", "usage", "--group-by", "tenant,colour", *where])
    nothing = CliRunner().invoke(main, ["report", "usage", *where])

    assert wrong.exit_code == 2
    assert "'colour' is not one of tenant, model, key, service_tier" in wrong.output
    assert (nothing.exit_code, nothing.output) == (0, "nothing in this time\n")


def test_sums_that_somebody_changed_are_found_and_made_anew(server: OpsServer, ops: httpx.Client):
    where = ["--home", str(server.home), "--ops-url", server.url]
    sound = CliRunner().invoke(main, ["sums", "check", *where])
    asyncio.run(spoil(server.settings.database_url))
    spoilt = CliRunner().invoke(main, ["sums", "check", *where])
    rebuilt = CliRunner().invoke(main, ["sums", "rebuild", "--json", *where])

    assert (sound.exit_code, spoilt.exit_code, rebuilt.exit_code) == (0, 1, 0)
    assert "`tenora sums rebuild`" in spoilt.output
    assert json.loads(rebuilt.output)["num_differences"] == 0
    event = ops.get("/audit").json()["data"][-1]
    assert (event["action"], event["before"]["num_differences"] > 0) == ("rollups.rebuild", True)


async def spoil(url: str) -> None:
    database = Database(url)
    await database.start()
    try:
        async with database.transaction() as session:
            await session.exec(update(UsageRollup).values(output_tokens=UsageRollup.output_tokens + 1))
    finally:
        await database.close()
