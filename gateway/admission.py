"""May this request run now: what it may use is reserved before it starts and settled when it has ended."""

import asyncio
import contextlib
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from sqlalchemy.exc import SQLAlchemyError

from gateway.call import Call
from gateway.errors import ApiError
from gateway.limits.credit import Credit
from gateway.limits.limiter import Limiter
from gateway.limits.tickets import Ticket, Tickets, spend_of
from gateway.settlement import Settlement
from gateway.work import Work
from tenants.database import in_time
from tenants.errors import StoreUnavailable
from tenants.pricing import RateCard
from tenants.quota.budgets import Spend
from tenants.quota.quota import RENEW_EVERY_MS, Headroom, Limits, Refused, Reservation

LEDGER_WAIT_S = 2.0  # for a ledger that is late: a busy machine is not one without a database
EXTEND_TOKENS = 256  # a block of further output tokens of each choice


@dataclass(slots=True)
class Admission:
    """The limits' side of the request path. ``rate_card`` gives the prices of a time: here they are pinned. ``closed``
    refuses new requests: this process is draining."""

    limiter: Limiter
    credit: Credit
    books: Settlement
    rate_card: Callable[[int], RateCard]
    tickets: Tickets = field(default_factory=Tickets)
    closed: bool = False
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    _renewing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begins to renew the leases of what runs."""
        self.idle.set()
        self._renewing = asyncio.create_task(self._renew(), name="lease renewal")

    async def close(self) -> None:
        if self._renewing is not None:
            self._renewing.cancel()

    def admit(self, call: Call, work: Work) -> "Admitted":
        """To be entered: reserves then, and settles at the end, also when the end is a cancellation. Raises, on the way
        in, ApiError 402, 429 and 503."""
        return Admitted(self, call, work)

    async def begin(self, call: Call, work: Work) -> Ticket:
        self._check_open()
        ticket = await self._reserve(call, work)
        self.tickets.begin(ticket)
        self.idle.clear()
        return ticket

    def end(self, ticket: Ticket) -> None:
        self.limiter.settle(ticket)
        self.tickets.end(ticket)
        if not self.tickets:
            self.idle.set()

    def hold(self, ticket: Ticket) -> AbstractAsyncContextManager[None]:
        """Of the credit of who pays before. Raises ApiError 402 and 503."""
        self._check_open()  # since it asked
        return self.credit.held(ticket) if ticket.is_prepaid else contextlib.nullcontext()

    async def extend(self, ticket: Ticket, num_choices: int) -> bool:
        """Another block for each of ``num_choices``; False: not now and not later, the choices end there."""
        if ticket.refused_extension:
            return False
        more = EXTEND_TOKENS * num_choices
        granted = await self.limiter.extend(ticket.reservation, more, ticket.price_of(more))
        granted = granted and await self.credit.extend(ticket, ticket.price_of(more))
        ticket.refused_extension = not granted
        if granted:
            ticket.grow(more)
        return granted

    async def begin_attempt(self, ticket: Ticket, attempt: int) -> None:
        """The request is dispatched once more. Raises ApiError 402 and 503."""
        await self.credit.begin_attempt(ticket, attempt)

    async def _reserve(self, call: Call, work: Work) -> Ticket:
        admitted_ns = call.unix_ns(call.read_ns)
        card = self._card(admitted_ns)
        spend = spend_of(work.principal.budget, work, card, admitted_ns, work.granted_tokens)
        await self._check_ledger(is_money=spend is not None or work.principal.budget.is_prepaid)
        reservation = _reservation(call, work, spend)
        try:
            verdict = await self.limiter.reserve(reservation)
        except StoreUnavailable:
            raise ApiError("The rate limiter does not answer; try again.", code="store_unavailable") from None
        call.headers |= rate_limit_headers(verdict.headroom)
        if self.limiter.is_away and reservation.is_limited:
            call.headers["x-ratelimit-degraded"] = "true"
        if isinstance(verdict, Refused):
            raise (
                _spent(verdict, reservation.tokens)
                if verdict.limit == "spend"
                else _rate_limited(verdict, reservation.tokens)
            )
        return Ticket(reservation, work, card, admitted_ns, work.granted_tokens)

    def _check_open(self) -> None:
        if self.closed:
            raise ApiError("This server is shutting down.", code="draining")

    async def _check_ledger(self, *, is_money: bool) -> None:
        """What is owed to it has a bound; where money is limited or prepaid, it has to answer. Raises ApiError."""
        if self.books.is_full or (is_money and not await self._ledger_answers()):
            raise ApiError("The ledger does not answer; try again.", code="billing_unavailable")

    async def _ledger_answers(self) -> bool:
        if not (self.books.is_stuck or self.limiter.spending.is_fenced):
            return True
        try:
            async with in_time(LEDGER_WAIT_S):
                await self.books.unstuck()
                await self.limiter.spending.unfenced()
        except (SQLAlchemyError, OSError):
            return False
        return True

    def _card(self, unix_ns: int) -> RateCard:
        try:
            return self.rate_card(unix_ns)
        except LookupError:
            raise ApiError("No prices are in force.", code="billing_unavailable") from None

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEW_EVERY_MS / 1000)
            await self.limiter.renew([ticket.reservation for ticket in self.tickets])


@dataclass(slots=True)
class Admitted:
    """A request while it holds its reservation."""

    admission: Admission
    call: Call
    work: Work
    _ticket: Ticket = field(init=False)
    _hold: AbstractAsyncContextManager[None] = field(init=False)

    async def __aenter__(self) -> Ticket:
        self._ticket = await self.admission.begin(self.call, self.work)
        try:
            self._hold = self.admission.hold(self._ticket)
            await self._hold.__aenter__()
        except BaseException:
            self.admission.end(self._ticket)
            raise
        return self._ticket

    async def __aexit__(self, *failure: Any) -> None:
        try:
            await self._hold.__aexit__(*failure)
        finally:
            self.admission.end(self._ticket)


def _reservation(call: Call, work: Work, spend: Spend | None) -> Reservation:
    principal = work.principal
    return Reservation(
        request_id=call.request_id,
        attempt=0,
        tenant_id=principal.tenant_id,
        key_id=principal.key_id,
        tokens=work.reserved_tokens,
        scopes=(("tenant", principal.limits), (f"key:{principal.key_id}", principal.key_limits), *_own_scopes(work)),
        spend=spend,
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
    whose, scope = _named(refused.scope)
    limit = refused.limit.replace("_", " ") + scope
    message = f"Rate limit reached: {whose} limit of {limit}."
    if refused.retry_after_ms is None:
        message = f"The request of {asked_tokens} tokens is larger than {whose} limit of {limit}; make it smaller."
    else:
        message += f" Try again in {refused.retry_after_ms / 1000:.3g} s."
    return ApiError(message, code="rate_limit_exceeded", retry_ms=refused.retry_after_ms)


def _spent(refused: Refused, asked_tokens: int) -> ApiError:
    whose, scope = _named(refused.scope.rpartition("@")[0])
    ends = datetime.fromtimestamp(refused.end_unix_ms // 1000, UTC).isoformat().replace("+00:00", "Z")
    message = (
        f"Spend limit reached: {whose} limit of this month{scope} can't hold this request of up to {asked_tokens} "
        f"tokens; a smaller max_tokens needs less. The month ends {ends}."
    )
    return ApiError(message, code="spend_limit_exceeded")


def _named(scope: str) -> tuple[str, str]:
    """Whose it is, and what of it, in words."""
    whose = "this key's" if scope.startswith("key") else "this account's"
    _, _, rest = scope.removeprefix("key:").partition(":")
    return whose, " for the {} {}".format(*rest.split(":", 1)) if rest else ""


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
