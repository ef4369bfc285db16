"""Metrics of several processes: no counter ever goes down or is counted twice (cases.md 24), by real processes."""

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path

import httpx
import msgspec
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from engine.wire import Family
from gateway.serve import scrape
from gateway.serve.children import Child, Command
from gateway.serve.scrape import SummedRegistry
from gateway.serve.supervisor import listen
from tests import plain
from tests.ops_server import ops_server, settings_of
from tests.stores import valkey_server

ROOT = Path(__file__).parents[3]

# One worker: serves HTTP on an inherited socket, counts what it answers, gives its families on a unix socket.
WORKER = """
import asyncio, socket, sys
from pathlib import Path
import uvicorn
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from gateway.serve import scrape

registry = CollectorRegistry()
requests = Counter("tenora_requests", "Requests.", ["outcome"], registry=registry)
seconds = Histogram("tenora_request_seconds", "Duration.", buckets=(0.1, 1), registry=registry)
workers = Gauge("test_workers", "Workers that are up.", ["worker"], registry=registry)
workers.labels(sys.argv[3]).set(1)

async def app(scope, receive, send):
    status = 429 if scope["path"] == "/refused" else 200
    requests.labels("refused" if status == 429 else "ok").inc()
    seconds.observe(0.5)
    await send({"type": "http.response.start", "status": status, "headers": [(b"connection", b"close")]})
    await send({"type": "http.response.body", "body": sys.argv[3].encode()})

async def main():
    while Path(sys.argv[4]).exists():
        await asyncio.sleep(0.01)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off", access_log=False))
    async with scrape.serve(Path(sys.argv[2]), registry):
        print("worker ready", flush=True)
        await server.serve(sockets=[socket.socket(fileno=int(sys.argv[1]))])

asyncio.run(main())
"""


