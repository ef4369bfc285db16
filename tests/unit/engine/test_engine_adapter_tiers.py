"""Adapters: fetched once in chunks, kept on disk in bounds, never used unless their bytes have their hash."""

import asyncio
import os
import resource
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
from live_engine import PATIENCE_S, canonical_file, collect, first_delta, live_client, live_server, submit, until
from tiny import tiny_adapter

from engine import wire
from engine.client import AdapterFile, EngineLost
from engine.serve import adapter_tiers
from engine.serve.adapter_tiers import AdapterTiers, DiskTier

KEY = "ab" * 32
PADDING = 3 * wire.ADAPTER_CHUNK_BYTES + 12345


class Store:
    """A gateway's adapter files; counts who asked for what."""

    def __init__(self, **files: AdapterFile) -> None:
        self.files = files
        self.asked: list[str] = []

    async def find(self, key: str) -> AdapterFile | None:
        self.asked.append(key)
        return self.files.get(key)


def with_adapter(request_id: str, **fields) -> wire.Submit:
    return submit(request_id, adapter_key=KEY, **fields)


def test_an_adapter_comes_over_the_wire_in_chunks_once_and_changes_the_output(tmp_path):
    file = canonical_file(tmp_path / "a", tiny_adapter(1), padding=PADDING)
    store = Store(**{KEY: file})

    async def main():
        async with live_server(tmp_path), live_client(tmp_path, adapter_source=store.find) as client:
            base, _ = await collect(client.submit(submit("base", max_tokens=16)))
            first, finished = await collect(client.submit(with_adapter("r1", max_tokens=16)))
            again, _ = await collect(client.submit(with_adapter("r2", max_tokens=16)))
            assert finished.error_code == ""
            assert first == again != base
            return first

    assert file.size_bytes > 3 * wire.ADAPTER_CHUNK_BYTES
    first = asyncio.run(main())
    assert store.asked == [KEY]
    [cached] = (tmp_path / "adapters").iterdir()
    assert cached.read_bytes() == file.path.read_bytes()

    async def restarted():
        async with live_server(tmp_path), live_client(tmp_path, adapter_source=store.find) as client:
            return await collect(client.submit(with_adapter("r3", max_tokens=16)))

    assert asyncio.run(restarted())[0] == first
    assert store.asked == [KEY], "the disk tier had it"


def test_a_file_damaged_on_disk_is_found_by_its_hash_and_fetched_once_more(tmp_path):
    store = Store(**{KEY: canonical_file(tmp_path / "a", tiny_adapter(1))})

    async def once(request_id):
        async with live_server(tmp_path), live_client(tmp_path, adapter_source=store.find) as client:
            return await collect(client.submit(with_adapter(request_id)))

    good, _ = asyncio.run(once("r1"))
    [cached] = (tmp_path / "adapters").iterdir()
    data = bytearray(cached.read_bytes())
    data[-1] ^= 1
    cached.write_bytes(data)
    tokens, finished = asyncio.run(once("r2"))
    assert (tokens, finished.error_code) == (good, "")
    assert store.asked == [KEY, KEY]
    assert cached.read_bytes()[-1] == data[-1] ^ 1


def damaged(file: AdapterFile) -> AdapterFile:
    data = bytearray(file.path.read_bytes())
    data[-1] ^= 1
    file.path.write_bytes(data)
    return file


def not_an_adapter(file: AdapterFile) -> AdapterFile:
    import hashlib

    file.path.write_bytes(b"not safetensors" * 100)
    data = file.path.read_bytes()
    return AdapterFile(file.path, hashlib.sha256(data).hexdigest(), len(data))


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (damaged, "adapter_corrupt"),
        (not_an_adapter, "adapter_corrupt"),
        (lambda file: file._replace(size_bytes=file.size_bytes + 1), "adapter_corrupt"),
        (lambda file: file._replace(path=file.path.with_name("gone")), "adapter_corrupt"),
        (lambda file: file._replace(path=file.path.parent), "adapter_delayed"),
        (lambda file: None, "adapter_unavailable"),
    ],
    ids=["wrong hash", "not an adapter", "shorter than announced", "file gone", "unreadable", "unknown"],
)
def test_what_cannot_be_had_ends_its_requests_with_a_code_and_leaves_others_alone(tmp_path, change, code):
    store = Store(**{KEY: change(canonical_file(tmp_path / "a", tiny_adapter(1)))})

    async def main():
        async with live_server(tmp_path) as server, live_client(tmp_path, adapter_source=store.find) as client:
            streams = [client.submit(with_adapter(f"r{i}")) for i in range(3)]
            other = client.submit(submit("other"))
            for stream in streams:
                tokens, finished = await collect(stream)
                assert (tokens, finished.error_code) == ([], code)
                stream.close(wire.Close(stream.request_id, 409))
            assert (await collect(other))[1].error_code == ""
            await until(lambda: server.num_open == 1, "the closes")
            store.files[KEY] = canonical_file(tmp_path / "b", tiny_adapter(1))
            tokens, finished = await collect(client.submit(with_adapter("later")))
            assert (len(tokens), finished.error_code) == (8, "")

    asyncio.run(main())
    assert [path.suffix for path in (tmp_path / "adapters").iterdir()] == [".tnr"]


