"""How long somebody is waited for: by looks at the loop, not by the clock alone.

Whoever got no processor for a second finds, when it goes on, that a second has passed and that the answer has been
there all along. So a deadline is cut into LOOKS parts, each of which begins when the one before was seen to end: a
process that stood still has waited for one part, and reads what has come before it gives anybody up.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

LOOKS = 5  # within a deadline


class Patience:
    """Calls ``on_end`` once, after ``deadline_s`` in which this loop ran, unless it is ended before."""

    def __init__(self, deadline_s: float, on_end: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._part_s = deadline_s / LOOKS
        self._on_end = on_end
        self._num_left = LOOKS
        self._timer = self._loop.call_later(self._part_s, self._look)

    def end(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        self._num_left -= 1
        if self._num_left:
            self._timer = self._loop.call_later(self._part_s, self._look)
        else:
            self._on_end()


@contextlib.asynccontextmanager
async def patience(deadline_s: float) -> AsyncIterator[None]:
    """As asyncio.timeout: raises TimeoutError when the block is not done by then."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as timeout:
        waiting = Patience(deadline_s, lambda: timeout.reschedule(loop.time()))
        try:
            yield
        finally:
            waiting.end()