def worker(index: int, descriptor: int, path: Path, closed_door: Path) -> Command:
    """It comes up when there is no ``closed_door`` any more."""
    argv = [sys.executable, "-c", WORKER, str(descriptor), str(path), f"w{index}", str(closed_door)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return Command(f"gateway {index}", argv, "worker ready", environment, pass_fds=(descriptor,))


async def samples(client: httpx.AsyncClient, url: str) -> dict[str, float]:
    text = (await client.get(f"{url}/metrics")).text
    return {" ".join([s.name, *s.labels.values()]): s.value for family in parse_text(text) for s in family.samples}


def test_counters_of_four_workers_never_fall_and_never_count_twice(tmp_path: Path) -> None:
    async def main(redis_url: str, public: socket.socket) -> None:
        settings, door = settings_of(tmp_path, redis_url), tmp_path / "closed"
        address = f"http://127.0.0.1:{public.getsockname()[1]}"
        async with ops_server(settings) as ops, plain.async_client() as client:
            # given four workers on one socket
            for index in range(4):
                command = worker(index, public.fileno(), settings.scrape_path(index), door)
                child = Child(command, lambda n, name=command.name: ops.fleet.registry.retire(name, n))
                child.start()
                ops.fleet.gateways.append(child)
            await asyncio.gather(*(child.ready() for child in ops.fleet.gateways))

            # when 40 requests are answered, 10 of them with a refusal
            for number in range(40):
                await client.get(f"{address}/{'refused' if number % 4 == 0 else 'good'}")

            # then each scrape shows just these
            for _ in range(20):
                seen = await samples(client, ops.url)
                assert seen["tenora_requests_total ok"] == 30
                assert seen["tenora_requests_total refused"] == 10
                assert seen["tenora_request_seconds_count"] == 40
                assert seen["tenora_request_seconds_bucket 1.0"] == 40
                assert [name for name in seen if name.startswith("test_workers")] == [
                    f"test_workers w{index}" for index in range(4)
                ]

            # and when the one that did most is killed: its counters stay, its gauge vanishes
            door.touch()
            victim = ops.fleet.gateways[2]
            os.kill(victim.pid or 0, signal.SIGKILL)
            while victim.is_ready:
                await asyncio.sleep(0)
            seen = await samples(client, ops.url)
            assert "test_workers w2" not in seen
            assert seen["tenora_requests_total ok"] + seen["tenora_requests_total refused"] == 40

            # and its successor's counters are added to them
            door.unlink()
            await victim.ready()
            totals = []
            for _ in range(10):
                await client.get(f"{address}/good")
                seen = await samples(client, ops.url)
                totals.append(seen["tenora_requests_total ok"] + seen["tenora_requests_total refused"])
            assert totals == list(range(41, 51))
            assert seen["test_workers w2"] == 1

            await asyncio.gather(*(child.stop(10) for child in ops.fleet.gateways))

    with valkey_server() as store, listen("127.0.0.1", 0, "--port") as public:
        asyncio.run(main(store.url, public))


def counted(name: str, value: float, suffix: str = "_total", **labels: str) -> Family:
    return Family(name, "counter", "A counter.", [(suffix, labels, value)])


def test_a_late_reply_of_a_dead_process_changes_nothing() -> None:
    registry = SummedRegistry()
    registry.update("gateway 0", 1, [counted("a", 5)])
    registry.retire("gateway 0", 1)

    registry.update("gateway 0", 1, [counted("a", 7)])

    assert registry.total("a") == 5


def test_an_end_that_is_told_twice_counts_once() -> None:
    registry = SummedRegistry()
    registry.update("gateway 0", 1, [counted("a", 5)])
    registry.retire("gateway 0", 1)
    registry.retire("gateway 0", 1)
    registry.update("gateway 0", 2, [counted("a", 1)])
    registry.retire("gateway 0", 1)
    assert registry.total("a") == 6


def test_a_counter_that_fell_within_one_process_is_taken_as_begun_anew() -> None:
    registry = SummedRegistry()
    registry.update("e0", 1, [counted("a", 5)])
    registry.update("e0", 1, [counted("a", 2)])
    assert registry.total("a") == 7


def test_counters_are_one_family_however_the_child_names_them() -> None:
    registry = SummedRegistry()
    registry.update("x", 1, [counted("a", 1)])
    registry.update("y", 1, [counted("a_total", 2, suffix="")])
    registry.update("z", 1, [counted("a_total", 4, suffix="_total")])
    assert registry.total("a_total") == 7


def test_engine_samples_get_their_model_unless_they_have_one() -> None:
    registry = SummedRegistry()
    own = Family("b", "gauge", "A gauge.", [("", {"model": "other"}, 1.0)])
    registry.update("e0", 1, [counted("a", 3), own], model="smol")
    assert registry.total("a", model="smol") == 3
    assert registry.total("b", model="other") == 1


def test_shares_are_averaged_and_timestamps_are_not_added() -> None:
    registry = SummedRegistry()
    for source, share, at in (("e0", 0.25, 100.0), ("e1", 0.75, 90.0)):
        gauges = [
            Family("tenora_gpu_utilization_ratio", "gauge", "Busy.", [("", {}, share)]),
            Family("vllm:lora_requests_info", "gauge", "Adapters.", [("", {}, at)]),
        ]
        registry.update(source, 1, gauges)
    assert registry.total("tenora_gpu_utilization_ratio") == 0.5
    assert registry.total("vllm:lora_requests_info") == 100.0


def test_the_exposition_is_valid_in_both_formats() -> None:
    # given a registry with every kind of metric
    own = CollectorRegistry()
    Counter("requests", "Requests.", ["model"], registry=own).labels('a "b" \\ c\n').inc(3)
    Histogram("seconds", "Seconds.", ["phase"], buckets=(0.005, 1, 10), registry=own).labels("queue").observe(0.5)
    Gauge("depth", "Depth.", registry=own).set(-2.5)
    registry = SummedRegistry()
    registry.update("gateway 0", 1, scrape.families(own))
    registry.update("gateway 1", 1, scrape.families(own))

    # when it is rendered for a scraper of each kind
    open_text, open_type = registry.render("application/openmetrics-text;version=1.0.0")
    plain_text, plain_type = registry.render("text/plain")

    # then the stock parsers read the sums back
    assert open_type.startswith("application/openmetrics-text")
    assert plain_type.startswith("text/plain")
    for text, parse in ((open_text, parse_openmetrics), (plain_text, parse_text)):
        read = {
            (sample.name, *sample.labels.values()): sample.value
            for family in parse(text.decode())
            for sample in family.samples
        }
        assert read["requests_total", 'a "b" \\ c\n'] == 6
        assert read["depth",] == -5
        assert read["seconds_count", "queue"] == 2
        assert [read["seconds_bucket", le, "queue"] for le in ("0.005", "1.0", "10.0", "+Inf")] == [0, 2, 2, 2]
        assert not any("created" in key[0] for key in read)


def slow_request(trace_id: str, at_s: float, seconds: float = 0.5) -> Family:
    """A histogram of one observation, whose exemplar is of that trace."""
    own = CollectorRegistry()
    histogram = Histogram("seconds", "Seconds.", ["route"], buckets=(0.1, 1, 10), registry=own)
    histogram.labels("base").observe(seconds, {"trace_id": trace_id})
    (family,) = scrape.families(own)
    exemplars = [msgspec.structs.replace(exemplar, unix_s=at_s) for exemplar in family.exemplars]
    return msgspec.structs.replace(family, exemplars=exemplars)


def exemplars(registry: SummedRegistry) -> dict[str, tuple[str, float, float]]:
    """By upper bound: trace, value, time; as the stock parser reads them from what a scraper gets."""
    text, _ = registry.render("application/openmetrics-text;version=1.0.0")
    return {
        sample.labels["le"]: (
            sample.exemplar.labels["trace_id"],
            sample.exemplar.value,
            float(sample.exemplar.timestamp),
        )
        for family in parse_openmetrics(text.decode())
        for sample in family.samples
        if sample.exemplar
    }


def test_the_sum_shows_each_buckets_newest_exemplar_also_of_a_process_that_has_ended() -> None:
    registry = SummedRegistry()
    registry.update("gateway 0", 1, [slow_request("aa", 30.0)])
    registry.update("gateway 1", 1, [slow_request("bb", 20.0)])
    registry.update("gateway 2", 1, [slow_request("cc", 10.0, seconds=5)])
    registry.retire("gateway 0", 1)
    registry.retire("gateway 2", 1)

    seen = exemplars(registry)

    assert seen == {"1.0": ("aa", 0.5, 30.0), "10.0": ("cc", 5.0, 10.0)}


def test_of_two_exemplars_of_one_bucket_the_newer_one_is_shown() -> None:
    registry = SummedRegistry()
    registry.update("gateway 0", 1, [slow_request("newer", 30.0)])
    registry.update("gateway 1", 1, [slow_request("older", 20.0)])
    assert exemplars(registry) == {"1.0": ("newer", 0.5, 30.0)}

    registry.retire("gateway 0", 1)
    assert exemplars(registry) == {"1.0": ("newer", 0.5, 30.0)}

    registry.update("gateway 1", 1, [slow_request("newest", 40.0)])
    assert exemplars(registry) == {"1.0": ("newest", 0.5, 40.0)}


def test_exemplars_come_over_the_wire_and_plain_text_has_none(tmp_path: Path) -> None:
    own = CollectorRegistry()
    Histogram("seconds", "Seconds.", buckets=(1,), registry=own).observe(0.5, {"trace_id": "ab" * 16})

    async def main() -> scrape.Snapshot:
        async with scrape.serve(tmp_path / "x.sock", own):
            return await scrape.pull(tmp_path / "x.sock")

    registry = SummedRegistry()
    registry.update("gateway 0", 1, asyncio.run(main()).families)

    assert exemplars(registry)["1.0"][0] == "ab" * 16
    assert "ab" * 16 not in registry.render("text/plain")[0].decode()


def test_tenants_of_ended_processes_are_bounded_and_the_sum_keeps_all_that_was_counted() -> None:
    registry = SummedRegistry()
    for number in range(scrape.MAX_ENDED_TENANTS + 10):
        registry.update("gateway 0", number, [counted("tenora_tenant_requests", 2, tenant=f"ten_{number}")])
        registry.retire("gateway 0", number)

    (family,) = registry.collect()

    assert len(family.samples) == scrape.MAX_ENDED_TENANTS + 1
    assert registry.total("tenora_tenant_requests") == 2 * (scrape.MAX_ENDED_TENANTS + 10)
    assert registry.total("tenora_tenant_requests", tenant="other") == 20


@pytest.mark.parametrize(
    "accept",
    [
        "",
        "text/plain;version=0.0.4",
        "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,text/plain;q=0.5",
        "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8,text/plain;version=1.0.0;escaping=allow-utf-8",
        "text/plain;version=1.0.0;escaping=underscores",
    ],
)
def test_names_with_a_colon_keep_it_whoever_scrapes(accept: str) -> None:
    registry = SummedRegistry()
    registry.update("e0", 1, [Family("vllm:num_requests_running", "gauge", "Running.", [("", {}, 3.0)])], model="m")

    text, _ = registry.render(accept)

    assert b'\nvllm:num_requests_running{model="m"} 3.0\n' in text


def test_a_child_that_is_not_there_or_speaks_nonsense_is_an_error_of_the_scrape(tmp_path: Path) -> None:
    async def failure(path: Path) -> str:
        try:
            await scrape.pull(path, timeout_s=5)
        except scrape.ScrapeError as error:
            return str(error)
        return ""

    async def main() -> None:
        async def nonsense(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"GET / HTTP/1.1")
            writer.close()

        server = await asyncio.start_unix_server(nonsense, str(tmp_path / "x.sock"))
        assert await failure(tmp_path / "x.sock")
        assert await failure(tmp_path / "absent.sock")
        server.close()
        await server.wait_closed()

    asyncio.run(main())
