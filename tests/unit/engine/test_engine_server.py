"""The server: every accepted request has one terminal event and one journal record, whoever dies meanwhile."""

import asyncio
import random
import resource
import signal
from contextlib import contextmanager

import pytest
from live_engine import (
    PATIENCE_S,
    collect,
    first_delta,
    live_client,
    live_gateway,
    live_server,
    socket_of,
    submit,
    tiny_engine,
    until,
)

from engine import wire
from engine.client import EngineLost
from engine.journal import Journal
from engine.serve.connection import MAX_BUFFERED_BYTES, Connection
from engine.serve.step_thread import StepThread
from engine.wire.journal import JournalCorrupt


def greedy(prompt: list[int], num_tokens: int) -> list[int]:
    """What the engine says to a prompt without any server."""
    engine = tiny_engine()
    engine.add(submit("r", prompt, max_tokens=num_tokens))
    tokens: list[int] = []
    while engine.has_work:
        for delta in engine.step().deltas:
            tokens += wire.unpack_ids(delta.token_ids)
    return tokens


async def raw_connection(folder):
    return await asyncio.open_unix_connection(str(socket_of(folder)))


async def read_message(reader: asyncio.StreamReader) -> wire.ToGateway:
    async with asyncio.timeout(PATIENCE_S):
        size = int.from_bytes(await reader.readexactly(4), "big")
        return wire.decode_to_gateway(await reader.readexactly(size))


def test_a_request_is_streamed_finished_closed_recorded_and_acknowledged(tmp_path):
    async def main():
        async with live_server(tmp_path) as server, live_gateway(tmp_path) as (client, ledger):
            stream = client.submit(submit("r1", [9, 8, 7], max_tokens=12))
            assert client.load == 1
            tokens, finished = await collect(stream)
            assert tokens == greedy([9, 8, 7], 12)
            assert (finished.usage.prompt_tokens, finished.usage.output_tokens) == (3, 12)
            assert stream.finished_ns > stream.submitted_ns
            stream.close(wire.Close("r1", 200, admit_ns=5, network_ns=6, post_ns=7, first_token_ns=8))
            record, usage = await ledger.next()
            assert (record.number, usage.outcome, usage.context) == (1, 200, b"r1")
            assert (usage.prompt_tokens, usage.output_tokens) == (3, 12)
            assert usage.queue_ns == finished.usage.queue_ns + 5
            assert (usage.network_ns, usage.post_ns, usage.first_token_ns) == (6, 7, 8)
            assert (client.load, server.num_open) == (0, 0)
            await until(lambda: server._records.num_unacked == 0, "the ack")

    asyncio.run(main())


def test_many_streams_of_two_gateways_each_get_their_own_tokens(tmp_path):
    prompts = {f"r{i}": [i + 3, i + 4, i + 5] for i in range(12)}

    async def main():
        async with (
            live_server(tmp_path),
            live_client(tmp_path, "gateway-0") as one,
            live_client(tmp_path, "gateway-1") as two,
        ):
            streams = {name: (one, two)[i % 2].submit(submit(name, p)) for i, (name, p) in enumerate(prompts.items())}
            return {name: (await collect(stream))[0] for name, stream in streams.items()}

    assert asyncio.run(main()) == {name: greedy(prompt, 8) for name, prompt in prompts.items()}


def test_nothing_is_recorded_before_close_and_the_phases_sum_to_the_total(tmp_path):
    async def main():
        async with live_server(tmp_path) as server, live_gateway(tmp_path) as (client, ledger):
            stream = client.submit(submit("r1"))
            await collect(stream)
            other = client.submit(submit("r2"))
            _, finished = await collect(other)
            assert (server.num_open, server._records.num_unacked, ledger.arrived.qsize()) == (2, 0, 0)
            other.close(wire.Close("r2", 200, 10, 20, 30))
            _, usage = await ledger.next()
            assert usage.request_id == "r2"
            total_ns = usage.queue_ns + usage.prefill_ns + usage.decode_ns + usage.network_ns + usage.post_ns
            engine_ns = finished.usage.queue_ns + finished.usage.prefill_ns + finished.usage.decode_ns
            assert total_ns == engine_ns + 60
            stream.close(wire.Close("r1", 499))
            assert (await ledger.next())[1].outcome == 499

    asyncio.run(main())


