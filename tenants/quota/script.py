"""A Lua script in the store, called often: no call waits for another one's answer."""

import asyncio
import hashlib
from collections.abc import Sequence
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from tenants.patience import patience
from tenants.quota.line import Answer, Call, Line, connected, unavailable


class Script:
    """``text`` in the store that ``redis`` leads to. All calls of a process share a connection; it is made at the first
    call, and at the next one after it broke."""

    def __init__(self, redis: Redis, text: str, deadline_s: float) -> None:
        self._redis = redis
        self._text = text
        self._name = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
        self._deadline_s = deadline_s
        self._line: Line | None = None
        self._connecting = asyncio.Lock()

    def __call__(self, keys: Sequence[str], arguments: Sequence[str | int]) -> Answer:
        """What the script returns. It is called whether or not anybody awaits the answer, in the order of these calls
        as long as the connection holds. The answer raises StoreUnavailable after ``deadline_s``."""
        call = (len(keys), *keys, *arguments)
        if self._line is None or self._line.is_closed:
            return asyncio.ensure_future(self._ask_anew(call))
        return self._ask(self._line, call)

    def close(self) -> None:
        """Ends the connection. Who still waits for an answer is told that there is none."""
        if self._line is not None:
            self._line.close()

    async def _ask_anew(self, call: Call) -> Any:
        try:
            async with patience(self._deadline_s):
                return await self._ask(await self._connected(), call)
        except (RedisError, OSError, TimeoutError) as error:
            raise unavailable(error) from error

    def _ask(self, line: Line, call: Call) -> Answer:
        return line.ask(("EVALSHA", self._name, *call), ("EVAL", self._text, *call))

    async def _connected(self) -> Line:
        async with self._connecting:
            if self._line is None or self._line.is_closed:
                self._line = await connected(self._redis, self._deadline_s)
            return self._line