def test_an_adapter_that_does_not_fit_the_slots_fails_its_requests_only(tmp_path):
    store = Store(**{KEY: canonical_file(tmp_path / "a", tiny_adapter(1, rank=9))})  # slots take 8

    async def main():
        async with live_server(tmp_path) as server, live_client(tmp_path, adapter_source=store.find) as client:
            _, finished = await collect(client.submit(with_adapter("r1")))
            assert finished.error_code == "invalid_adapter"
            assert not server.broken.done()
            assert len((await collect(client.submit(submit("other"))))[0]) == 8

    asyncio.run(main())


def test_when_the_asked_gateway_goes_away_the_next_that_waits_is_asked(tmp_path):
    store = Store(**{KEY: canonical_file(tmp_path / "a", tiny_adapter(1))})
    asked = asyncio.Event()

    async def never(key):
        asked.set()
        await asyncio.Event().wait()

    async def main():
        async with live_server(tmp_path), live_client(tmp_path, "second", adapter_source=store.find) as second:
            async with live_client(tmp_path, "first", adapter_source=never) as first:
                doomed = first.submit(with_adapter("r1"))
                await asyncio.wait_for(asked.wait(), PATIENCE_S)
                waiting = second.submit(with_adapter("r2"))
                await second.stats(PATIENCE_S)
                assert store.asked == []
            with pytest.raises(EngineLost):
                await collect(doomed)
            tokens, finished = await collect(waiting)
            assert (len(tokens), finished.error_code) == (8, "")
            assert store.asked == [KEY]

    asyncio.run(main())


def test_when_nobody_waits_any_more_the_next_request_starts_the_fetch_again(tmp_path):
    store = Store(**{KEY: canonical_file(tmp_path / "a", tiny_adapter(1))})
    asked = asyncio.Event()

    async def never(key):
        asked.set()
        await asyncio.Event().wait()

    async def main():
        async with live_server(tmp_path) as server:
            async with live_client(tmp_path, "first", adapter_source=never) as first:
                first.submit(with_adapter("r1"))
                await asyncio.wait_for(asked.wait(), PATIENCE_S)
            await until(lambda: server.num_open == 0, "the lost one's end")
            async with live_client(tmp_path, "second", adapter_source=store.find) as second:
                tokens, _ = await collect(second.submit(with_adapter("r2")))
                assert len(tokens) == 8

    asyncio.run(main())


def test_a_forgotten_adapter_leaves_the_disk_and_those_who_wait_for_it_are_told(tmp_path):
    store = Store(**{KEY: canonical_file(tmp_path / "a", tiny_adapter(1))})
    asked = asyncio.Event()

    async def never(key):
        asked.set()
        await asyncio.Event().wait()

    async def main():
        async with live_server(tmp_path), live_client(tmp_path, adapter_source=store.find) as client:
            await collect(client.submit(with_adapter("r1")))
            assert len(list((tmp_path / "adapters").iterdir())) == 1
            client.forget_adapter(KEY)
            await client.stats(PATIENCE_S)
            assert list((tmp_path / "adapters").iterdir()) == []
        async with live_server(tmp_path), live_client(tmp_path, adapter_source=never) as client:
            stream = client.submit(with_adapter("r2"))
            await asyncio.wait_for(asked.wait(), PATIENCE_S)
            client.forget_adapter(KEY)
            assert (await collect(stream))[1].error_code == "adapter_unavailable"

    asyncio.run(main())


def test_what_is_being_written_of_an_adapter_that_is_forgotten_leaves_nothing_on_disk(tmp_path, monkeypatch):
    store = Store(**{KEY: canonical_file(tmp_path / "a", tiny_adapter(1))})
    writing, go_on = threading.Event(), threading.Event()
    take_in = adapter_tiers._take_in

    def held(*args) -> None:
        writing.set()
        assert go_on.wait(PATIENCE_S)
        take_in(*args)

    monkeypatch.setattr(adapter_tiers, "_take_in", held)

    async def main():
        async with live_server(tmp_path), live_client(tmp_path, adapter_source=store.find) as client:
            stream = client.submit(with_adapter("r1"))
            await asyncio.to_thread(writing.wait)
            client.forget_adapter(KEY)
            assert (await collect(stream))[1].error_code == "adapter_unavailable"
            go_on.set()

    asyncio.run(main())
    assert list((tmp_path / "adapters").iterdir()) == []


