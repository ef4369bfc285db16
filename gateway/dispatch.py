"""Which engine runs a request, and what the engine is told of it."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from engine import wire
from engine.client import EngineClient
from gateway.admission import Admission
from gateway.call import Call
from gateway.errors import ApiError
from gateway.flight import Flight
from gateway.limits.tickets import Ticket
from gateway.work import Work
from tenants.meter import RequestContext, seal
from tenants.secrets import Secrets
from tenants.tables import AdapterVersion

RECONNECT_S = 5.0  # how long a request that no engine has begun waits for one
AFFINITY_SLACK = 8  # requests by which the engine that knows an adapter may be busier than another
_MAX_AFFINITIES = 65_536

PostLost = Callable[[wire.UsageRecord], None]


class CallerLeft(Exception):
    """The caller was gone before anything was sent to an engine."""


@dataclass(slots=True)
class Dispatch:
    """Picks engines. ``post_lost`` records what a dead engine can't; ``holds`` says whether a key is still valid,
    ``count_fallback`` hears of a request that goes to a second engine, ``on_corrupt`` of an adapter whose bytes an
    engine found damaged."""

    admission: Admission
    secrets: Secrets
    post_lost: PostLost
    holds: Callable[[str], bool]
    count_fallback: Callable[[str, str], None] = lambda kind, reason: None
    on_corrupt: Callable[[AdapterVersion], None] = lambda version: None
    _flights: set[Flight] = field(default_factory=set)
    _favourites: OrderedDict[str, EngineClient] = field(default_factory=OrderedDict)

    def open(self, call: Call, work: Work, ticket: Ticket) -> Flight:
        """To be entered: it is submitted then, and at the end closed at its engine, also when the end is a
        cancellation. Raises, on the way in, ApiError 503 when no engine is there, CallerLeft."""
        return Flight(self, call, work, ticket)

    async def begin(self, flight: Flight) -> None:
        self._flights.add(flight)
        if not self.holds(flight.work.principal.key_id):  # revoked while its body came
            flight.revoke()
        try:
            await flight.launch()
        except BaseException:
            self.end(flight)
            raise

    def end(self, flight: Flight) -> None:
        self._flights.discard(flight)
        flight.land()

    def interrupt_all(self) -> None:
        """The time to drain is over: what still runs ends with an error event."""
        for flight in list(self._flights):
            flight.interrupt(ApiError("This server is shutting down.", code="draining"))

    def revoke(self, key_ids: frozenset[str]) -> None:
        """These keys are not valid any more: what they run ends at its next step with an error event."""
        for flight in list(self._flights):
            if flight.work.principal.key_id in key_ids:
                flight.revoke()

    def context(self, call: Call, work: Work, ticket: Ticket, attempt: int) -> bytes:
        """What the engine carries for the ledger, sealed."""
        principal = work.principal
        context = RequestContext(
            tenant_id=principal.tenant_id,
            key_id=principal.key_id,
            request_id=call.request_id,
            attempt=attempt,
            base_model=work.target.model.name,
            model=work.target.name,
            adapter_version_id=work.target.adapter_version_id,
            flow_class=work.flow_class,
            rate_card_id=ticket.card.rate_card_id,
            admitted_unix_ns=ticket.admitted_unix_ns,
            trace_id=call.trace_id,
            operation=work.operation,
            label=call.label,
            streamed=work.style.stream,
            num_choices=work.total_choices,
        )
        return seal(context, self.secrets.context_key)

    def submission(self, call: Call, work: Work, ticket: Ticket, attempt: int) -> wire.Submit:
        principal, target = work.principal, work.target
        salt = f"only {call.request_id}" if principal.cache_policy == "off" else work.cache_salt
        return wire.Submit(
            request_id=f"{call.request_id}:{attempt}",
            prompts=[wire.pack_ids(prompt) for prompt in work.prompts],
            sampling=work.sampling,
            flow=wire.Flow(self.secrets.flow_key(principal.tenant_id), principal.weight, work.flow_class),
            cache_namespace=self.secrets.cache_namespace(
                principal.tenant_id, target.adapter_sha256, work.text.card.revision, salt
            ),
            granted_tokens=ticket.granted_tokens,
            num_choices=work.num_choices,
            adapter_key=target.adapter_key,
            context=self.context(call, work, ticket, attempt),
        )

    async def engine(self, call: Call, work: Work, avoid: EngineClient | None) -> EngineClient:
        """The least busy connected engine, or the one that ran this adapter last; waits up to RECONNECT_S."""
        connected = await self._connected(call, work, avoid)
        least = min(connected, key=lambda engine: engine.load)
        key = work.target.adapter_key
        favourite = self._favourites.get(key)
        chosen = favourite if favourite in connected and favourite.load <= least.load + AFFINITY_SLACK else least
        if key:
            self._favourites[key] = chosen
            self._favourites.move_to_end(key)
            if len(self._favourites) > _MAX_AFFINITIES:
                self._favourites.popitem(last=False)
        return chosen

    async def _connected(self, call: Call, work: Work, avoid: EngineClient | None) -> list[EngineClient]:
        model = work.target.model
        connected = model.connected()
        if not connected:
            await _first_of([call.gone.wait(), *(engine.ready(RECONNECT_S) for engine in model.engines)])
            connected = model.connected()
        if call.gone.is_set():
            raise CallerLeft
        if not connected:
            raise ApiError(f"No engine serves `{model.name}` at the moment.", code="overloaded")
        return [engine for engine in connected if engine is not avoid] or connected


async def _first_of(waits: list) -> None:
    """Returns when the first of the coroutines has ended, however it did; the others are cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
