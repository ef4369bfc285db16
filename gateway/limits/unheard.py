"""What the limiter's store has not heard while it was away, in the order in which it was to hear it."""

from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

MAX_UNHEARD = 4096
Settlement: TypeAlias = Callable[[], Awaitable[Any]]


class Unheard:
    """At most MAX_UNHEARD; beyond that the oldest is forgotten, and ``num_forgotten`` says so: its tokens stay taken
    until they have refilled, and its money until the window is counted anew."""

    def __init__(self) -> None:
        self._waiting: deque[Settlement] = deque()
        self.num_forgotten = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, settlement: Settlement) -> None:
        self._waiting.append(settlement)
        if len(self._waiting) > MAX_UNHEARD:
            self._waiting.popleft()
            self.num_forgotten += 1

    async def tell(self) -> None:
        """All of it, each once. Raises what a settlement raises, which then stays the oldest. While one is on its way
        it stands in no queue, so that what is put meanwhile can't push another one out in its place."""
        while self._waiting:
            settlement = self._waiting.popleft()
            try:
                await settlement()
            except BaseException:
                self._put_back(settlement)
                raise

    def _put_back(self, settlement: Settlement) -> None:
        if len(self._waiting) < MAX_UNHEARD:
            self._waiting.appendleft(settlement)
        else:
            self.num_forgotten += 1
