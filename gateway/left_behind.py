"""Usage records in journals whose engine is not served any more: its model has another name now, or it was left out."""

import asyncio
import contextlib
import fcntl
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from engine.wire.journal import JournalCorrupt, JournalReader

_log = logging.getLogger("gateway.left_behind")


class LeftBehind:
    """At each start hands such records to the ledger, which ignores those that it has: so nothing is noted here. To be
    started when the served engines are up and hold their folders."""

    def __init__(self, engines: Path, take: Callable[[bytes], Awaitable[None]]) -> None:
        self._engines = engines
        self._take = take
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self.deliver(), name="left behind")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def deliver(self) -> None:
        for folder in sorted(self._engines.glob("*/")):
            try:
                records = await asyncio.to_thread(_unacknowledged, folder)
            except (JournalCorrupt, OSError) as error:
                _log.error("records of %s, which is not served any more, can't be read: %s", folder.name, error)
                continue
            for payload in records:
                await self._take(payload)
            if records:
                _log.warning("%d records of %s, which is not served any more, are booked", len(records), folder.name)


def _unacknowledged(folder: Path) -> list[bytes]:
    return [] if _is_served(folder) else [entry.payload for entry in JournalReader(folder).unacknowledged()]


def _is_served(folder: Path) -> bool:
    """An engine holds its folder's lock as long as it lives."""
    with contextlib.suppress(FileNotFoundError), (folder / "lock").open("r") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