def stocked(folder: Path) -> DiskTier:
    """One that has the adapter."""
    file = canonical_file(folder / "a", tiny_adapter(1))
    disk = DiskTier(folder / "adapters")
    file.path.replace(disk.staging(KEY))
    disk.publish(KEY, file.sha256)
    return disk


def test_an_adapter_that_cannot_be_prepared_is_worth_another_try_and_nobody_waits_for_ever(tmp_path):
    def prepare(weights):
        raise RuntimeError("no pinned memory is left")

    async def main():
        told: asyncio.Queue[tuple[str, ...]] = asyncio.Queue()
        tiers = AdapterTiers(
            stocked(tmp_path), lambda key: None, lambda *ready: None, lambda *failed: told.put_nowait(failed), prepare
        )
        tiers.want(KEY)
        key, code, _ = await asyncio.wait_for(told.get(), PATIENCE_S)
        await tiers.close()
        return key, code

    assert asyncio.run(main()) == (KEY, "adapter_delayed")


def test_an_adapter_that_is_wanted_again_as_soon_as_it_has_come_comes_again(tmp_path):
    async def main():
        came: asyncio.Queue[str] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def ready(key, weights) -> None:
            came.put_nowait(key)
            if came.qsize() == 1:
                loop.call_soon(tiers.want, key)

        tiers = AdapterTiers(stocked(tmp_path), lambda key: None, ready, lambda *failed: None, lambda weights: weights)
        tiers.want(KEY)
        await until(lambda: came.qsize() == 2, "the second time")
        await tiers.close()

    asyncio.run(main())


def test_an_adapter_that_was_being_given_when_the_connection_dropped_is_given_on_the_next_one(tmp_path):
    file = canonical_file(tmp_path / "a", tiny_adapter(1))
    asked = asyncio.Event()

    async def find(key: str) -> AdapterFile:
        if not asked.is_set():
            asked.set()
            await asyncio.Event().wait()
        return file

    async def main():
        async with live_server(tmp_path), live_client(tmp_path, adapter_source=find) as client:
            lost = client.submit(with_adapter("r1"))
            await asyncio.wait_for(asked.wait(), PATIENCE_S)
            client._connection.abort()
            with pytest.raises(EngineLost):
                await collect(lost)
            await client.ready(PATIENCE_S)
            tokens, finished = await collect(client.submit(with_adapter("r2")))
            assert (len(tokens), finished.error_code) == (8, "")

    asyncio.run(main())


def test_where_an_adapter_lies_is_told_tier_by_tier(tmp_path):
    store = Store(**{KEY: canonical_file(tmp_path / "a", tiny_adapter(1))})

    async def main():
        async with live_server(tmp_path), live_client(tmp_path, adapter_source=store.find) as client:
            before = await client.residency(timeout_s=PATIENCE_S)
            await collect(client.submit(with_adapter("r1")))
            async with live_client(tmp_path, "watcher", role="observer") as observer:
                after = await observer.residency(timeout_s=PATIENCE_S)
            asked = await client.residency([KEY, "another"], PATIENCE_S)
            client.forget_adapter(KEY)
            gone = await client.residency(timeout_s=PATIENCE_S)
            return before, after, asked, gone

    before, after, asked, gone = asyncio.run(main())
    assert before == gone == {}
    assert after == asked == {KEY: ["device", "cpu", "disk"]}

    async def restarted():
        async with live_server(tmp_path), live_client(tmp_path, adapter_source=store.find) as client:
            await collect(client.submit(with_adapter("r2")))
            async with live_server(tmp_path / "other"), live_client(tmp_path / "other") as elsewhere:
                return await client.residency(timeout_s=PATIENCE_S), await elsewhere.residency(timeout_s=PATIENCE_S)

    assert asyncio.run(restarted()) == ({KEY: ["device", "cpu", "disk"]}, {})


