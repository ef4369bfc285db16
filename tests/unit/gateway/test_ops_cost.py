"""The cost report over the ops API and the CLI."""

import asyncio
import json
import time
from collections.abc import Iterator

import httpx
import pytest
from click.testing import CliRunner
from ops_client import client_of, error_of

from gateway.cli import main
from tenants import replica_times
from tenants.database import Database
from tenants.ledger import Ledger, SettledRequest
from tenants.meter import RequestContext
from tenants.pricing import RateCard, default_prices
from tenants.replica_times import ReplicaSpan
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
