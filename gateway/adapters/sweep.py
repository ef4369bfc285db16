"""Looks after what crashes and broken connections left of adapters: staged files, blobs without a row, weights that an
engine was not there to be told to forget. Every gateway does it, at its start and each SWEEP_S; twice is harmless."""

import asyncio
import logging
from collections import defaultdict
from dataclasses import dataclass

from engine.client import EngineClient, EngineLost
from gateway.adapters.adapters import Adapters
from tenants.adapters.repository import AdapterRepository
from tenants.adapters.staged import StagedUploads

SWEEP_S = 300.0
STALE_S = 3600.0  # longer than any upload takes from its last byte to its row
_log = logging.getLogger("gateway.adapters")


@dataclass(frozen=True, slots=True)
class AdapterSweep:
    adapters: Adapters
    uploads: StagedUploads

    async def keep_sweeping(self) -> None:
        """Until it is cancelled. A sweep that fails is logged; the next one comes."""
        while True:
            try:
                await self.sweep()
            except Exception as error:
                _log.warning("the sweep of adapters failed: %s", type(error).__name__)
            await asyncio.sleep(SWEEP_S)

    async def sweep(self, stale_s: float = STALE_S) -> None:
        """What is there is listed before what is in use: who comes in between is in use."""
        await asyncio.to_thread(self.adapters.blobs.sweep, stale_s)
        await asyncio.to_thread(self.uploads.sweep)
        blobs = await asyncio.to_thread(self.adapters.blobs.older_than, stale_s)
        resident = await self._resident()
        if not blobs and not resident:
            return
        async with self.adapters.database.session() as session:
            in_use = await AdapterRepository(session).all_in_use()
        await self._collect(set(blobs) - in_use)
        for key in resident - await asyncio.to_thread(self._keys, in_use):
            self.adapters.forget(key)

    async def _collect(self, orphans: set[tuple[str, str]]) -> None:
        by_tenant: dict[str, list[str]] = defaultdict(list)
        for tenant_id, sha256 in orphans:
            by_tenant[tenant_id].append(sha256)
        for tenant_id, hashes in by_tenant.items():
            await self.adapters.collect(tenant_id, hashes)

    async def _resident(self) -> set[str]:
        """The keys that any tier of any engine has."""
        engines: list[EngineClient] = []
        self.adapters.catalog.each_engine(engines.append)
        found: set[str] = set()
        for answer in await asyncio.gather(*(engine.residency() for engine in engines), return_exceptions=True):
            if isinstance(answer, dict):
                found |= answer.keys()
            elif not isinstance(answer, EngineLost):
                raise answer
        return found

    def _keys(self, in_use: set[tuple[str, str]]) -> set[str]:
        return {self.adapters.targets.key_of(tenant_id, sha256) for tenant_id, sha256 in in_use}
