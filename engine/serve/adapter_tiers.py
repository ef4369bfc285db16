"""Adapters on their way to the engine: from a gateway in chunks, through a bounded disk tier, into host memory.

All of it off the step thread: the event loop keeps the books, an executor hashes, writes and parses.
"""

import asyncio
import errno
import hashlib
import logging
import os
import re
import stat
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, Protocol
from weakref import WeakKeyDictionary

from msgspec.structs import replace

from engine import wire
from engine.adapter_pool import HostWeights
from engine.config import DISK_ADAPTER_BYTES
from engine.metering.stats import RESIDENT_FAMILY
from engine.serve.fair_turns import FairTurns
from engine.weights.adapter import AdapterWeights, read_adapter
from engine.weights.errors import CorruptAdapter

logger = logging.getLogger("engine.adapters")

MAX_ADAPTER_BYTES = 2 << 30
MAX_QUEUED_CHUNKS = 8  # beyond it the gateway's socket isn't read until the disk has caught up
FETCH_TIMEOUT_S = 30.0  # without any chunk
ASKED_AT_ONCE = 2  # of a gateway: it sends no more at a time, in the order asked
PARSED_AT_ONCE = 2
SUFFIX = ".tnr"
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NAME = re.compile(rf"[A-Za-z0-9_-]{{1,100}}\.[0-9a-f]{{64}}{re.escape(SUFFIX)}")


class Peer(Protocol):
    """A gateway's connection, as far as adapters need it."""

    def send(self, message: wire.ToGateway, /) -> None: ...
    def hold(self) -> None: ...
    def release(self) -> None: ...


class FetchFailed(Exception):
    """The adapter can't be had; ``code`` and the message go to the callers that wait for it."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class DiskTier:
    """Canonical files ``KEY.SHA256.tnr``, least recently used out first, bounded in bytes; the newest stays."""

    def __init__(self, folder: Path, max_bytes: int = DISK_ADAPTER_BYTES) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._folder = folder
        self._max_bytes = max_bytes
        self._files: OrderedDict[str, tuple[Path, str, int]] = OrderedDict()
        self.num_bytes = 0
        for path in folder.glob("*.part"):  # what a crash left half-written
            path.unlink()
        for path in sorted(_files_of(folder), key=lambda path: path.stat().st_mtime_ns):
            key, _, sha256 = path.name.removesuffix(SUFFIX).rpartition(".")
            self._enter(key, path, sha256)

    def __len__(self) -> int:
        return len(self._files)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def find(self, key: str) -> tuple[Path, str] | None:
        """The file and the hash that its bytes must have; not read, so not checked."""
        if key not in self._files:
            return None
        path, sha256, _ = self._files[key]
        self._files.move_to_end(key)
        try:
            os.utime(path)  # so that a restart knows the order
        except OSError:
            self.remove(key)
            return None
        return path, sha256

    def staging(self, key: str) -> Path:
        return self._folder / f"{key}.part"

    def publish(self, key: str, sha256: str) -> tuple[Path, str]:
        """Takes the staged file of ``key``, whose bytes have been checked, into the tier."""
        path = self._folder / f"{key}.{sha256}{SUFFIX}"
        self.remove(key)
        self.staging(key).replace(path)
        self._enter(key, path, sha256)
        return path, sha256

    def remove(self, key: str) -> None:
        if key in self._files:
            path, _, size_bytes = self._files.pop(key)
            self.num_bytes -= size_bytes
            path.unlink(missing_ok=True)

    def join(self, tiers: dict[str, list[wire.Tier]], keys: list[str] | None) -> dict[str, list[wire.Tier]]:
        """Those of faster tiers, with ours behind them for each of these keys (None: for every file)."""
        joined = {key: list(faster) for key, faster in tiers.items()}
        for key in self._files if keys is None else filter(self._files.__contains__, keys):
            joined.setdefault(key, []).append("disk")
        return joined

    def shed(self) -> None:
        """The disk is full: the less recently used half goes, so that the next adapter finds room."""
        for key in list(self._files)[: (len(self) + 1) // 2]:
            self.remove(key)

    def _enter(self, key: str, path: Path, sha256: str) -> None:
        size_bytes = path.stat().st_size
        self._files[key] = (path, sha256, size_bytes)
        self.num_bytes += size_bytes
        while self.num_bytes > self._max_bytes and len(self._files) > 1:
            self.remove(next(iter(self._files)))


def with_disk_tier(families: list[wire.Family], disk: DiskTier) -> list[wire.Family]:
    """The engine's families; the disk tier's adapters are one more sample of one of them."""
    here = ("", {"tier": "disk"}, float(len(disk)))
    return [
        replace(family, samples=[*family.samples, here]) if family.name == RESIDENT_FAMILY else family
        for family in families
    ]


def _files_of(folder: Path) -> Iterator[Path]:
    """The regular files under names of ours; anything else that lies there is left alone, and stops nobody."""
    for path in folder.iterdir():
        if _NAME.fullmatch(path.name) and stat.S_ISREG(path.lstat().st_mode):
            yield path
        else:
            logger.warning("%s is no adapter of ours", path)


class _Fetch:
    """One file that a gateway is sending; None among its messages: that gateway is gone."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.messages: asyncio.Queue[wire.AdapterChunk | wire.AdapterUnavailable | None] = asyncio.Queue()
        self._held = False

    def put(self, message: wire.AdapterChunk | wire.AdapterUnavailable | None) -> None:
        self.messages.put_nowait(message)
        if not self._held and self.messages.qsize() > MAX_QUEUED_CHUNKS:
            self._held = True
            self.peer.hold()

    async def take(self) -> wire.AdapterChunk | None:
        """The next chunk, or None when the gateway is gone. Raises FetchFailed."""
        try:
            async with asyncio.timeout(FETCH_TIMEOUT_S):
                message = await self.messages.get()
        except TimeoutError:
            raise FetchFailed("adapter_delayed", "the adapter didn't come in time") from None
        if self._held and self.messages.empty():
            self.close()
        if isinstance(message, wire.AdapterUnavailable):
            raise FetchFailed(message.code, message.message)
        return message

    def close(self) -> None:
        if self._held:
            self._held = False
            self.peer.release()


