"""Has burn alerts looked at once a minute. Every gateway does it; of all of them one is heard."""

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass

from tenants.database import Database
from tenants.slo.watch import look

EVERY_S = 60
_AFTER_S = 2.0  # a minute has begun
_log = logging.getLogger("gateway.slo")


@dataclass(slots=True)
class SloWatcher:
    database: Database
    _worker: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._worker = asyncio.create_task(self._keep_looking(), name="burn alerts")

    async def close(self) -> None:
        if self._worker is not None:
            self._worker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._worker

    async def _keep_looking(self) -> None:
        """A look that fails is logged; the next minute's comes."""
        while True:
            await asyncio.sleep(EVERY_S - time.time() % EVERY_S + _AFTER_S)
            try:
                changed = await look(self.database, int(time.time()))
            except Exception as error:
                _log.warning("burn alerts were not looked at: %s", type(error).__name__)
            else:
                if changed:
                    _log.warning("%d incidents of burn rates opened or closed", changed)
