"""Tells a tenant, once, of each adapter version whose bytes an engine found damaged or gone."""

import asyncio
import logging
from dataclasses import dataclass, field

from tenants.database import Database
from tenants.events import emit
from tenants.tables import AdapterVersion

MAX_REMEMBERED = 10_000  # the table has each version once in any case: this only spares it being asked
_log = logging.getLogger("gateway.adapters")


@dataclass(slots=True)
class CorruptAdapters:
    database: Database
    _reported: set[str] = field(default_factory=set)
    _telling: set[asyncio.Task[None]] = field(default_factory=set)

    def report(self, version: AdapterVersion) -> None:
        """Without waiting: a request that met the damage is being refused meanwhile."""
        if version.adapter_version_id in self._reported:
            return
        if len(self._reported) == MAX_REMEMBERED:
            self._reported.clear()
        self._reported.add(version.adapter_version_id)
        telling = asyncio.create_task(self._tell(version), name=f"corrupt {version.adapter_version_id}")
        self._telling.add(telling)
        telling.add_done_callback(self._telling.discard)

    async def close(self) -> None:
        await asyncio.gather(*self._telling)

    async def _tell(self, version: AdapterVersion) -> None:
        named = {"id": version.adapter_version_id, "name": version.name, "version": version.version}
        try:
            async with self.database.transaction() as session:
                await emit(session, version.tenant_id, "adapter.corrupt", named, once=version.adapter_version_id)
        except Exception as error:  # the next request that meets it reports it again
            self._reported.discard(version.adapter_version_id)
            _log.error("an event of a corrupt adapter is not written: %s", type(error).__name__)
