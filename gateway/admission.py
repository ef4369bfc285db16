"""May this request run now: what it may use is reserved before it starts and settled when it has ended."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import anyio

from gateway.call import Call
from gateway.errors import ApiError
from gateway.limiter import Limiter
from gateway.work import Work
from tenants.errors import StoreUnavailable
from tenants.quota import RENEW_EVERY_MS, Headroom, Limits, Refused, Reservation, SettleKind

EXTEND_TOKENS = 256  # a block of further output tokens of each choice


@dataclass(slots=True)
class Ticket:
    """An admitted request's reservation. Whoever runs the request says in ``used_tokens`` and ``kind`` what it
    took; until then it counts as never dispatched. ``granted_tokens`` is per choice."""

    reservation: Reservation
    granted_tokens: int
    used_tokens: int = 0
    kind: SettleKind = "void"
    refused_extension: bool = False


@dataclass(slots=True)
class Admission:
    """The limits' side of the request path. ``closed`` refuses new requests: this process is draining."""

    limiter: Limiter
    closed: bool = False
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    _tickets: dict[str, Ticket] = field(default_factory=dict)
    _renewing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begins to renew the leases of what runs."""
        self.idle.set()
        self._renewing = asyncio.create_task(self._renew(), name="lease renewal")

    async def close(self) -> None:
        if self._renewing is not None:
            self._renewing.cancel()

    @contextlib.asynccontextmanager
    async def admit(self, call: Call, work: Work) -> AsyncIterator[Ticket]:
        """Reserves, and settles at the end, also when the end is a cancellation. Raises ApiError 429 and 503."""
        if self.closed:
            raise ApiError("This server is shutting down.", code="draining")
        ticket = await self._reserve(call, work)
        self._tickets[call.request_id] = ticket
        self.idle.clear()
        try:
            if self.closed:  # since it asked
                raise ApiError("This server is shutting down.", code="draining")
            yield ticket
        finally:
            try:
                with anyio.CancelScope(shield=True):
                    await self.limiter.settle(ticket.reservation, ticket.used_tokens, ticket.kind)
            finally:
                del self._tickets[call.request_id]
                if not self._tickets:
                    self.idle.set()

    async def extend(self, ticket: Ticket, num_choices: int) -> bool:
        """Another block for each of ``num_choices``; False: not now and not later, the choices end there."""
        if ticket.refused_extension:
            return False
        granted = await self.limiter.extend(ticket.reservation, EXTEND_TOKENS * num_choices)
        ticket.refused_extension = not granted
        ticket.granted_tokens += EXTEND_TOKENS if granted else 0
        return granted

    async def _reserve(self, call: Call, work: Work) -> Ticket:
        reservation = _reservation(call, work)
        try:
            verdict = await self.limiter.reserve(reservation, is_spending=work.principal.has_spend_limit)
        except StoreUnavailable:
            raise ApiError("The rate limiter does not answer; try again.", code="store_unavailable") from None
        call.headers |= rate_limit_headers(verdict.headroom)
        if self.limiter.is_away and reservation.limited_scopes():
            call.headers["x-ratelimit-degraded"] = "true"
        if isinstance(verdict, Refused):
            raise _rate_limited(verdict, reservation.tokens)
        return Ticket(reservation, work.granted_tokens)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEW_EVERY_MS / 1000)
            await self.limiter.renew([ticket.reservation for ticket in self._tickets.values()])


def _reservation(call: Call, work: Work) -> Reservation:
    principal = work.principal
    return Reservation(
        request_id=call.request_id,
        attempt=0,
        tenant_id=principal.tenant_id,
        key_id=principal.key_id,
        tokens=work.reserved_tokens,
        scopes=(("tenant", principal.limits), (f"key:{principal.key_id}", principal.key_limits), *_own_scopes(work)),
    )


def _own_scopes(work: Work) -> list[tuple[str, Limits]]:
    """The key's limits for this request's base model and adapter."""
    principal, target = work.principal, work.target
    named = {"model": target.model.name, "adapter": target.adapter.name if target.adapter else ""}
    return [
        (f"key:{principal.key_id}:{scope.kind}:{scope.name}", scope.limits)
        for scope in principal.scoped_limits
        if named[scope.kind] == scope.name
    ]


def _rate_limited(refused: Refused, asked_tokens: int) -> ApiError:
    whose = "this key's" if refused.scope.startswith("key") else "this account's"
    _, _, scope = refused.scope.removeprefix("key:").partition(":")
    limit = refused.limit.replace("_", " ") + (" for the {} {}".format(*scope.split(":", 1)) if scope else "")
    message = f"Rate limit reached: {whose} limit of {limit}."
    if refused.retry_after_ms is None:
        message = f"The request of {asked_tokens} tokens is larger than {whose} limit of {limit}; make it smaller."
    else:
        message += f" Try again in {refused.retry_after_ms / 1000:.3g} s."
    return ApiError(message, code="rate_limit_exceeded", retry_ms=refused.retry_after_ms)


def rate_limit_headers(headroom: Headroom) -> dict[str, str]:
    """OpenAI's ``x-ratelimit-*``, only of what is limited."""
    values = {
        "limit-requests": headroom.limit_requests,
        "remaining-requests": headroom.remaining_requests,
        "reset-requests": _duration(headroom.reset_requests_ms),
        "limit-tokens": headroom.limit_tokens,
        "remaining-tokens": headroom.remaining_tokens,
        "reset-tokens": _duration(headroom.reset_tokens_ms),
    }
    return {f"x-ratelimit-{name}": str(value) for name, value in values.items() if value is not None}


def _duration(milliseconds: int | None) -> str | None:
    """As Go writes durations: 120ms, 1.5s, 6m0s."""
    if milliseconds is None:
        return None
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    seconds = f"{rest / 1000:.3f}".rstrip("0").rstrip(".") + "s"
    return f"{minutes}m{seconds}" if minutes else seconds