def test_an_aborted_request_ends_within_two_steps_of_the_command():
    async def main():
        engine, outputs, marks, done = tiny_engine(), [], [], asyncio.Event()
        loop = asyncio.get_running_loop()

        def deliver(output):
            outputs.append(output)
            if len(outputs) == 3:
                steps.post(engine.abort, "r")
                steps.post(lambda: loop.call_soon_threadsafe(lambda: marks.append(len(outputs))))
            if output.result.finished:
                done.set()

        steps = StepThread(engine, deliver, lambda error: None)
        steps.submit(submit("r", max_tokens=400))
        steps.start()
        async with asyncio.timeout(PATIENCE_S):
            await done.wait()
        await asyncio.to_thread(steps.stop)
        [finished] = outputs[-1].result.finished
        assert len(outputs) - marks[0] <= 2
        assert finished.usage.output_tokens < 400
        assert not engine.has_work

    asyncio.run(main())


def test_an_aborted_stream_still_gets_its_terminal_events_and_waits_for_close(tmp_path):
    async def main():
        async with live_server(tmp_path) as server, live_gateway(tmp_path) as (client, ledger):
            stream = client.submit(submit("r1", max_tokens=400))
            await first_delta(stream)
            stream.abort()
            tokens, finished = await collect(stream)
            assert finished.error_code == ""
            assert finished.usage.output_tokens >= len(tokens) + 1
            assert server.num_open == 1
            stream.close(wire.Close("r1", 499))
            _, usage = await ledger.next()
            assert (usage.outcome, usage.output_tokens) == (499, finished.usage.output_tokens)

    asyncio.run(main())


def test_close_before_the_end_aborts_and_records_what_was_generated(tmp_path):
    async def main():
        async with live_server(tmp_path) as server, live_gateway(tmp_path) as (client, ledger):
            stream = client.submit(submit("r1", max_tokens=400))
            await first_delta(stream)
            stream.close(wire.Close("r1", 499))
            _, usage = await ledger.next()
            assert usage.outcome == 499
            assert 1 <= usage.output_tokens < 400
            assert server.num_open == 0

    asyncio.run(main())


def test_a_gateway_cut_off_mid_stream_leaves_one_lost_record_for_each_request(tmp_path):
    async def main():
        async with live_server(tmp_path) as server, live_gateway(tmp_path, "survivor") as (survivor, ledger):
            async with live_client(tmp_path, "victim") as victim:
                streams = [victim.submit(submit(f"v{i}", max_tokens=400)) for i in range(8)]
                ended = victim.submit(submit("ended", max_tokens=1))
                await collect(ended)
                mine = survivor.submit(submit("mine", max_tokens=30))
                await asyncio.gather(*map(first_delta, streams))
                victim._connection.abort()
                for stream in streams:
                    with pytest.raises(EngineLost):
                        await collect(stream)
            _, finished = await collect(mine)
            assert finished.usage.output_tokens == 30
            usages = [(await ledger.next())[1] for _ in range(9)]
            assert sorted(usage.request_id for usage in usages) == ["ended", *(f"v{i}" for i in range(8))]
            assert {usage.outcome for usage in usages} == {wire.OUTCOME_LOST}
            assert all(1 <= usage.output_tokens < 400 and usage.prompt_tokens == 4 for usage in usages)
            mine.close(wire.Close("mine", 200))
            assert (await ledger.next())[1].request_id == "mine"
            assert server.num_open == 0

    asyncio.run(main())


def test_a_record_comes_again_until_it_is_acknowledged(tmp_path, monkeypatch):
    monkeypatch.setattr("engine.serve.record_delivery.REDELIVER_AFTER_S", 0.0)
    monkeypatch.setattr("engine.serve.server.TICK_S", 0.01)

    async def main():
        async with live_server(tmp_path) as server, live_gateway(tmp_path, acks=False) as (client, ledger):
            for name in ("r1", "r2"):
                stream = client.submit(submit(name))
                await collect(stream)
                stream.close(wire.Close(name, 200))
            seen: list[int] = []
            while seen.count(1) < 2 or seen.count(2) < 2:
                record, _ = await ledger.next()
                seen.append(record.number)
            while record.number != 2:
                record, _ = await ledger.next()
            await client.ack(2, b"not its hash".ljust(32))
            await client.ack(record.number, record.hash)
            await until(lambda: server._records.num_unacked == 0, "the ack")

    asyncio.run(main())


