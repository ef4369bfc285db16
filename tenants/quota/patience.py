"""A deadline for who answers, and not for ourselves."""

import asyncio
from types import TracebackType

_PARTS = 4


class Patience:
    """As ``asyncio.timeout``: TimeoutError after ``deadline_s``. But however long our own loop stands still (a large
    body, a busy machine), that counts as a quarter of it at most, and what came meanwhile is read first."""

    __slots__ = ("_left", "_part_s", "_timeout", "_timer")

    def __init__(self, deadline_s: float) -> None:
        self._part_s, self._left = deadline_s / _PARTS, _PARTS

    async def __aenter__(self) -> None:
        self._timeout = await asyncio.timeout(None).__aenter__()
        self._wait()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        self._timer.cancel()
        return await self._timeout.__aexit__(kind, error, trace)

    def _wait(self) -> None:
        self._left -= 1
        self._timer = asyncio.get_running_loop().call_later(self._part_s, self._wait if self._left else self._end)

    def _end(self) -> None:
        self._timeout.reschedule(asyncio.get_running_loop().time())
