"""Reads the meters of adapters: who lies on which device, every few seconds, and the hours that are over.

Every gateway runs it; the row that they lock lets one of them look at a time, and books an hour once.
"""

import asyncio
import logging
import time
from collections import Counter
from dataclasses import dataclass

from sqlmodel import col, select

from engine.client import EngineClient, EngineLost
from gateway.models import Catalog
from gateway.targets import Targets
from tenants.adapters.hours import LOOK_NS, AdapterHours
from tenants.database import Database
from tenants.tables import AdapterVersion

_log = logging.getLogger("gateway.adapters")


@dataclass(frozen=True, slots=True)
class AdapterMeter:
    catalog: Catalog
    targets: Targets
    database: Database

    async def keep_reading(self) -> None:
        """Until it is cancelled. A reading that fails is logged; the next one comes."""
        while True:
            try:
                await self.read(time.time_ns())
            except Exception as error:
                _log.warning("the meters of adapters could not be read: %s", type(error).__name__)
            await asyncio.sleep(LOOK_NS / 1e9)

    async def read(self, now_unix_ns: int) -> None:
        async with self.database.transaction() as session:
            hours = AdapterHours(session)
            since_ns = await hours.look(now_unix_ns)
            await hours.book(now_unix_ns)
        if since_ns and (replicas := await self._resident()):
            async with self.database.transaction() as session:
                await AdapterHours(session).add_residency(replicas, now_unix_ns, since_ns)

    async def _resident(self) -> Counter[str]:
        """Adapter version → how many replicas have it on their device."""
        engines: list[EngineClient] = []
        self.catalog.each_engine(engines.append)
        keys: Counter[str] = Counter()
        for answer in await asyncio.gather(*(engine.residency() for engine in engines), return_exceptions=True):
            if isinstance(answer, dict):
                keys.update(key for key, tiers in answer.items() if "device" in tiers)
            elif not isinstance(answer, EngineLost):
                raise answer
        return await self._versions(keys) if keys else keys

    async def _versions(self, keys: Counter[str]) -> Counter[str]:
        """Bytes that several versions of a tenant share are the oldest one's."""
        columns = AdapterVersion.adapter_version_id, AdapterVersion.tenant_id, AdapterVersion.sha256
        live = select(*columns).where(col(AdapterVersion.deleted_unix_ns).is_(None))
        async with self.database.session() as session:
            rows = (await session.exec(live.order_by(col(AdapterVersion.created_unix_ns).desc()))).all()
        owners = {self.targets.key_of(tenant_id, sha256): version for version, tenant_id, sha256 in rows}
        return Counter({owners[key]: num for key, num in keys.items() if key in owners})