def test_unacknowledged_records_are_delivered_by_the_next_engine_process(tmp_path):
    async def main():
        async with live_server(tmp_path), live_gateway(tmp_path) as (client, ledger):
            for name, acks in (("r1", True), ("r2", False), ("r3", False)):
                ledger.acks = acks
                stream = client.submit(submit(name))
                await collect(stream)
                stream.close(wire.Close(name, 200))
                await ledger.next()
        async with live_server(tmp_path) as server, live_gateway(tmp_path) as (_, ledger):
            records = [await ledger.next() for _ in range(2)]
            assert [(record.number, usage.request_id) for record, usage in records] == [(2, "r2"), (3, "r3")]
            await until(lambda: server._records.num_unacked == 0, "the acks")
        async with live_server(tmp_path) as server:
            assert server._records.num_unacked == 0

    asyncio.run(main())


def test_records_move_to_another_gateway_when_the_first_goes_away(tmp_path):
    async def main():
        async with live_server(tmp_path), live_gateway(tmp_path, "second") as (second, ledger):
            ledger.acks = False
            stream = second.submit(submit("r1"))
            await collect(stream)
            stream.close(wire.Close("r1", 200))
            assert (await ledger.next())[0].number == 1
            async with live_gateway(tmp_path, "third") as (_, third_ledger):
                second._connection.abort()
                assert (await third_ledger.next())[1].request_id == "r1"

    asyncio.run(main())


