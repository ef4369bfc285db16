"""The tenants' limits as admission asks for them: of the shared store, or, while that is away, of our own share."""

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, TypeVar

from gateway.limits.tickets import Ticket
from gateway.limits.unheard import Unheard
from tenants.errors import SpendUnknown, StoreUnavailable
from tenants.quota.line import Answer
from tenants.quota.local_share import LocalShare
from tenants.quota.quota import Admitted, Quota, Refused, Reservation

LOCAL_FOR_S = 300.0  # an outage that lasts longer is refused for
RETRY_S = 0.25
LAST_WORDS_S = 1.0
_log = logging.getLogger("gateway.limits.limiter")
_T = TypeVar("_T")
_Settlement: TypeAlias = Callable[[], Answer]


class Recounts(Protocol):
    """Makes known what the store does not know of a reservation's windows. Raises StoreUnavailable."""

    @property
    def is_fenced(self) -> bool: ...

    async def unfenced(self) -> None: ...

    async def recount(self, reservation: Reservation) -> None: ...


@dataclass(slots=True)
class Limiter:
    """Asks the store until it fails; then nobody waits for it again before a probe every RETRY_S has seen it answer.
    Meanwhile rates are kept to our share, for LOCAL_FOR_S; money never is. ``count_fallback`` hears of each decision
    that was made without the store."""

    quota: Quota
    share: LocalShare
    spending: Recounts
    count_fallback: Callable[[str, str], None]  # kind, reason
    _away_since_s: float | None = None
    _unheard: Unheard = field(default_factory=Unheard)
    _telling: set[Answer] = field(default_factory=set)
    _owing: asyncio.Event = field(default_factory=asyncio.Event)
    _mending: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._mending = asyncio.create_task(self._mend(), name="limiter's store")

    async def close(self) -> None:
        """Waits for what the store was told last, as long as it may take."""
        if self._telling:
            await asyncio.wait(self._telling, timeout=LAST_WORDS_S)
        if self._mending is not None:
            self._mending.cancel()

    @property
    def is_away(self) -> bool:
        return self._away_since_s is not None

    async def reserve(self, reservation: Reservation) -> Admitted | Refused:
        """Raises StoreUnavailable."""
        try:
            return await self._ask(reservation, lambda: self._reserve(reservation))
        except StoreUnavailable:
            self.count_fallback("limiter", "store_unavailable")
            if not self._may_decide(reservation):
                raise
            return self.share.reserve(reservation)

    async def extend(self, reservation: Reservation, more_tokens: int, more_picousd: int) -> bool:
        """False: not now and not later."""
        if self.share.holds(reservation):
            return self.share.extend(reservation, more_tokens)
        try:
            return await self._ask(reservation, lambda: self.quota.extend(reservation, more_tokens, more_picousd))
        except StoreUnavailable:
            self.count_fallback("limiter", "store_unavailable")
            return self._may_decide(reservation) and self.share.extend(reservation, more_tokens)

    def settle(self, ticket: Ticket) -> None:
        """Never fails, and waits for nothing: what the store does not hear now it hears when it is back."""
        reservation = ticket.reservation
        self.share.settle(reservation, ticket.used_tokens, ticket.kind)
        self._tell(
            reservation,
            functools.partial(
                self.quota.settle, reservation, ticket.used_tokens, ticket.kind, ticket.price_picousd, ticket.attempt
            ),
        )

    def book(self, reservation: Reservation, attempt: int) -> None:
        """As ``settle``: the ledger has what that attempt of ``reservation`` spent."""
        self._tell(reservation, functools.partial(self.quota.tell_booked, reservation, attempt))

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
        except SpendUnknown:
            raise
        except BaseException:  # also a cancellation: the store may have taken it, or still do so
            self._owe(functools.partial(self.quota.settle, reservation, 0, "void"))
            raise

    def _tell(self, reservation: Reservation, settlement: _Settlement) -> None:
        if not reservation.is_limited:
            return
        if self.is_away:
            self._owe(settlement)
        else:
            answer = settlement()
            self._telling.add(answer)
            answer.add_done_callback(functools.partial(self._told, settlement))

    def _told(self, settlement: _Settlement, answer: Answer) -> None:
        self._telling.discard(answer)
        error = None if answer.cancelled() else answer.exception()
        if isinstance(error, StoreUnavailable):
            self._lost(error)
            self._owe(settlement)

    async def _ask(self, reservation: Reservation, question: Callable[[], Awaitable[_T]]) -> _T:
        """Of a store that is away only what needs no store."""
        if self.is_away and reservation.is_limited:
            raise StoreUnavailable("the store is away")
        while True:
            try:
                return await question()
            except SpendUnknown:
                await self.spending.recount(reservation)
            except StoreUnavailable as error:
                self._lost(error)
                raise

    def _may_decide(self, reservation: Reservation) -> bool:
        """Of money never."""
        if reservation.spend is not None or self._away_since_s is None:
            return False
        return time.monotonic() - self._away_since_s <= LOCAL_FOR_S

    def _owe(self, settlement: _Settlement) -> None:
        self._unheard.put(settlement)
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
                await self._unheard.tell()
            except StoreUnavailable as error:
                self._lost(error)
                await asyncio.sleep(RETRY_S)
                continue
            if self.is_away:
                self._away_since_s = None
                forgotten = self._unheard.num_forgotten
                _log.warning("the limiter's store answers again; so far %d settlements were forgotten", forgotten)
            self._owing.clear()
