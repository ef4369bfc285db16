"""Brings events to webhook endpoints: numbers what was emitted, claims what is due, posts it, notes what came of it.

Every gateway has one; claims in the database keep two of them from one delivery at a time. Nothing else waits for it:
what it does not come to now it finds later, and so does another gateway if this one dies.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from gateway.webhooks.message import body_of, signed_headers
from gateway.webhooks.poster import Poster
from tenants.database import Database
from tenants.deliveries import Busy, Claimed, DeliveryRepository
from tenants.secrets import Secrets
from tenants.webhooks import signing_secrets

POLL_S = 1.0
PURGE_EVERY_S = 300.0
LAST_POSTS_S = 2.0  # at the end; what isn't done by then is tried again when its claim is over
MAX_AT_ONCE = 64
MAX_OF_A_TENANT = 4
MAX_OF_AN_ENDPOINT = 2
_RESULTS = {"delivered": "delivered", "pending": "retried", "failed": "failed", "": "superseded"}
_log = logging.getLogger("gateway.webhooks")


@dataclass(slots=True)
class Courier:
    """``count`` hears the result of every attempt; ``show_pending``, where there is one, how many deliveries wait."""

    database: Database
    secrets: Secrets
    poster: Poster
    count: Callable[[str], None]
    show_pending: Callable[[int], None] | None = None
    now_ns: Callable[[], int] = time.time_ns
    _posts: set[asyncio.Task[None]] = field(default_factory=set)
    _endpoints: Counter[str] = field(default_factory=Counter)
    _tenants: Counter[str] = field(default_factory=Counter)
    _freed: asyncio.Event = field(default_factory=asyncio.Event)
    _worker: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._worker = asyncio.create_task(self._work(), name="webhooks")

    async def close(self) -> None:
        """Nothing more is claimed; what is on its way may still arrive."""
        if self._worker is not None:
            self._worker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._worker
        if self._posts:
            _, late = await asyncio.wait(self._posts, timeout=LAST_POSTS_S)
            for post in late:
                post.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    async def round(self) -> None:
        """Sets off all that is due and may set off now."""
        async with self.database.session() as session:
            untold, due, num_pending = await DeliveryRepository(session).look(self.now_ns(), self._busy())
        if self.show_pending is not None:
            self.show_pending(num_pending)
        if untold:
            async with self.database.transaction() as session:
                due = await DeliveryRepository(session).tell(self.now_ns()) > 0 or due
        while due and len(self._posts) < MAX_AT_ONCE:
            due = await self._set_off()

    async def idle(self) -> None:
        """When nothing is on its way."""
        while self._posts:
            await asyncio.wait(self._posts)

    async def _work(self) -> None:
        failed, purged_s = False, time.monotonic()
        while True:
            self._freed.clear()
            try:
                await self.round()
                if time.monotonic() - purged_s > PURGE_EVERY_S:
                    purged_s = time.monotonic()
                    await self._tidy()
                failed = False
            except Exception as error:
                if not failed:
                    _log.warning("webhooks stand still: %s", type(error).__name__)
                failed = True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._freed.wait()

    async def _set_off(self) -> bool:
        """Whether there was anything to claim."""
        async with self.database.transaction() as session:
            room = MAX_AT_ONCE - len(self._posts)
            claims = await DeliveryRepository(session).claim(self.now_ns(), room, self._busy())
        for claimed in claims:
            self._endpoints[claimed.endpoint.endpoint_id] += 1
            self._tenants[claimed.endpoint.tenant_id] += 1
            post = asyncio.create_task(self._post(claimed), name=f"webhook {claimed.event.event_id}")
            self._posts.add(post)
            post.add_done_callback(self._posts.discard)
        return bool(claims)

    async def _post(self, claimed: Claimed) -> None:
        event, endpoint = claimed.event, claimed.endpoint
        try:
            body, now_ns = body_of(event), self.now_ns()
            headers = signed_headers(event.event_id, body, signing_secrets(self.secrets, endpoint, now_ns), now_ns)
            attempt = await self.poster.post(endpoint.tenant_id, endpoint.url, headers, body)
            async with self.database.transaction() as session:
                state = await DeliveryRepository(session).settle(claimed, attempt, self.now_ns())
            self.count(_RESULTS[state])
        except Exception as error:  # the claim runs out, and it is tried again
            _log.error("webhook %s to %s: %s", event.event_id, endpoint.endpoint_id, type(error).__name__)
        finally:
            self._endpoints -= Counter([endpoint.endpoint_id])  # which forgets who has none
            self._tenants -= Counter([endpoint.tenant_id])
            self._freed.set()

    def _busy(self) -> Busy:
        return Busy(
            [each for each, posts in self._endpoints.items() if posts >= MAX_OF_AN_ENDPOINT],
            [each for each, posts in self._tenants.items() if posts >= MAX_OF_A_TENANT],
        )

    async def _tidy(self) -> None:
        async with self.database.transaction() as session:
            await DeliveryRepository(session).purge(self.now_ns())