class AdapterTiers:
    """Brings what the engine wants: ``ready(key, weights)`` or ``failed(key, code, message)``, once for each
    ``want``, on the event loop. ``ask(key)`` names a gateway whose request waits for it, and that request's flow; or
    None: then the tier waits for ``waiting(key)`` or ``forget(key)``. ``prepare`` makes of weights what the engine
    loads, off the event loop. Flows take turns: no tenant's many adapters hold up another's one."""

    def __init__(
        self,
        disk: DiskTier,
        ask: Callable[[str], tuple[Peer, str] | None],
        ready: Callable[[str, HostWeights], None],
        failed: Callable[[str, str, str], None],
        prepare: Callable[[AdapterWeights], HostWeights],
    ) -> None:
        self._disk = disk
        self._ask = ask
        self._ready = ready
        self._failed = failed
        self._prepare = prepare
        self._executor = ThreadPoolExecutor(PARSED_AT_ONCE, "adapters")
        self._parsing = FairTurns(PARSED_AT_ONCE)
        self._asking: WeakKeyDictionary[Peer, FairTurns] = WeakKeyDictionary()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._fetches: dict[str, _Fetch] = {}
        self._unasked: dict[str, asyncio.Event] = {}

    def want(self, key: str) -> None:
        """The engine has no host copy and a request waits for one."""
        if key not in self._tasks or self._tasks[key].done():  # one that is over is of a need before
            task = self._tasks[key] = asyncio.create_task(self._bring(key), name=f"adapter {key[:12]}")
            task.add_done_callback(lambda done: self._tasks.pop(key, None) if self._tasks.get(key) is done else None)

    def waiting(self, key: str) -> None:
        """A request for that adapter has come: its gateway may be asked, if none could be before."""
        if key in self._unasked:
            self._unasked[key].set()

    def receive(self, peer: Peer, message: wire.AdapterChunk | wire.AdapterUnavailable) -> None:
        """A gateway's answer; ignored unless that gateway was asked."""
        fetch = self._fetches.get(message.adapter_key)
        if fetch is not None and fetch.peer is peer:
            fetch.put(message)

    def lost(self, peer: Peer) -> None:
        """That gateway is gone: what it was sending is asked of another."""
        for fetch in self._fetches.values():
            if fetch.peer is peer:
                fetch.put(None)

    def forget(self, key: str) -> None:
        """Deleted: no file is kept, and who waits for its bytes still is told so."""
        self._disk.remove(key)
        task = self._tasks.pop(key, None)
        if task is not None:
            task.cancel()
            self._failed(key, "adapter_unavailable", "the adapter was deleted")

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._executor.shutdown(wait=True)

    async def _bring(self, key: str) -> None:
        try:
            self._ready(key, await self._weights(key))
        except FetchFailed as failure:
            logger.warning("adapter %.12s: %s", key, failure)
            self._failed(key, failure.code, str(failure))
        except OSError as error:
            logger.error("adapter %.12s: the disk tier fails: %s", key, error.strerror)
            if error.errno in NO_ROOM:
                self._disk.shed()
            self._failed(key, "adapter_delayed", "the engine has no room for the adapter at the moment")
        except Exception:  # whatever it is (no pinned memory left …): nobody is to wait for ever
            logger.exception("adapter %.12s can't be brought", key)
            self._failed(key, "adapter_delayed", "the engine can't take the adapter at the moment")

    async def _weights(self, key: str) -> HostWeights:
        found = self._disk.find(key)
        if found is not None:
            try:
                return await self._parse(key, *found)
            except (CorruptAdapter, OSError) as error:
                logger.error("adapter %.12s is corrupt on disk, fetched anew: %s", key, error)
                self._disk.remove(key)
        try:
            return await self._parse(key, *await self._fetch(key))
        except CorruptAdapter as error:
            self._disk.remove(key)
            raise FetchFailed("adapter_corrupt", "the adapter's file is corrupt") from error

    async def _parse(self, key: str, path: Path, sha256: str) -> HostWeights:
        """In the flow's turn. Raises CorruptAdapter, OSError."""
        asker = self._ask(key)
        async with self._parsing.turn(asker[1] if asker else ""):
            return await self._off_loop(lambda: self._prepare(read_adapter(path, sha256)))

    async def _fetch(self, key: str) -> tuple[Path, str]:
        """Asks one gateway after the other, each in the flow's turn, until one has sent the whole file."""
        while True:
            peer, flow = await self._gateway(key)
            fetch = self._fetches[key] = _Fetch(peer)  # also while it waits for its turn it may hear of the peer's end
            turns = self._asking.setdefault(peer, FairTurns(ASKED_AT_ONCE))
            try:
                async with turns.turn(flow):
                    peer.send(wire.AdapterWanted(key))
                    sha256 = await self._receive_file(key, fetch)
                if sha256:
                    return self._disk.publish(key, sha256)
            finally:
                self._disk.staging(key).unlink(missing_ok=True)
                fetch.close()
                if self._fetches.get(key) is fetch:
                    del self._fetches[key]

    async def _gateway(self, key: str) -> tuple[Peer, str]:
        while (asker := self._ask(key)) is None:
            self._unasked[key] = asyncio.Event()
            try:
                await self._unasked[key].wait()
            finally:
                del self._unasked[key]
        return asker

    async def _receive_file(self, key: str, fetch: _Fetch) -> str:
        """Writes chunks to the staging file as they come: its hash, or '' when the gateway went away. Raises
        FetchFailed when they don't make the file that they announce."""
        digest, num_bytes = hashlib.sha256(), 0
        staged = self._disk.staging(key)
        staged.unlink(missing_ok=True)
        first = chunk = await fetch.take()
        with staged.open("wb") as file:  # once: what is still being written when this is given up goes with the file
            while chunk is not None and first is not None:
                same_file = (chunk.sha256, chunk.total_bytes) == (first.sha256, first.total_bytes)
                if not same_file or not _fits(chunk, num_bytes):
                    raise FetchFailed("adapter_corrupt", "the adapter's chunks don't fit together")
                num_bytes += len(chunk.data)
                await self._off_loop(_take_in, chunk.data, digest, file)
                if num_bytes == first.total_bytes:
                    break
                chunk = await fetch.take()
        if chunk is None:
            return ""
        if digest.hexdigest() != chunk.sha256:
            raise FetchFailed("adapter_corrupt", "the adapter's bytes don't have the hash they should")
        return chunk.sha256

    async def _off_loop(self, call, *args):
        return await asyncio.get_running_loop().run_in_executor(self._executor, call, *args)


def _fits(chunk: wire.AdapterChunk, offset: int) -> bool:
    end = chunk.offset + len(chunk.data)
    return chunk.offset == offset and len(chunk.data) > 0 and end <= chunk.total_bytes <= MAX_ADAPTER_BYTES


def _take_in(data: bytes, digest, file: BinaryIO) -> None:
    digest.update(data)
    file.write(data)
