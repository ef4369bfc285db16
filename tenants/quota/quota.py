"""Limits: reserve before the work, settle after it. The arithmetic is quota.lua's, in the shared store."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

from msgspec import Struct
from redis.asyncio import Redis
from redis.exceptions import RedisError

from tenants.errors import InvalidValue, ReservationClosed, SpendUnknown, StoreUnavailable
from tenants.patience import patience
from tenants.quota.budgets import KEPT_MS, Spend, Window
from tenants.quota.line import Answer
from tenants.quota.script import Script

LimitName: TypeAlias = Literal["requests_per_minute", "tokens_per_minute", "concurrent_requests", "spend"]
SettleKind: TypeAlias = Literal["exact", "at_least", "void"]

LEASE_MS = 10_000
RENEW_EVERY_MS = 3_000
MAX_LIMIT = 10**11  # quota.lua counts 60 000 units a token in a double: exact below 2⁵³
_RATES: tuple[LimitName, ...] = ("requests_per_minute", "tokens_per_minute", "concurrent_requests")
_SPEND = 4  # quota.lua's number of what is no rate
_SCRIPT = Path(__file__).with_name("quota.lua").read_text()
_NONE = _CLOSED = -1
_UNKNOWN = -2
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Limits:
    """The rate limits of one scope; None = no limit. Raises InvalidValue."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None

    def __post_init__(self) -> None:
        for name in _RATES:
            value = getattr(self, name)
            if value is not None and (type(value) is not int or not 0 <= value <= MAX_LIMIT):
                raise InvalidValue(name, f"a limit is null or a whole number from 0 to {MAX_LIMIT}")

    @property
    def unlimited(self) -> bool:
        return self.requests_per_minute is None and self.tokens_per_minute is None and self.concurrent_requests is None

    def arguments(self) -> list[int]:
        values = (self.requests_per_minute, self.tokens_per_minute, self.concurrent_requests)
        return [_NONE if value is None else value for value in values]


@dataclass(frozen=True, slots=True)
class Reservation:
    """What one dispatch of a request takes: itself, a lease, and ``tokens`` (prompt + all granted output).

    (request_id, attempt) is its identity. ``scopes`` are (name, limits), e.g. ("tenant", …), ("key:ab12…", …);
    ``spend`` is what it may cost, None where no limit of money binds it.
    """

    request_id: str
    attempt: int
    tenant_id: str
    key_id: str
    tokens: int
    scopes: tuple[tuple[str, Limits], ...]
    spend: Spend | None = None

    @property
    def is_limited(self) -> bool:
        """Only then the store is asked."""
        return self.spend is not None or any(not limits.unlimited for _, limits in self.scopes)

    def limited_scopes(self) -> list[tuple[str, Limits]]:
        return [(name, limits) for name, limits in self.scopes if not limits.unlimited]

    def grown(self, more_tokens: int, more_picousd: int) -> "Reservation":
        """The same with an extension that was granted."""
        spend = self.spend and replace(self.spend, picousd=self.spend.picousd + more_picousd)
        return replace(self, tokens=self.tokens + more_tokens, spend=spend)


class Headroom(Struct, frozen=True):
    """What is left in the scope that has least; None where nothing limits. ``reset`` is the time until full."""

    limit_requests: int | None = None
    remaining_requests: int | None = None
    reset_requests_ms: int | None = None
    limit_tokens: int | None = None
    remaining_tokens: int | None = None
    reset_tokens_ms: int | None = None


class Admitted(Struct, frozen=True):
    headroom: Headroom


class Refused(Struct, frozen=True):
    """``limit`` of ``scope`` binds (the one with the longest wait); None = waiting never helps. Nothing was taken.
    Of ``spend`` the scope is a window, whose period ends at ``end_unix_ms``."""

    limit: LimitName
    scope: str
    retry_after_ms: int | None
    headroom: Headroom
    end_unix_ms: int = 0


