"""The client: connects again by itself, tells every stream of a loss, never lets a record overtake a failed one."""

import asyncio

import pytest
from live_engine import (
    PATIENCE_S,
    TOKENIZER,
    collect,
    decode_usage,
    first_delta,
    live_client,
    live_gateway,
    live_server,
    socket_of,
    submit,
    tiny_card,
    until,
)

from engine import wire
from engine.client import EngineClient, EngineLost, ProtocolMismatch
from engine.client.stream import Connection
from engine.journal import Journal


def test_ready_gives_the_card_and_the_tokenizer_only_to_who_wants_it(tmp_path):
    async def main():
        async with live_server(tmp_path), live_client(tmp_path) as plain:
            assert plain.welcome is not None
            assert plain.welcome.card == tiny_card()
            assert plain.welcome.tokenizer is None
            async with live_client(tmp_path, want_tokenizer=True) as curious:
                assert curious.welcome is not None
                assert curious.welcome.tokenizer == TOKENIZER

    asyncio.run(main())


def test_nothing_listens_and_everything_says_so(tmp_path):
    async def main():
        client = EngineClient(str(tmp_path / "none.sock"), "gateway-0")
        await client.start()
        with pytest.raises(EngineLost, match="no engine"):
            await client.ready(0.05)
        with pytest.raises(EngineLost):
            client.submit(submit("r1"))
        with pytest.raises(EngineLost):
            await client.stats()
        await client.ack(1, b"")
        client.forget_adapter("k")
        assert (client.connected, client.load, client.welcome) == (False, 0, None)
        await client.close()

    asyncio.run(main())


def test_messages_of_one_turn_of_the_loop_are_one_write():
    class Transport(asyncio.Transport):
        def __init__(self) -> None:
            self.written: list[bytes] = []

        def write(self, data: bytes) -> None:
            self.written.append(data)

        def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
            pass

    async def main():
        transport, connection = Transport(), Connection(lambda connection, message: None)
        connection.connection_made(transport)
        said = [wire.Abort("r1"), wire.Close("r1", 499), wire.Ack(1, b"")]
        for message in said:
            connection.send(message)
        assert transport.written == []
        await asyncio.sleep(0)

        (written,) = transport.written
        assert [wire.decode_to_engine(body) for body in wire.Frames().feed(written)] == said

    asyncio.run(main())


def test_a_client_that_started_before_its_engine_finds_it(tmp_path):
    async def main():
        client = EngineClient(str(socket_of(tmp_path)), "gateway-0")
        await client.start()
        with pytest.raises(EngineLost):
            await client.ready(0.05)
        async with live_server(tmp_path):
            await client.ready(PATIENCE_S)
            tokens, _ = await collect(client.submit(submit("r1")))
            assert len(tokens) == 8
        await client.close()

    asyncio.run(main())


def test_a_dropped_connection_ends_every_stream_once_and_is_made_again(tmp_path):
    async def main():
        async with live_server(tmp_path) as server, live_client(tmp_path) as client:
            streams = [client.submit(submit(f"r{i}", max_tokens=400)) for i in range(4)]
            await asyncio.gather(*map(first_delta, streams))
            waiting = [asyncio.create_task(collect(stream)) for stream in streams]
            await asyncio.sleep(0)
            client._connection.abort()
            results = await asyncio.gather(*waiting, return_exceptions=True)
            assert [type(result) for result in results] == [EngineLost] * 4
            assert client.load == 0
            streams[0].close(wire.Close("r0", 499))  # without effect
            with pytest.raises(EngineLost):
                await streams[1].next()
            await client.ready(PATIENCE_S)
            await until(lambda: server.num_open == 0, "the lost ones' records")
            tokens, _ = await collect(client.submit(submit("r0")))
            assert len(tokens) == 8

    asyncio.run(main())


def test_what_came_before_the_loss_can_still_be_taken(tmp_path):
    async def main():
        async with live_server(tmp_path), live_client(tmp_path) as client:
            stream = client.submit(submit("r1", max_tokens=400))
            await until(lambda: len(stream._events) >= 3, "three events")
            client._connection.abort()
            await until(lambda: not client.connected, "the loss")
            assert len(await stream.next()) >= 3
            with pytest.raises(EngineLost):
                await stream.next()

    asyncio.run(main())


def test_who_wants_several_events_waits_for_them_or_for_the_last(tmp_path):
    async def main():
        async with live_server(tmp_path), live_client(tmp_path) as client:
            stream = client.submit(submit("r1", max_tokens=20))
            first = await stream.next(8)
            assert len(first) >= 8
            rest = await stream.next(1000)
            assert len(first) + len(rest) == 21
            assert isinstance(rest[-1], wire.Finished)

    asyncio.run(main())


def test_who_wants_more_events_than_came_before_a_loss_gets_those(tmp_path):
    async def main():
        async with live_server(tmp_path), live_client(tmp_path) as client:
            stream = client.submit(submit("r1", max_tokens=400))
            waiting = asyncio.create_task(stream.next(1000))
            await until(lambda: len(stream._events) >= 3, "three events")
            client._connection.abort()
            assert len(await waiting) >= 3
            with pytest.raises(EngineLost):
                await stream.next()

    asyncio.run(main())


def test_an_engine_of_another_protocol_is_named_at_once(tmp_path):
    async def refuse(reader, writer):
        await reader.read(1)
        writer.write(wire.encode(wire.Welcome("engine-9", 99, tiny_card())))
        await reader.read()  # until the client hangs up
        writer.close()

    async def main():
        path = str(tmp_path / "e.sock")
        async with await asyncio.start_unix_server(refuse, path):
            client = EngineClient(path, "gateway-0")
            await client.start()
            with pytest.raises(ProtocolMismatch, match="engine-9 speaks protocol 99"):
                await client.ready(PATIENCE_S)
            assert not client.connected
            await client.close()

    asyncio.run(main())


