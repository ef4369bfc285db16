"""The tenants' limits as admission asks for them: of the shared store, or, while that is away, of our own share."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from tenants.errors import StoreUnavailable
from tenants.local_share import LocalShare
from tenants.quota import Admitted, Quota, Refused, Reservation, SettleKind

LOCAL_FOR_S = 300.0  # an outage that lasts longer is refused for
RETRY_S = 0.25
MAX_UNHEARD = 4096
_log = logging.getLogger("gateway.limiter")
_T = TypeVar("_T")
_Settlement: TypeAlias = tuple[Reservation, int, SettleKind]


@dataclass(slots=True)
class Limiter:
    """Asks the store until it fails; then nobody waits for it again before a probe every RETRY_S has seen it answer.
    Meanwhile rates are kept to our share, for LOCAL_FOR_S; money never is. ``count_fallback`` hears of each decision
    that was made without the store."""

    quota: Quota
    share: LocalShare
    count_fallback: Callable[[str, str], None]  # kind, reason
    _away_since_s: float | None = None
    _unheard: deque[_Settlement] = field(default_factory=lambda: deque(maxlen=MAX_UNHEARD))
    _owing: asyncio.Event = field(default_factory=asyncio.Event)
    _mending: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._mending = asyncio.create_task(self._mend(), name="limiter's store")

    async def close(self) -> None:
        if self._mending is not None:
            self._mending.cancel()

    @property
    def is_away(self) -> bool:
        return self._away_since_s is not None

    async def reserve(self, reservation: Reservation, *, is_spending: bool) -> Admitted | Refused:
        """``is_spending``: it counts against a limit of money too. Raises StoreUnavailable."""
        try:
            if is_spending and self.is_away:
                raise StoreUnavailable("nobody knows what was spent")
            return await self._ask(reservation, lambda: self._reserve(reservation))
        except StoreUnavailable:
            self.count_fallback("limiter", "store_unavailable")
            if is_spending or not self._may_decide():
                raise
            return self.share.reserve(reservation)

    async def extend(self, reservation: Reservation, more_tokens: int) -> bool:
        """False: not now and not later."""
        if self.share.holds(reservation):
            return self.share.extend(reservation, more_tokens)
        try:
            return await self._ask(reservation, lambda: self.quota.extend(reservation, more_tokens))
        except StoreUnavailable:
            self.count_fallback("limiter", "store_unavailable")
            return self._may_decide() and self.share.extend(reservation, more_tokens)

    async def settle(self, reservation: Reservation, used_tokens: int, kind: SettleKind) -> None:
        """Never fails: what the store does not hear now it hears when it is back."""
        self.share.settle(reservation, used_tokens, kind)
        try:
            await self._ask(reservation, lambda: self.quota.settle(reservation, used_tokens, kind))
        except StoreUnavailable:
            self._owe((reservation, used_tokens, kind))

    async def renew(self, reservations: Iterable[Reservation]) -> None:
        """The leases of all that runs: what we admitted ourselves counts in the store as soon as that is back."""
        if not self.is_away:
            try:
                await self.quota.renew(reservations)
            except StoreUnavailable as error:
                self._lost(error)

    async def _reserve(self, reservation: Reservation) -> Admitted | Refused:
        try:
            return await self.quota.reserve(reservation)
        except BaseException:  # also a cancellation: the store may have taken it, or still do so
            self._owe((reservation, 0, "void"))
            raise

    async def _ask(self, reservation: Reservation, question: Callable[[], Awaitable[_T]]) -> _T:
        """Of a store that is away only what needs no store."""
        if self.is_away and reservation.limited_scopes():
            raise StoreUnavailable("the store is away")
        try:
            return await question()
        except StoreUnavailable as error:
            self._lost(error)
            raise

    def _may_decide(self) -> bool:
        return self._away_since_s is not None and time.monotonic() - self._away_since_s <= LOCAL_FOR_S

    def _owe(self, settlement: _Settlement) -> None:
        self._unheard.append(settlement)
        self._owing.set()

    def _lost(self, error: StoreUnavailable) -> None:
        if not self.is_away:
            self._away_since_s = time.monotonic()
            _log.warning("the limiter's store failed (%s): rates are kept to this process's share", error)
        self._owing.set()

    async def _mend(self) -> None:
        """Tells a store that is back what it has not heard."""
        while True:
            await self._owing.wait()
            try:
                await self.quota.ping()
                while self._unheard:
                    await self.quota.settle(*self._unheard[0])
                    self._unheard.popleft()
            except StoreUnavailable as error:
                self._lost(error)
                await asyncio.sleep(RETRY_S)
                continue
            if self.is_away:
                self._away_since_s = None
                _log.warning("the limiter's store answers again")
            self._owing.clear()