class Quota:
    """The limiter. Every method raises StoreUnavailable when the store has not answered after ``deadline_s``.

    A reservation without any limit costs nothing: the store isn't asked. ``clock_ms`` is for tests; without it
    the store's own clock counts, so that all gateways agree.
    """

    def __init__(self, redis: Redis, deadline_s: float = 0.25, *, clock_ms: Callable[[], int] | None = None) -> None:
        self._redis = redis
        self._deadline_s = deadline_s
        self._clock_ms = clock_ms
        self._script = Script(redis, _SCRIPT, deadline_s)

    def close(self) -> None:
        """Ends its connection to the store; ``redis`` is its caller's."""
        self._script.close()

    async def reserve(self, reservation: Reservation) -> Admitted | Refused:
        """All scopes or none. Asking again for the same (request_id, attempt) takes nothing more.

        Raises ReservationClosed when it was settled before, SpendUnknown while a window's sum is not known.
        """
        if not reservation.is_limited:
            return Admitted(Headroom())
        code, *rest = await self._run("reserve", reservation, reservation.tokens)
        if code == _CLOSED:
            raise ReservationClosed(f"{reservation.request_id} attempt {reservation.attempt}")
        limit, scope, retry_ms, *left = rest
        headroom = Headroom(*(_optional(value) for value in left))
        if code:
            return Admitted(headroom)
        if limit == _SPEND:
            window = _windows(reservation)[scope - 1]
            return Refused("spend", window.name, None, headroom, window.end_unix_ms)
        name = reservation.limited_scopes()[scope - 1][0]
        return Refused(_RATES[limit - 1], name, _optional(retry_ms), headroom)

    async def extend(self, reservation: Reservation, more_tokens: int, more_picousd: int = 0) -> bool:
        """Takes more for an open reservation; False when a limit refuses, and nothing was taken. Raises
        SpendUnknown."""
        if not reservation.is_limited:
            return True
        (code,) = await self._run("extend", reservation.grown(0, more_picousd), more_tokens)
        return code == 1

    def settle(
        self, reservation: Reservation, used_tokens: int, kind: SettleKind, price_picousd: int = 0, attempt: int = 0
    ) -> Answer:
        """Closes it: once, whatever is asked how often, and whether or not the answer is awaited. ``attempt`` is the
        one that was dispatched last.

        ``exact`` debits ``used_tokens`` and the price, and gives the rest back; a use over the reservation is debited
        in full, below zero if need be. ``at_least`` gives nothing back (the use is known only from below). ``void``
        gives all back, the request too: nothing was dispatched.
        """
        if reservation.is_limited:
            return self._script(*self._call("settle", reservation, used_tokens, kind, attempt, price_picousd))
        nothing = asyncio.get_running_loop().create_future()
        nothing.set_result(None)
        return nothing

    async def renew(self, reservations: Iterable[Reservation]) -> None:
        """Keeps the leases of running requests for another LEASE_MS; call it every RENEW_EVERY_MS. What the store
        does not know of their spend it counts from then on."""
        await self._renew_all([(reservation, "open", 0) for reservation in reservations])

    async def announce_ended(self, ended: Iterable[tuple[Reservation, int]]) -> None:
        """Reservations (with what was spent of them) and the last attempts of requests that have just ended: for a
        store that may have lost them, while the ledger may not yet have them."""
        await self._renew_all([(reservation, "closed", attempt) for reservation, attempt in ended])

    def tell_booked(self, reservation: Reservation, attempt: int) -> Answer:
        """The ledger has the record of that attempt: what ``reservation.spend`` says is spent, for good. It need not be
        awaited."""
        return self._script(*self._call("book", reservation, 0, "", attempt))

    async def book(self, reservation: Reservation, attempt: int) -> bool:
        """Tells so; whether the ledger now has all that the request spent."""
        (code,) = await self.tell_booked(reservation, attempt)
        return code == 1

    async def mark(self, tenant_id: str, mark: str) -> None:
        """Leaves a mark among the tenant's holds: as long as it is there, nothing of them was lost."""
        await self._in_time(self._redis.hset(f"{prefix_of(tenant_id)}:h", f"!{mark}", "1"))  # pyright: ignore[reportArgumentType]

    async def held(self, tenant_id: str) -> dict[str, str]:
        """Requests (their ids) that hold something of the tenant's windows → the hold, as quota.lua writes it."""
        found = await self._in_time(self._redis.hgetall(f"{prefix_of(tenant_id)}:h"))  # pyright: ignore[reportArgumentType]
        held = {_text(member): _text(hold) for member, hold in found.items()}
        return {member.rpartition(":")[0]: hold for member, hold in held.items() if not member.startswith("!")}

    async def open(self, reservation: Reservation, sums: Mapping[str, int], booked: Iterable[str], mark: str) -> bool:
        """Makes the reservation's windows known that are not: ``sums`` are the ledger's by window, ``booked`` the
        requests among the holds whose spend these have. False: holds were lost since the mark was left."""
        assert reservation.spend is not None
        summed = tuple(replace(window, limit_picousd=sums[window.name]) for window in reservation.spend.windows)
        keys, arguments = self._call("open", replace(reservation, spend=Spend(0, summed)), 0, mark, 0)
        members = [f"{request_id}:{reservation.attempt}" for request_id in booked]
        (code,) = await self._script(keys, [*arguments, *members])
        return code == 1

    async def ping(self) -> None:
        """Returns when the store answers."""
        await self._in_time(self._redis.ping())  # pyright: ignore[reportArgumentType]

    async def _renew_all(self, items: Sequence[tuple[Reservation, str, int]]) -> None:
        limited = [item for item in items if item[0].is_limited]
        if limited:
            await asyncio.gather(
                *(self._script(*self._call("renew", each, 0, kind, attempt)) for each, kind, attempt in limited)
            )

    async def _run(self, operation: str, reservation: Reservation, amount: int) -> list[int]:
        answer = await self._script(*self._call(operation, reservation, amount))
        if answer[0] == _UNKNOWN:
            raise SpendUnknown(reservation.tenant_id)
        return answer

    def _call(
        self,
        operation: str,
        reservation: Reservation,
        amount: int,
        kind: str = "",
        attempt: int = 0,
        price_picousd: int | None = None,
    ) -> tuple[list[str], list]:
        """Keys and arguments; without a price the reservation's own counts."""
        assert amount >= 0, f"{operation} of {amount} tokens"
        prefix = prefix_of(reservation.tenant_id)
        member = f"{reservation.request_id}:{reservation.attempt}"
        clock = "" if self._clock_ms is None else self._clock_ms()
        spent = price_picousd
        if spent is None:
            spent = reservation.spend.picousd if reservation.spend else 0
        scopes = reservation.limited_scopes()
        keys = [f"{prefix}:r:{member}", f"{prefix}:h", f"{prefix}:k"]
        arguments = [operation, clock, member, LEASE_MS, amount, kind, spent, attempt, len(scopes)]
        for name, limits in scopes:
            keys += [f"{prefix}:b:{name}", f"{prefix}:l:{name}"]
            arguments += limits.arguments()
        for window in _windows(reservation):
            limit = "" if window.limit_picousd is None else window.limit_picousd
            keys.append(f"{prefix}:s:{window.name}")
            arguments += [window.name, limit, window.stamp, window.end_unix_ms + KEPT_MS]
        return keys, arguments

    async def _in_time(self, answer: Awaitable[_T]) -> _T:
        try:
            async with patience(self._deadline_s):
                return await answer
        except (RedisError, OSError, TimeoutError) as error:
            raise StoreUnavailable(f"the store failed: {type(error).__name__}") from error


def _optional(value: int) -> int | None:
    return None if value == _NONE else value


def prefix_of(tenant_id: str) -> str:
    """Of all keys of a tenant: the layout's version, and one hash tag."""
    return f"tn:q2:{{{tenant_id}}}"


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _windows(reservation: Reservation) -> tuple[Window, ...]:
    return reservation.spend.windows if reservation.spend else ()