def test_an_id_in_flight_is_refused_before_it_is_sent(tmp_path):
    async def main():
        async with live_server(tmp_path), live_client(tmp_path) as client:
            first = client.submit(submit("same", max_tokens=30))
            with pytest.raises(ValueError, match="in flight"):
                client.submit(submit("same"))
            assert len((await collect(first))[0]) == 30

    asyncio.run(main())


def test_events_after_close_are_dropped_and_the_load_falls_when_the_engine_is_done(tmp_path):
    async def main():
        async with live_server(tmp_path) as server, live_client(tmp_path) as client:
            stream = client.submit(submit("r1", max_tokens=400))
            await first_delta(stream)
            stream._events.clear()
            stream.close(wire.Close("r1", 499))
            stream.close(wire.Close("r1", 200))
            assert client.load == 1
            await until(lambda: client.load == 0, "the end")
            assert not stream._events
            assert server.num_open == 0

    asyncio.run(main())


def test_a_record_whose_handling_failed_is_not_overtaken(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("engine.serve.record_delivery.REDELIVER_AFTER_S", 0.0)
    monkeypatch.setattr("engine.serve.server.TICK_S", 0.01)
    taken, failures = [], [3]

    async def take(record):
        if decode_usage(record).request_id == "r1" and failures:
            failures.pop()
            raise RuntimeError("the ledger is locked")
        taken.append(record.number)
        await clients[0].ack(record.number, record.hash)

    clients: list[EngineClient] = []

    async def main():
        async with live_server(tmp_path) as server, live_client(tmp_path, on_record=take) as client:
            clients.append(client)
            for i in range(4):
                stream = client.submit(submit(f"r{i}"))
                await collect(stream)
                stream.close(wire.Close(f"r{i}", 200))
            await until(lambda: server._records.num_unacked == 0 and server.num_open == 0, "all acks")

    asyncio.run(main())
    assert not failures
    firsts = list(dict.fromkeys(taken))
    assert firsts == [1, 2, 3, 4]
    assert "was not taken" in caplog.text


def test_a_gateway_takes_records_again_after_others_had_its_turn(tmp_path, monkeypatch):
    monkeypatch.setattr("engine.serve.record_delivery.REDELIVER_AFTER_S", 0.0)
    monkeypatch.setattr("engine.serve.server.TICK_S", 3600.0)

    async def main():
        async with live_server(tmp_path) as server, live_gateway(tmp_path, "slow", acks=False) as (_, slow):

            async def serve_one(number):
                stream = client.submit(submit(f"r{number}"))
                await collect(stream)
                stream.close(wire.Close(f"r{number}", 200))

            async with live_gateway(tmp_path, "other") as (client, other):
                await serve_one(1)
                assert (await slow.next())[0].number == 1
                server._records.tick()  # not acknowledged: the other's turn
                for number in (1, 2, 3):
                    if number > 1:
                        await serve_one(number)
                    assert (await other.next())[0].number == number
                await serve_one(4)
                await other.next()
                await until(lambda: server._records.num_unacked == 0, "all acks")
            slow.acks = True  # the only gateway that is left
            client = slow.client
            await serve_one(5)
            record, usage = await slow.next()
            assert (record.number, usage.request_id) == (5, "r5")
            await until(lambda: server._records.num_unacked == 0, "its ack")

    monkeypatch.setattr("live_engine.PATIENCE_S", 10.0)
    asyncio.run(main())


def test_records_that_come_again_while_the_ledger_is_slow_are_kept_once(tmp_path, monkeypatch):
    monkeypatch.setattr("engine.serve.record_delivery.REDELIVER_AFTER_S", 0.0)
    monkeypatch.setattr("engine.serve.server.TICK_S", 0.002)
    journal = Journal(tmp_path)
    journal.append([b"%d" % number for number in range(50)])
    journal.close()
    release = asyncio.Event()
    taken: list[int] = []

    async def take(record):
        taken.append(record.number)
        if record.number == 2:
            await release.wait()

    async def main():
        async with live_server(tmp_path) as server, live_client(tmp_path, on_record=take) as client:
            await until(lambda: taken[-1:] == [2], "the second record")
            for _ in range(20):  # each answer came after another delivery
                server._records.tick()
                await client.stats(PATIENCE_S)
                assert len(client._records) <= 50
            release.set()
            await until(lambda: 50 in taken, "the last record")
        first_times = list(dict.fromkeys(taken))
        assert first_times == list(range(1, 51))

    asyncio.run(main())


def test_scores_of_a_prompt_come_with_the_stream(tmp_path):
    async def main():
        async with live_server(tmp_path), live_client(tmp_path) as client:
            sampling = wire.SamplingParams(0, temperature=0.0, prompt_logprobs=1)
            stream = client.submit(submit("r1", [3, 4, 5, 6], sampling=sampling, granted_tokens=0))
            events = []
            while not events or not isinstance(events[-1], wire.Finished):
                events += await asyncio.wait_for(stream.next(), PATIENCE_S)
            [scores] = [event for event in events if isinstance(event, wire.PromptScores)]
            assert [each.token_id for each in scores.logprobs] == [4, 5, 6]
            assert all(each.logprob <= 0 for each in scores.logprobs)

    asyncio.run(main())


def test_the_client_and_the_journal_import_neither_torch_nor_numpy():
    import subprocess
    import sys

    code = "import sys, engine.client, engine.journal; print({'torch', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
