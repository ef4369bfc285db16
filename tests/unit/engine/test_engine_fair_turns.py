"""Turns by flow: who wants much does not make the others wait for all of it."""

import asyncio

from live_engine import canonical_file, collect, live_client, live_server, submit, until
from tiny import tiny_adapter

from engine import wire
from engine.client import AdapterFile
from engine.serve.fair_turns import FairTurns


def order_of(at_once: int, *flows: str) -> list[str]:
    """In which order those get in who come in the order of ``flows`` while all turns are taken."""
    entered: list[str] = []

    async def main() -> None:
        turns, go_on = FairTurns(at_once), asyncio.Event()

        async def hold() -> None:
            async with turns.turn("first"):
                await go_on.wait()

        async def come(flow: str) -> None:
            async with turns.turn(flow):
                entered.append(flow)
                await asyncio.sleep(0)

        holders = [asyncio.create_task(hold()) for _ in range(at_once)]
        await asyncio.sleep(0)
        tasks = [asyncio.create_task(come(flow)) for flow in flows]
        await asyncio.sleep(0)
        assert entered == []
        go_on.set()
        await asyncio.gather(*holders, *tasks)

    asyncio.run(main())
    return entered


def test_flows_take_turns_whatever_each_wants():
    assert order_of(1, "a", "a", "a", "a", "b", "c", "b") == ["a", "b", "c", "a", "b", "a", "a"]


def test_who_gives_up_while_waiting_or_at_its_turn_leaves_no_turn_taken():
    async def main() -> None:
        turns = FairTurns(1)
        async with turns.turn("a"):
            waiting = [asyncio.create_task(turns._enter(flow)) for flow in "bcd"]
            await asyncio.sleep(0)
            waiting[0].cancel()
            await asyncio.sleep(0)
        waiting[1].cancel()  # its turn has come, and it does not know yet
        await asyncio.wait_for(waiting[2], 10)
        turns._leave()
        async with asyncio.timeout(10), turns.turn("e"):
            pass

    asyncio.run(main())


def test_no_more_than_so_many_are_inside():
    async def main() -> None:
        turns, inside, most = FairTurns(2), 0, 0

        async def come(flow: str) -> None:
            nonlocal inside, most
            async with turns.turn(flow):
                inside += 1
                most = max(most, inside)
                await asyncio.sleep(0)
                inside -= 1

        await asyncio.gather(*(come("ab"[number % 2]) for number in range(20)))
        assert most == 2

    asyncio.run(main())


def test_a_flow_that_wants_many_adapters_does_not_hold_up_anothers_first(tmp_path):
    """The gateway sends two at a time, in the order in which it is asked."""
    file = canonical_file(tmp_path / "a", tiny_adapter(1))
    many, other = [f"{number:064x}" for number in range(8)], "f" * 64
    asked: list[str] = []

    async def main() -> None:
        go_on, two_asked = asyncio.Event(), asyncio.Event()

        async def find(key: str) -> AdapterFile:
            asked.append(key)
            if len(asked) == 2:
                two_asked.set()
            await go_on.wait()
            return file

        async with live_server(tmp_path) as server, live_client(tmp_path, adapter_source=find) as client:
            streams = [
                client.submit(submit(f"many-{key[-1]}", adapter_key=key, flow=wire.Flow("many"))) for key in many
            ]
            await asyncio.wait_for(two_asked.wait(), 30)
            streams.append(client.submit(submit("other", adapter_key=other, flow=wire.Flow("other"))))
            await until(lambda: len(server._adapters._tasks) == len(many) + 1, "nine wanted")
            go_on.set()
            for stream in streams:
                assert (await collect(stream))[1].error_code == ""

    asyncio.run(main())
    assert sorted(asked) == sorted([*many, other])
    assert asked.index(other) <= 3
