"""The gateway's side of adapters: the files that its engine asks for, in chunks, a few at a time."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple, TypeAlias

from engine import wire
from engine.client.stream import Connection, EngineLost

logger = logging.getLogger("engine.client")

MAX_ADAPTERS_SENT_AT_ONCE = 2


class AdapterFile(NamedTuple):
    """A canonical adapter file on the gateway's disk; ``sha256`` in hex is that of the whole file."""

    path: Path
    sha256: str
    size_bytes: int


AdapterSource: TypeAlias = Callable[[str], Awaitable[AdapterFile | None]]


class AdapterSupply:
    """``source`` finds an adapter's file by its key, or None when it is deleted. Without one nothing can be given."""

    def __init__(self, source: AdapterSource | None) -> None:
        self._source = source
        self._sending = asyncio.Semaphore(MAX_ADAPTERS_SENT_AT_ONCE)
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def wanted(self, connection: Connection, key: str) -> None:
        """Answers an AdapterWanted beside all else, once at a time for a key: its chunks come in order."""
        if key not in self._tasks:
            task = self._tasks[key] = asyncio.create_task(self._give(connection, key), name=f"adapter {key[:12]}")
            task.add_done_callback(lambda done: self._tasks.pop(key, None) if self._tasks.get(key) is done else None)

    def drop(self) -> list[asyncio.Task[None]]:
        """The connection is gone, and what was being given on it: the next one may want the same. They end soon."""
        tasks, self._tasks = list(self._tasks.values()), {}
        for task in tasks:
            task.cancel()
        return tasks

    async def _give(self, connection: Connection, key: str) -> None:
        """The file in chunks, or why not."""
        try:
            async with self._sending:
                file = None if self._source is None else await self._source(key)
                if file is None:
                    raise _CannotGive("adapter_unavailable", "the adapter was deleted")
                await _send_adapter(connection, key, file)
        except EngineLost:
            return
        except _CannotGive as refusal:
            logger.warning("adapter %.12s can't be given: %s", key, refusal)
            connection.send(wire.AdapterUnavailable(key, refusal.code, str(refusal)))
        except Exception as error:
            logger.error("adapter %.12s can't be given: %s", key, type(error).__name__)
            connection.send(wire.AdapterUnavailable(key, "adapter_delayed", "the adapter's store does not answer"))


class _CannotGive(Exception):
    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


async def _send_adapter(connection: Connection, key: str, file: AdapterFile) -> None:
    """The file in chunks, each sent when the engine has taken most of what came before. Raises OSError, _CannotGive."""
    try:
        source = await asyncio.to_thread(file.path.open, "rb")
    except FileNotFoundError:
        raise _CannotGive("adapter_corrupt", "the adapter's file is gone: upload it again") from None
    with source:
        for offset in range(0, file.size_bytes, wire.ADAPTER_CHUNK_BYTES):
            num_bytes = min(wire.ADAPTER_CHUNK_BYTES, file.size_bytes - offset)
            data = await asyncio.to_thread(source.read, num_bytes)
            if len(data) != num_bytes:
                raise _CannotGive("adapter_corrupt", "the adapter's file is damaged: upload it again")
            await connection.writable()
            connection.send(wire.AdapterChunk(key, offset, file.size_bytes, file.sha256, data))
