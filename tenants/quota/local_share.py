"""Rate limits while the shared store is away: each process keeps to a share of them, by itself.

Nobody can ask then what a tenant has used. A bucket that is met for the first time is a full one, so a tenant may in
the first minute use as much again as it had before; from then on all processes together admit what the limits say.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from tenants.errors import StoreUnavailable
from tenants.quota.quota import Admitted, Headroom, LimitName, Limits, Refused, Reservation, SettleKind

_UNITS = 60_000  # of a request or token, as in quota.lua: a limit of L a minute refills L units a millisecond
_MAX_BUCKETS = 65_536  # the longest unused are forgotten: full again
_CONCURRENCY_RETRY_MS = 1000


@dataclass(slots=True)
class _Bucket:
    """One scope's share. Balances are in units; None = no limit."""

    share: Limits
    at_ms: int
    requests: int | None
    tokens: int | None
    running: int = 0

    @classmethod
    def full(cls, share: Limits, now_ms: int) -> "_Bucket":
        return cls(share, now_ms, _full(share.requests_per_minute), _full(share.tokens_per_minute))

    def refill(self, share: Limits, now_ms: int) -> None:
        """Up to now; a limit that was changed counts from now on."""
        elapsed_ms, self.at_ms, self.share = max(0, now_ms - self.at_ms), now_ms, share
        self.requests = _refilled(self.requests, share.requests_per_minute, elapsed_ms)
        self.tokens = _refilled(self.tokens, share.tokens_per_minute, elapsed_ms)

    def take(self, requests: int, tokens: int) -> None:
        """Below zero if need be; what is given back never fills it over its brim."""
        self.requests = _taken(self.requests, self.share.requests_per_minute, requests)
        self.tokens = _taken(self.tokens, self.share.tokens_per_minute, tokens)

    def refusals(self, requests: int, tokens: int) -> list[tuple[int, LimitName]]:
        """(ms to wait, limit) of what does not fit now."""
        found: list[tuple[int, LimitName]] = []
        meters: tuple[tuple[LimitName, int | None, int], ...] = (
            ("requests_per_minute", self.requests, requests),
            ("tokens_per_minute", self.tokens, tokens),
        )
        for limit, balance, count in meters:
            missing = 0 if balance is None else count * _UNITS - balance
            if missing > 0:
                found.append((-(-missing // max(1, getattr(self.share, limit))), limit))
        most = self.share.concurrent_requests
        if requests and most is not None and self.running >= most:
            found.append((_CONCURRENCY_RETRY_MS, "concurrent_requests"))
        return found


class LocalShare:
    """Quota's three questions, answered at once from memory. ``num_sharers`` processes have a part of each limit."""

    def __init__(self, num_sharers: int, now_ms: Callable[[], int]) -> None:
        self._num_sharers = num_sharers
        self._now_ms = now_ms
        self._buckets: OrderedDict[tuple[str, str], _Bucket] = OrderedDict()
        self._open: dict[tuple[str, int], tuple[Reservation, int]] = {}  # with the tokens that it holds

    def reserve(self, reservation: Reservation) -> Admitted | Refused:
        """All scopes or none, as Quota. Raises StoreUnavailable for what fits the limit, but not our share of it."""
        identity = reservation.request_id, reservation.attempt
        buckets = self._buckets_of(reservation)
        if identity not in self._open:
            if (too_large := self._too_large(reservation)) is not None:
                return Refused(*too_large, None, _headroom(buckets))
            worst = max(
                ((*refusal, name) for name, bucket in buckets for refusal in bucket.refusals(1, reservation.tokens)),
                default=None,
            )
            if worst is not None:
                wait_ms, limit, scope = worst
                return Refused(limit, scope, wait_ms, _headroom(buckets))
            for _, bucket in buckets:
                bucket.take(1, reservation.tokens)
                bucket.running += 1
            self._open[identity] = reservation, reservation.tokens
        return Admitted(_headroom(buckets))

    def holds(self, reservation: Reservation) -> bool:
        """It was admitted here, and is not settled."""
        return (reservation.request_id, reservation.attempt) in self._open

    def extend(self, reservation: Reservation, more_tokens: int) -> bool:
        """Also for one that the store admitted: what it takes here is then settled there."""
        buckets = self._buckets_of(reservation)
        if any(bucket.refusals(0, more_tokens) for _, bucket in buckets):
            return False
        for _, bucket in buckets:
            bucket.take(0, more_tokens)
        identity = reservation.request_id, reservation.attempt
        if identity in self._open:
            self._open[identity] = reservation, self._open[identity][1] + more_tokens
        return True

    def settle(self, reservation: Reservation, used_tokens: int, kind: SettleKind) -> None:
        """Closes it, as Quota does; nothing happens to one that is not ours or closed before."""
        found = self._open.pop((reservation.request_id, reservation.attempt), None)
        if found is None:
            return
        held = found[1]
        charged = {"exact": used_tokens, "at_least": max(held, used_tokens), "void": 0}[kind]
        for _, bucket in self._buckets_of(reservation):
            bucket.take(-1 if kind == "void" else 0, charged - held)
            bucket.running = max(0, bucket.running - 1)  # it may be of a bucket that was forgotten meanwhile

    def _too_large(self, reservation: Reservation) -> tuple[LimitName, str] | None:
        """The limit that it is larger than, and of which scope. Raises StoreUnavailable where only our share is."""
        small: LimitName | None = None
        counts: tuple[tuple[LimitName, int], ...] = (
            ("requests_per_minute", 1),
            ("tokens_per_minute", reservation.tokens),
            ("concurrent_requests", 1),
        )
        for name, limits in reservation.limited_scopes():
            share = self._share(limits)
            for limit, count in counts:
                most = getattr(limits, limit)
                if most is not None and count > most:
                    return limit, name
                if most is not None and count > getattr(share, limit):
                    small = limit
        if small is not None:
            raise StoreUnavailable(f"our share of {small} is too small for this request")
        return None

    def _buckets_of(self, reservation: Reservation) -> list[tuple[str, _Bucket]]:
        now_ms, found = self._now_ms(), []
        for name, limits in reservation.limited_scopes():
            share, identity = self._share(limits), (reservation.tenant_id, name)
            bucket = self._buckets.setdefault(identity, _Bucket.full(share, now_ms))
            self._buckets.move_to_end(identity)
            bucket.refill(share, now_ms)
            found.append((name, bucket))
        while len(self._buckets) > _MAX_BUCKETS:
            self._buckets.popitem(last=False)
        return found

    def _share(self, limits: Limits) -> Limits:
        """At least 1 of each, so that no limit means nothing at all; together at most the limit, or the sharers."""
        parts = (limits.requests_per_minute, limits.tokens_per_minute, limits.concurrent_requests)
        return Limits(*(limit and max(1, limit // self._num_sharers) for limit in parts))


def _full(limit: int | None) -> int | None:
    return None if limit is None else limit * _UNITS


def _refilled(balance: int | None, limit: int | None, elapsed_ms: int) -> int | None:
    if limit is None:
        return None
    full = limit * _UNITS
    return full if balance is None else min(full, balance + elapsed_ms * limit)


def _taken(balance: int | None, limit: int | None, count: int) -> int | None:
    return None if balance is None or limit is None else min(limit * _UNITS, balance - count * _UNITS)


def _headroom(buckets: list[tuple[str, _Bucket]]) -> Headroom:
    """Of the scope with the least left, for requests and then for tokens."""
    parts: list[int | None] = []
    for limit_name, balance_name in (("requests_per_minute", "requests"), ("tokens_per_minute", "tokens")):
        known = [
            (max(0, balance // _UNITS), limit, balance)
            for _, bucket in buckets
            if (balance := getattr(bucket, balance_name)) is not None
            and (limit := getattr(bucket.share, limit_name)) is not None
        ]
        if not known:
            parts += [None, None, None]
            continue
        left, limit, balance = min(known)
        parts += [limit, left, 0 if limit == 0 else -(-(limit * _UNITS - balance) // limit)]
    return Headroom(*parts)
