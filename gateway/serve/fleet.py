"""What runs here: gateways and engines, whether they are ready, what they serve, and what they count together."""

import asyncio
import contextlib
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from engine.client import EngineClient, EngineLost
from engine.wire import Welcome
from gateway.launchers import EngineHandle, EngineSpec
from gateway.serve import scrape
from gateway.serve.children import Child, ChildFailed
from gateway.settings import Settings
from gateway.views.kv import kv_body

PULL_SECONDS = 1.0
WELCOME_TIMEOUT_S = 30.0
MAX_LISTED_ADAPTERS = 1000
SHORT_KEY = 12  # digits of an adapter's key, as in the metrics


@dataclass(slots=True)
class Replica:
    """An engine as its launcher and our own observer's connection know it."""

    spec: EngineSpec
    handle: EngineHandle
    client: EngineClient

    @property
    def is_ready(self) -> bool:
        return self.handle.is_ready and self.client.connected

    async def ready(self) -> Welcome:
        """Waits until it serves. Raises children.ChildFailed."""
        await self.handle.ready()
        try:
            return await self.client.ready(WELCOME_TIMEOUT_S)
        except EngineLost as error:
            raise ChildFailed(str(error)) from error


@dataclass(slots=True)
class Fleet:
    """All children that serve requests, and the sum of their metrics."""

    settings: Settings
    gateways: list[Child] = field(default_factory=list)
    replicas: list[Replica] = field(default_factory=list)
    registry: scrape.SummedRegistry = field(default_factory=scrape.SummedRegistry)
    draining: bool = False
    _pulling: asyncio.Lock = field(default_factory=asyncio.Lock)

    def why_not_ready(self) -> list[str]:
        """Empty when requests are accepted: one engine of each model and every gateway are ready."""
        reasons = ["draining"] if self.draining else []
        reasons += [f"{gateway.name} is not ready" for gateway in self.gateways if not gateway.is_ready]
        served = {replica.spec.model for replica in self.replicas if replica.is_ready}
        missing = {replica.spec.model for replica in self.replicas} - served
        reasons += [f"no engine serves {model}" for model in sorted(missing)]
        if not self.gateways:
            reasons.append("no gateway")
        if not self.replicas:
            reasons.append("no engine")
        return reasons

    async def engines(self) -> list[dict[str, Any]]:
        """Every replica: who it is, whether it serves, its load as last pulled, which adapters lie where, its card."""
        return await asyncio.gather(*map(self._describe, self.replicas))

    async def kv(self, engine_id: str) -> dict[str, Any] | None:
        """That engine's KV memory now; None for one that is not here. Raises EngineLost while it does not answer."""
        for replica in self.replicas:
            if replica.spec.engine_id == engine_id:
                report = await replica.client.report()
                welcome = await replica.client.ready(WELCOME_TIMEOUT_S)
                return kv_body(engine_id, welcome.card, report)
        return None

    async def _describe(self, replica: Replica) -> dict[str, Any]:
        engine, welcome = replica.spec.engine_id, replica.client.welcome
        gauge = self.registry.gauges_of(engine)
        return {
            "id": engine,
            "object": "engine",
            "model": replica.spec.model,
            "connected": replica.is_ready,
            "starts": replica.handle.incarnation,
            "pid": replica.handle.pid,
            "load": {
                "running": int(gauge.get("vllm:num_requests_running", 0)),
                "waiting": int(gauge.get("vllm:num_requests_waiting", 0)),
            },
            "residency": await _residency(replica),
            "card": msgspec.to_builtins(welcome.card) if welcome else None,
        }

    def models(self) -> list[dict[str, Any]]:
        """Every served base model and how many of its engines are ready."""
        models: dict[str, dict[str, Any]] = {}
        for replica in self.replicas:
            fresh = {"id": replica.spec.model, "object": "model", "revision": None, "engines": 0, "engines_ready": 0}
            model = models.setdefault(replica.spec.model, fresh)
            model["engines"] += 1
            model["engines_ready"] += replica.is_ready
            if replica.client.welcome:
                model["revision"] = replica.client.welcome.card.revision
        return list(models.values())

    def forget_adapter(self, key: str) -> None:
        """Every engine drops it from all its tiers as soon as nothing runs on it."""
        for replica in self.replicas:
            replica.client.forget_adapter(key)

    async def pull(self) -> None:
        """Brings the sums up to date with every child that answers within a second."""
        async with self._pulling:
            await _all([*map(self._pull_gateway, range(len(self.gateways))), *map(self._pull_engine, self.replicas)])

    async def keep_pulling(self) -> None:
        """Pulls each second, so that little is lost with a child that is killed."""
        while True:
            await asyncio.sleep(PULL_SECONDS)
            await self.pull()

    async def _pull_gateway(self, index: int) -> None:
        gateway = self.gateways[index]
        incarnation = gateway.incarnation
        with contextlib.suppress(scrape.ScrapeError):
            snapshot = await scrape.pull(self.settings.scrape_path(index))
            if snapshot.pid == gateway.pid and gateway.incarnation == incarnation:
                self.registry.update(gateway.name, incarnation, snapshot.families)

    async def _pull_engine(self, replica: Replica) -> None:
        incarnation = replica.handle.incarnation
        with contextlib.suppress(EngineLost):
            families = await replica.client.stats()
            if replica.handle.incarnation == incarnation:
                self.registry.update(replica.spec.engine_id, incarnation, families, model=replica.spec.model)


async def _residency(replica: Replica) -> list[dict[str, Any]] | None:
    """The adapters that any tier holds, by the first digits of their keys; None while the engine does not answer."""
    try:
        tiers = await replica.client.residency()
    except EngineLost:
        return None
    return [{"adapter": key[:SHORT_KEY], "tiers": found} for key, found in sorted(tiers.items())][:MAX_LISTED_ADAPTERS]


async def _all(work: Iterable[Awaitable[None]]) -> None:
    await asyncio.gather(*work)