@pytest.mark.parametrize(
    "fields",
    [
        {"context": b"x" * 513},
        {"adapter_key": "../../secret"},
        {"prompts": [b"\x01\x00\x00"]},
        {"prompts": []},
        {"prompts": [b""]},
        {"prompts": [wire.pack_ids([300])]},
        {"prompts": [wire.pack_ids([-1])]},
        {"num_choices": 0},
        {"num_choices": -3},
        {"sampling": wire.SamplingParams(8, min_tokens=4, stop_token_ids=(300,))},
        {"sampling": wire.SamplingParams(8, min_tokens=4, stop_token_ids=(-1,))},
        {"sampling": wire.SamplingParams(8, logit_bias={300: 1.0})},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_an_invalid_submit_is_rejected_and_never_recorded(tmp_path, fields):
    async def main():
        async with live_server(tmp_path) as server, live_client(tmp_path) as client:
            _, rejected = await collect(client.submit(submit("r1", **fields)))
            assert isinstance(rejected, wire.Rejected)
            assert rejected.code == "invalid"
            assert (server.num_open, client.load) == (0, 0)
            tokens, _ = await collect(client.submit(submit("r1")))  # the id is free again
            assert len(tokens) == 8

    asyncio.run(main())


def test_a_request_id_in_flight_is_refused_and_the_first_goes_on(tmp_path):
    async def main():
        async with (
            live_server(tmp_path),
            live_client(tmp_path, "gateway-0") as one,
            live_client(tmp_path, "gateway-1") as two,
        ):
            first = one.submit(submit("same", max_tokens=40))
            await first_delta(first)
            _, rejected = await collect(two.submit(submit("same")))
            assert (type(rejected), rejected.code) == (wire.Rejected, "invalid")
            _, finished = await collect(first)
            assert finished.usage.output_tokens == 40

    asyncio.run(main())


def test_a_gateway_cannot_end_or_close_the_request_of_another(tmp_path):
    async def main():
        async with (
            live_server(tmp_path) as server,
            live_client(tmp_path, "gateway-0") as one,
            live_client(tmp_path, "gateway-1") as two,
        ):
            stream = one.submit(submit("mine", max_tokens=40))
            await first_delta(stream)
            for message in (wire.Abort("mine"), wire.Close("mine", 200), wire.Grant("mine", 1)):
                two._connection.send(message)
            await two.stats(PATIENCE_S)  # all of it has been read
            _, finished = await collect(stream)
            assert finished.usage.output_tokens == 40
            assert server.num_open == 1

    asyncio.run(main())


def test_a_too_long_prompt_and_a_full_queue_are_rejected_by_their_codes(tmp_path):
    async def main():
        async with live_server(tmp_path), live_client(tmp_path) as client:
            assert (await client.report(PATIENCE_S)).refusal is None
            _, rejected = await collect(client.submit(submit("long", [5] * 600)))
            assert rejected.code == "too_long"
            refusal = (await client.report(PATIENCE_S)).refusal
            assert (refusal.code, refusal.message) == ("too_long", rejected.message)
            streams = [client.submit(submit(f"r{i}", max_tokens=2)) for i in range(1500)]
            ends = [(await collect(stream))[1] for stream in streams]
            codes = {end.code for end in ends if isinstance(end, wire.Rejected)}
            assert codes == {"busy"}
            assert sum(isinstance(end, wire.Finished) for end in ends) >= 1024
            assert (await client.report(PATIENCE_S)).refusal.code == "busy"

    asyncio.run(main())


def test_a_grant_lets_a_stream_go_on_past_its_reservation(tmp_path):
    async def main():
        async with live_server(tmp_path), live_client(tmp_path) as client:
            stream = client.submit(submit("r1", max_tokens=60, granted_tokens=20))
            stream.grant(45)
            tokens, _ = await collect(stream)
            assert len(tokens) in (20, 45)  # 20 only if the engine was faster than the grant
            short, _ = await collect(client.submit(submit("r2", max_tokens=60, granted_tokens=3)))
            assert len(short) == 3

    asyncio.run(main())


def test_a_gateway_that_does_not_read_loses_its_connection_and_nobody_else(tmp_path, monkeypatch):
    monkeypatch.setattr("engine.serve.connection.MAX_BUFFERED_BYTES", 1 << 14)

    async def main():
        async with live_server(tmp_path) as server, live_gateway(tmp_path) as (client, ledger):
            reader, writer = await raw_connection(tmp_path)
            writer.transport.pause_reading()
            writer.write(wire.encode(wire.Hello("slow")))
            sampling = wire.SamplingParams(400, temperature=0.0, ignore_eos=True, logprobs=20)
            for i in range(16):
                writer.write(wire.encode(submit(f"s{i}", max_tokens=400, sampling=sampling)))
            mine = client.submit(submit("mine", max_tokens=100))
            usages = [(await ledger.next())[1] for _ in range(16)]
            assert {usage.outcome for usage in usages} == {wire.OUTCOME_LOST}
            assert all(usage.output_tokens < 400 for usage in usages)
            _, finished = await collect(mine)
            assert finished.usage.output_tokens == 100
            assert server.num_open == 1
            writer.transport.abort()
            del reader

    asyncio.run(main())


class Ignoring:
    """A listener to whom nothing matters."""

    def greeted(self, connection) -> None: ...
    def received(self, connection, message) -> None: ...
    def lost(self, connection) -> None: ...


def test_one_large_message_cuts_off_nobody_who_reads_and_several_who_does_not(tmp_path):
    """The scores of a prompt of 128k tokens are larger than all that is bounded beside them."""
    large = wire.Finished("r", wire.Usage(), error_message="x" * (MAX_BUFFERED_BYTES + (1 << 20)))

    async def main():
        connection = Connection(Ignoring())
        path = str(tmp_path / "e.sock")
        server = await asyncio.get_running_loop().create_unix_server(lambda: connection, path)
        reader, writer = await asyncio.open_unix_connection(path)
        await until(lambda: connection._transport is not None, "the connection")
        for message in (large, wire.Finished("next", wire.Usage())):
            connection.send(message)
        assert [await read_message(reader) for _ in range(2)] == [large, wire.Finished("next", wire.Usage())]
        for _ in range(3):
            connection.send(large)
        assert connection._transport is not None
        assert connection._transport.is_closing()
        await until(lambda: connection._transport is None, "the end of the connection")
        writer.close()
        server.close()

    asyncio.run(main())


def test_bytes_that_are_not_our_protocol_close_only_that_connection(tmp_path):
    rng = random.Random(3)
    good = [submit("fuzz", max_tokens=3), wire.Grant("x", 5), wire.Close("mine", 200), wire.AdapterForget("k")]
    good += [wire.AdapterChunk("k", 0, 10, "00", b"data"), wire.Ack(7, b"h"), wire.Abort("y"), wire.StatsRequest(1)]

    def noise() -> bytes:
        body = bytearray(wire.encode(rng.choice(good)))
        for _ in range(rng.randrange(1, 6)):
            body[rng.randrange(4, len(body))] = rng.randrange(256)
        return rng.choice([rng.randbytes(rng.randrange(1, 60)), bytes(body), wire.encode(rng.choice(good))])

    async def main():
        async with live_server(tmp_path) as server, live_client(tmp_path) as client:
            mine = client.submit(submit("mine", max_tokens=300))
            await first_delta(mine)
            for turn in range(120):
                _, writer = await raw_connection(tmp_path)
                if turn % 2:
                    writer.write(wire.encode(wire.Hello("fuzz")))
                writer.write(b"".join(noise() for _ in range(4)))
                await writer.drain()
                writer.close()
            await until(lambda: len(server._connections) == 1, "the end of the others")
            _, finished = await collect(mine)
            assert finished.usage.output_tokens == 300
            assert not server.broken.done()
            tokens, _ = await collect(client.submit(submit("after")))
            assert len(tokens) == 8

    asyncio.run(main())


def test_a_connection_must_begin_with_one_hello_of_a_version_we_speak(tmp_path):
    async def main():
        async with live_server(tmp_path):
            for frames in (wire.encode(submit("r1")), 2 * wire.encode(wire.Hello("twice"))):
                reader, writer = await raw_connection(tmp_path)
                writer.write(frames)
                rest = await asyncio.wait_for(reader.read(), PATIENCE_S)  # to the end: it was closed
                assert rest.count(b"welcome") == (b"twice" in frames)
                writer.close()
            reader, writer = await raw_connection(tmp_path)
            writer.write(wire.encode(wire.Hello("future", version=99)))
            assert (await read_message(reader)).version == wire.PROTOCOL_VERSION
            assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""
            writer.close()

    asyncio.run(main())


def test_an_observer_sees_stats_and_may_do_nothing_else(tmp_path):
    async def main():
        async with (
            live_server(tmp_path),
            live_client(tmp_path) as client,
            live_client(tmp_path, "observer", role="observer") as observer,
        ):
            await collect(client.submit(submit("r1")))
            families = {family.name: family for family in await observer.stats(PATIENCE_S)}
            assert families["tenora_engine_open_requests"].samples == [("", {}, 1.0)]
            assert families["tenora_engine_gateways"].samples == [("", {}, 1.0)]
            accounts = {labels.get("account") for _, labels, _ in families["tenora_gpu_seconds"].samples}
            assert "idle" in accounts
            with pytest.raises(EngineLost):
                await collect(observer.submit(submit("r2")))

    asyncio.run(main())


def test_a_draining_engine_refuses_new_requests_finishes_the_old_and_delivers_their_records(tmp_path):
    async def main():
        async with live_server(tmp_path) as server, live_gateway(tmp_path) as (client, ledger):
            stream = client.submit(submit("old", max_tokens=100))
            await first_delta(stream)
            draining = asyncio.create_task(server.drain(PATIENCE_S))
            await until(lambda: server.draining, "draining")
            _, rejected = await collect(client.submit(submit("new")))
            assert rejected.code == "draining"
            _, finished = await collect(stream)
            assert finished.usage.output_tokens == 100
            assert not draining.done()
            stream.close(wire.Close("old", 200))
            async with asyncio.timeout(PATIENCE_S):
                await draining
            assert (await ledger.next())[1].request_id == "old"
            assert server._records.num_unacked == 0

    asyncio.run(main())


def test_requests_left_at_the_end_of_the_process_are_journaled_as_lost(tmp_path):
    async def main():
        async with live_server(tmp_path) as server, live_client(tmp_path) as client:
            stream = client.submit(submit("r1", max_tokens=400))
            await first_delta(stream)
            await server.drain(0.0)
        async with live_server(tmp_path), live_gateway(tmp_path) as (_, ledger):
            _, usage = await ledger.next()
            assert (usage.request_id, usage.outcome) == ("r1", wire.OUTCOME_LOST)
            assert 1 <= usage.output_tokens < 400

    asyncio.run(main())


def test_a_long_backlog_is_delivered_whole_and_in_order(tmp_path):
    journal = Journal(tmp_path)
    for first in range(0, 3000, 500):
        journal.append([b"record %d" % number for number in range(first, first + 500)])
    journal.close()

    async def main():
        async with live_server(tmp_path) as server, live_gateway(tmp_path) as (_, ledger):
            for number in range(3000):
                record = await asyncio.wait_for(ledger.arrived.get(), PATIENCE_S)
                assert (record.number, record.payload) == (number + 1, b"record %d" % number)
            await until(lambda: server._records.num_unacked == 0, "all acks")

    asyncio.run(main())


@contextmanager
def full_disk(path):
    """No file may grow beyond the present size of ``path``."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, previous)


def test_while_the_journal_cannot_be_written_new_requests_are_refused_and_no_record_is_lost(tmp_path, monkeypatch):
    monkeypatch.setattr("engine.serve.record_delivery.RETRY_WRITE_S", 0.01)

    async def main():
        async with live_server(tmp_path) as server, live_gateway(tmp_path) as (client, ledger):
            streams = [client.submit(submit(f"r{i}")) for i in range(3)]
            for stream in streams:
                await collect(stream)
            with full_disk(tmp_path / "journal.log"):
                for stream in streams:
                    stream.close(wire.Close(stream.request_id, 200))
                await until(lambda: server._records.failing, "the failed write")
                _, rejected = await collect(client.submit(submit("new")))
                assert rejected.code == "busy"
                assert ledger.arrived.empty()
            assert [(await ledger.next())[1].request_id for _ in range(3)] == ["r0", "r1", "r2"]
            await until(lambda: not server._records.failing, "recovery")
            assert len((await collect(client.submit(submit("new"))))[0]) == 8

    asyncio.run(main())


def test_a_journal_changed_on_disk_under_a_running_server_breaks_it(tmp_path):
    journal = Journal(tmp_path)
    journal.append([b"one", b"two"])
    journal.close()

    async def main():
        async with live_server(tmp_path) as server:
            log = tmp_path / "journal.log"
            log.write_bytes(log.read_bytes().replace(b"two", b"TWO"))
            async with live_client(tmp_path):
                with pytest.raises(JournalCorrupt, match="record 2"):
                    await asyncio.wait_for(asyncio.shield(server.broken), PATIENCE_S)

    asyncio.run(main())


def test_an_engine_that_broke_breaks_its_server(tmp_path):
    async def main():
        async with live_server(tmp_path) as server:
            server._steps.post([].pop)
            with pytest.raises(IndexError):
                await asyncio.wait_for(asyncio.shield(server.broken), PATIENCE_S)

    asyncio.run(main())


def test_a_draining_engine_that_breaks_is_waited_for_no_longer(tmp_path):
    async def main():
        async with live_server(tmp_path) as server, live_client(tmp_path) as client:
            await first_delta(client.submit(submit("r1", max_tokens=400)))
            draining = asyncio.create_task(server.drain(timeout_s=10 * PATIENCE_S))
            await asyncio.sleep(0)
            server._steps.post(lambda: 1 / 0)
            await asyncio.wait_for(draining, PATIENCE_S)
            assert server.broken.done()

    asyncio.run(main())


def test_a_socket_folder_that_others_may_enter_is_refused(tmp_path):
    socket_of(tmp_path).parent.mkdir(mode=0o755)
    socket_of(tmp_path).parent.chmod(0o755)

    async def main():
        with pytest.raises(PermissionError, match="0700"):
            async with live_server(tmp_path):
                pass

    asyncio.run(main())