@contextmanager
def files_bounded_to(num_bytes: int):
    """This process's disk is as good as full beyond files of that size."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_worth_another_try_and_stops_nobody_else(tmp_path):
    store = Store(**{KEY: canonical_file(tmp_path / "a", tiny_adapter(1), padding=PADDING)})
    small = canonical_file(tmp_path / "b", tiny_adapter(2))

    async def main():
        async with live_server(tmp_path), live_client(tmp_path, adapter_source=store.find) as client:
            store.files["old"] = store.files["older"] = small
            for name in ("older", "old"):
                await collect(client.submit(submit(name, adapter_key=name)))
            with files_bounded_to(2 << 20):
                _, failed = await collect(client.submit(with_adapter("r1")))
                tokens, _ = await collect(client.submit(submit("base")))
            left = sorted(path.name.split(".")[0] for path in (tmp_path / "adapters").iterdir())
            _, later = await collect(client.submit(with_adapter("r2")))
            return failed.error_code, len(tokens), left, later.error_code

    code, num_tokens, left, later = asyncio.run(main())
    assert (code, num_tokens, later) == ("adapter_delayed", 8, "")
    assert left == ["old"], "half of what was less recently used made room, and nothing is half-written"


def test_chunks_that_nobody_asked_for_are_ignored(tmp_path):
    async def main():
        async with live_server(tmp_path), live_client(tmp_path) as client:
            client._connection.send(wire.AdapterChunk(KEY, 0, 4, "00" * 32, b"data"))
            client._connection.send(wire.AdapterUnavailable(KEY, "adapter_corrupt", "no"))
            await client.stats(PATIENCE_S)
            assert list((tmp_path / "adapters").iterdir()) == []

    asyncio.run(main())


@pytest.mark.parametrize(
    "chunk",
    [
        wire.AdapterChunk(KEY, 1, 4, "00" * 32, b"dat"),
        wire.AdapterChunk(KEY, 0, 4, "00" * 32, b""),
        wire.AdapterChunk(KEY, 0, 4, "00" * 32, b"too long"),
        wire.AdapterChunk(KEY, 0, 1 << 50, "00" * 32, b"data"),
        wire.AdapterChunk(KEY, 0, 4, "../../../tmp/x", b"data"),
    ],
    ids=["gap", "empty", "longer than announced", "huge", "a path as hash"],
)
def test_chunks_that_do_not_make_their_file_are_refused(tmp_path, chunk):
    async def main():
        async with live_server(tmp_path):
            async with live_client(tmp_path) as client:

                async def bad(key):
                    client._connection.send(chunk)
                    await asyncio.Event().wait()

                client._supply._source = bad
                stream = client.submit(with_adapter("r1"))
                assert (await collect(stream))[1].error_code == "adapter_corrupt"
            assert list((tmp_path / "adapters").glob("*.tnr")) == []

    asyncio.run(main())


def test_a_running_stream_goes_on_while_a_large_adapter_comes(tmp_path):
    file = canonical_file(tmp_path / "a", tiny_adapter(1), padding=40 * wire.ADAPTER_CHUNK_BYTES)
    store = Store(**{KEY: file})

    async def main():
        async with live_server(tmp_path), live_client(tmp_path, adapter_source=store.find) as client:
            running = client.submit(submit("running", max_tokens=300))
            await first_delta(running)
            tokens, finished = await collect(client.submit(with_adapter("r1")))
            assert (len(tokens), finished.error_code) == (8, "")
            assert (await collect(running))[1].usage.output_tokens == 300

    asyncio.run(main())


def put(tier: DiskTier, key: str, num_bytes: int) -> None:
    tier.staging(key).write_bytes(b"x" * num_bytes)
    tier.publish(key, "00" * 32)


def test_the_disk_tier_is_bounded_and_drops_the_least_recently_used(tmp_path):
    tier = DiskTier(tmp_path, max_bytes=300)
    for key in "abc":
        put(tier, key, 100)
    assert tier.find("a") is not None
    put(tier, "d", 100)
    assert tier.find("b") is None
    assert sorted(path.name[0] for path in tmp_path.iterdir()) == ["a", "c", "d"]
    put(tier, "huge", 1000)
    assert (len(tier), tier.num_bytes) == (1, 1000)


def test_what_else_lies_in_the_disk_tiers_folder_stops_nobody(tmp_path):
    put(DiskTier(tmp_path), "good", 100)
    (tmp_path / f"link.{'00' * 32}.tnr").symlink_to(tmp_path / "nowhere")
    (tmp_path / f"folder.{'00' * 32}.tnr").mkdir()
    (tmp_path / "no-hash.tnr").write_bytes(b"?")
    (tmp_path / "note.txt").write_bytes(b"?")

    tier = DiskTier(tmp_path)

    assert list(tier) == ["good"]
    assert tier.num_bytes == 100


def test_the_disk_tier_finds_its_files_and_their_order_again(tmp_path):
    tier = DiskTier(tmp_path)
    for order, key in enumerate("abc"):
        put(tier, key, 100)
        path, _ = tier.find(key)
        os.utime(path, (order, order))
    (tmp_path / "half.part").write_bytes(b"torn")
    os.utime(tier.find("a")[0], (10, 10))
    again = DiskTier(tmp_path, max_bytes=250)
    assert [again.find(key) is not None for key in "abc"] == [True, False, True]
    assert not (tmp_path / "half.part").exists()
    again.remove("a")
    assert (len(again), again.num_bytes) == (1, 100)
