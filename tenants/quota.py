"""Limits: reserve before the work, settle after it. The arithmetic is quota.lua's, in the shared store."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

from redis.asyncio import Redis
from redis.exceptions import RedisError

from tenants.errors import InvalidValue, ReservationClosed, StoreUnavailable

LimitName: TypeAlias = Literal["requests_per_minute", "tokens_per_minute", "concurrent_requests"]
SettleKind: TypeAlias = Literal["exact", "at_least", "void"]

LEASE_MS = 10_000
RENEW_EVERY_MS = 3_000
MAX_LIMIT = 10**11  # quota.lua counts 60 000 units a token in a double: exact below 2⁵³
_LIMIT_NAMES: tuple[LimitName, ...] = ("requests_per_minute", "tokens_per_minute", "concurrent_requests")
_SCRIPT = Path(__file__).with_name("quota.lua").read_text()
_NONE = -1
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Limits:
    """The rate limits of one scope; None = no limit. Raises InvalidValue."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None

    def __post_init__(self) -> None:
        for name in _LIMIT_NAMES:
            value = getattr(self, name)
            if value is not None and (type(value) is not int or not 0 <= value <= MAX_LIMIT):
                raise InvalidValue(name, f"a limit is null or a whole number from 0 to {MAX_LIMIT}")

    @property
    def unlimited(self) -> bool:
        return all(getattr(self, name) is None for name in _LIMIT_NAMES)

    def arguments(self) -> list[int]:
        values = (getattr(self, name) for name in _LIMIT_NAMES)
        return [_NONE if value is None else value for value in values]


@dataclass(frozen=True, slots=True)
class Reservation:
    """What one dispatch of a request takes: itself, a lease, and ``tokens`` (prompt + all granted output).

    (request_id, attempt) is its identity. ``scopes`` are (name, limits), e.g. ("tenant", …), ("key:ab12…", …).
    """

    request_id: str
    attempt: int
    tenant_id: str
    key_id: str
    tokens: int
    scopes: tuple[tuple[str, Limits], ...]

    def limited_scopes(self) -> list[tuple[str, Limits]]:
        return [(name, limits) for name, limits in self.scopes if not limits.unlimited]


@dataclass(frozen=True, slots=True)
class Headroom:
    """What is left in the scope that has least; None where nothing limits. ``reset`` is the time until full."""

    limit_requests: int | None = None
    remaining_requests: int | None = None
    reset_requests_ms: int | None = None
    limit_tokens: int | None = None
    remaining_tokens: int | None = None
    reset_tokens_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Admitted:
    headroom: Headroom


@dataclass(frozen=True, slots=True)
class Refused:
    """``limit`` of ``scope`` binds (the one with the longest wait); None = waiting never helps. Nothing was taken."""

    limit: LimitName
    scope: str
    retry_after_ms: int | None
    headroom: Headroom


class Quota:
    """The limiter. Every method raises StoreUnavailable when the store has not answered after ``deadline_s``.

    A reservation without any limit costs nothing: the store isn't asked. ``clock_ms`` is for tests; without it
    the store's own clock counts, so that all gateways agree.
    """

    def __init__(self, redis: Redis, deadline_s: float = 0.25, *, clock_ms: Callable[[], int] | None = None) -> None:
        self._redis = redis
        self._deadline_s = deadline_s
        self._clock_ms = clock_ms
        self._script = redis.register_script(_SCRIPT)

    async def reserve(self, reservation: Reservation) -> Admitted | Refused:
        """All scopes or none. Asking again for the same (request_id, attempt) takes nothing more.

        Raises ReservationClosed when it was settled before.
        """
        if not reservation.limited_scopes():
            return Admitted(Headroom())
        code, *rest = await self._run("reserve", reservation, reservation.tokens)
        if code < 0:
            raise ReservationClosed(f"{reservation.request_id} attempt {reservation.attempt}")
        limit, scope, retry_ms, *left = rest
        headroom = Headroom(*(_optional(value) for value in left))
        if code:
            return Admitted(headroom)
        name = reservation.limited_scopes()[scope - 1][0]
        return Refused(_LIMIT_NAMES[limit - 1], name, _optional(retry_ms), headroom)

    async def extend(self, reservation: Reservation, more_tokens: int) -> bool:
        """Takes ``more_tokens`` for an open reservation; False when a limit refuses, and nothing was taken."""
        if not reservation.limited_scopes():
            return True
        (code,) = await self._run("extend", reservation, more_tokens)
        return code == 1

    async def settle(self, reservation: Reservation, used_tokens: int, kind: SettleKind) -> None:
        """Closes it: once, whatever is asked how often.

        ``exact`` debits ``used_tokens`` and gives the rest back; a use over the reservation is debited in full,
        below zero if need be. ``at_least`` gives nothing back (the use is known only from below). ``void`` gives
        all back, the request too: nothing was dispatched.
        """
        if reservation.limited_scopes():
            await self._run("settle", reservation, used_tokens, kind)

    async def renew(self, reservations: Iterable[Reservation]) -> None:
        """Keeps the leases of running requests for another LEASE_MS; call it every RENEW_EVERY_MS."""
        limited = [reservation for reservation in reservations if reservation.limited_scopes()]
        if limited:
            await self._in_time(self._renew(limited))

    async def ping(self) -> None:
        """Returns when the store answers."""
        await self._in_time(self._redis.ping())  # pyright: ignore[reportArgumentType]

    async def _renew(self, reservations: Sequence[Reservation]) -> None:
        async with self._redis.pipeline(transaction=False) as pipe:
            for reservation in reservations:
                keys, arguments = self._call("renew", reservation, 0, "")
                await self._script(keys=keys, args=arguments, client=pipe)
            await pipe.execute()

    async def _run(self, operation: str, reservation: Reservation, amount: int, kind: str = "") -> list[int]:
        assert amount >= 0, f"{operation} of {amount} tokens"
        keys, arguments = self._call(operation, reservation, amount, kind)
        return await self._in_time(self._script(keys=keys, args=arguments))

    def _call(self, operation: str, reservation: Reservation, amount: int, kind: str) -> tuple[list[str], list]:
        prefix = f"tn:q1:{{{reservation.tenant_id}}}"
        member = f"{reservation.request_id}:{reservation.attempt}"
        clock = "" if self._clock_ms is None else self._clock_ms()
        keys, arguments = [f"{prefix}:r:{member}"], [operation, clock, member, LEASE_MS, amount, kind]
        for name, limits in reservation.limited_scopes():
            keys += [f"{prefix}:b:{name}", f"{prefix}:l:{name}"]
            arguments += limits.arguments()
        return keys, arguments

    async def _in_time(self, answer: Awaitable[_T]) -> _T:
        try:
            async with asyncio.timeout(self._deadline_s):
                return await answer
        except (RedisError, OSError, TimeoutError) as error:
            raise StoreUnavailable(f"the store failed: {type(error).__name__}") from error


def _optional(value: int) -> int | None:
    return None if value == _NONE else value
