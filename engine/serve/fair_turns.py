"""Turns at something that few may use at a time: of those who wait flow after flow goes, however much each wants."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class FairTurns:
    """At most ``at_once`` are inside. A flow that has a hundred waiting gets every second turn when one other waits."""

    def __init__(self, at_once: int) -> None:
        self._free = at_once
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # the next flow first

    @asynccontextmanager
    async def turn(self, flow: str) -> AsyncIterator[None]:
        await self._enter(flow)
        try:
            yield
        finally:
            self._leave()

    async def _enter(self, flow: str) -> None:
        if self._free:
            self._free -= 1
            return
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(flow, deque()).append(mine)
        try:
            await mine
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled():  # the turn came together with the cancellation
                self._leave()
            raise

    def _leave(self) -> None:
        """The next one is in at once, so that nobody comes in between."""
        while self._waiting:
            flow, queue = self._waiting.popitem(last=False)
            heir = queue.popleft()
            if queue:
                self._waiting[flow] = queue
            if not heir.done():
                heir.set_result(None)
                return
        self._free += 1
