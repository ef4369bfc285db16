"""The limits of a gateway, with all that keeps those of money true: built, started and closed together."""

import hashlib
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from redis.asyncio import Redis

from engine.client import EngineClient
from gateway.limits.bookings import Bookings
from gateway.limits.credit import Credit
from gateway.limits.limiter import Limiter
from gateway.limits.recount import Recount
from gateway.limits.tickets import Tickets
from gateway.settings import Settings
from tenants.database import Database
from tenants.directory import Directory
from tenants.quota.local_share import LocalShare
from tenants.quota.quota import Quota


@dataclass(frozen=True, slots=True)
class Spending:
    """``limiter`` and ``credit`` are asked before the work, ``bookings`` hears of each record, ``recount`` knows what
    ``tickets`` hold."""

    limiter: Limiter
    credit: Credit
    bookings: Bookings
    recount: Recount
    tickets: Tickets

    async def start(self) -> None:
        for part in (self.recount, self.limiter, self.credit):
            await part.start()

    async def close(self) -> None:
        for part in (self.credit, self.limiter, self.recount):
            await part.close()
        self.limiter.quota.close()


def build_spending(
    settings: Settings,
    index: int,
    redis: Redis,
    database: Database,
    directory: Directory,
    engines: Callable[[], Iterable[EngineClient]],
    count_fallback: Callable[[str, str], None],
) -> Spending:
    """Of the gateway with that number; nothing is started."""
    quota, tickets = Quota(redis, settings.store_deadline_s), Tickets()
    recount = Recount(_name(settings, index), quota, redis, database, directory, engines, tickets)
    share = LocalShare(settings.serve.gateways, lambda: time.monotonic_ns() // 1_000_000)
    limiter = Limiter(quota, share, recount, count_fallback)
    return Spending(limiter, Credit(database, recount), Bookings(limiter, directory), recount, tickets)


def _name(settings: Settings, index: int) -> str:
    """Of this place in this installation: one process at a time, since a home is locked while it is served."""
    home = hashlib.sha256(str(settings.home).encode()).hexdigest()[:16]
    return f"{socket.gethostname()[:64]}:{home}:{index}"
