"""Where the time of an engine goes: each account has its own, and together they are the wall time."""

import asyncio
import random

import msgspec
from arithmetic_peer import Driver, make_engine, submit
from live_engine import collect, live_gateway, live_server, tiny_engine
from live_engine import submit as submit_live

from engine import wire
from engine.metering.stats import ACCOUNTS
from engine.metering.time_records import Timekeeper
from engine.wire.records import is_time

PROMPT = [7, 8, 9, 10, 11, 12]


def accounts_of(record: wire.TimeRecord) -> int:
    return sum(getattr(record, f"{name}_ns") for name in ACCOUNTS)


def test_what_a_preemption_makes_the_engine_compute_again_is_the_systems_and_not_the_requests():
    engine, _ = make_engine(num_blocks=8, block_size=4, max_step_tokens=16)
    driver = Driver(engine)
    for number in range(4):
        driver.add(submit(f"r{number}", [number + 1, *PROMPT], 12, ignore_eos=True))
    driver.run()

    usages = [outcome.finished.usage for outcome in driver.outcomes.values() if outcome.finished]
    assert engine.scheduler.num_preemptions > 0
    assert sum(usage.recompute_ns for usage in usages) == engine.stats.account_ns["recompute"] > 0
    assert sum(usage.gpu_ns for usage in usages) == engine.stats.account_ns["attributed"]


def test_the_first_request_that_needs_an_adapter_pays_for_its_load():
    engine, _ = make_engine(adapter_slots=2)
    driver = Driver(engine)
    for name, key in (("first", "a"), ("second", "a"), ("base", "")):
        driver.add(submit(name, PROMPT, 3, adapter_key=key))
    driver.run()

    loads = {name: outcome.finished.usage.load_ns for name, outcome in driver.outcomes.items() if outcome.finished}
    assert loads["first"] == engine.stats.account_ns["load"] > 0
    assert loads["second"] == loads["base"] == 0


def test_what_was_computed_for_one_who_left_meanwhile_is_lost_and_the_others_do_not_pay_for_it():
    engine, _ = make_engine(overlaps=True)
    driver = Driver(engine)
    for name in ("stays", "leaves"):
        driver.add(submit(name, PROMPT, 20, ignore_eos=True))
    for _ in range(4):
        driver.step()
    assert engine.stats.account_ns["lost"] == 0
    engine.abort("leaves")
    driver.run()

    assert engine.stats.account_ns["lost"] > 0
    gpu_ns = [outcome.finished.usage.gpu_ns for outcome in driver.outcomes.values() if outcome.finished]
    assert sum(gpu_ns) == engine.stats.account_ns["attributed"]


def test_every_nanosecond_of_a_fake_clock_is_in_the_time_records_once():
    draw = random.Random(3)
    engine, runner = make_engine(num_blocks=12, adapter_slots=1)
    driver, began_ns = Driver(engine), runner.clock.now_ns
    keeper = Timekeeper("e", "m", engine.stats, runner.clock, lambda: 1_900_000_000 * 10**9)
    records = []
    for number in range(60):
        driver.add(submit(f"r{number}", [number % 50 + 1, *PROMPT], 6, adapter_key=draw.choice(["", "a", "b"])))
        for _ in range(draw.randrange(5)):
            driver.step()
        records.append(keeper.record())
    driver.run()
    records.append(keeper.record())

    assert [record.number for record in records] == list(range(61))
    assert abs(sum(record.wall_ns for record in records) - (runner.clock.now_ns - began_ns)) < 100
    assert sum(map(accounts_of, records)) == sum(engine.stats.account_ns.values())
    assert abs(sum(map(accounts_of, records)) - sum(record.wall_ns for record in records)) < 2_000  # a last step's tail


def test_the_accounts_of_a_running_server_are_its_wall_time_within_one_percent(tmp_path):
    async def main() -> list[wire.TimeRecord]:
        async with (
            live_server(tmp_path, time_record_s=0.05) as _,
            live_gateway(tmp_path) as (client, ledger),
        ):
            records = [await ledger.times.get()]
            for number in range(6):
                stream = client.submit(submit_live(f"r{number}", max_tokens=40))
                await collect(stream)
                stream.close(wire.Close(f"r{number}", 200))
                records.append(await ledger.times.get())
            while records[-1].number < 20:
                records.append(await ledger.times.get())
            return records

    records = asyncio.run(main())

    wall_ns = sum(record.wall_ns for record in records)
    assert [record.number for record in records] == list(range(len(records)))
    assert abs(sum(map(accounts_of, records)) - wall_ns) <= wall_ns // 100
    assert sum(record.attributed_ns for record in records) > 0
    assert sum(record.idle_ns for record in records) > 0


def test_a_time_record_is_small_and_told_from_a_usage_record():
    keeper = Timekeeper("engine-12", "smollm2-135m", tiny_engine().stats)
    payload = msgspec.msgpack.encode(keeper.record())
    usage = wire.UsageRecord("r", b"", 200, *[0] * 11)

    assert len(payload) < 200
    assert is_time(payload)
    assert not is_time(msgspec.msgpack.encode(usage))
    assert wire.read_record(payload).engine_id == "engine-12"  # pyright: ignore[reportAttributeAccessIssue]
    assert wire.read_record(msgspec.msgpack.encode(usage)) == usage
