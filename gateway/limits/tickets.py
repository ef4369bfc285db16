"""What this process has admitted and not yet forgotten."""

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from gateway.work import Work
from tenants.pricing import RateCard
from tenants.quota.budgets import Budget, Spend, bound_picousd
from tenants.quota.quota import Reservation, SettleKind

REMEMBERED_S = 10.0  # an ended request: longer than its Close takes to its engine's journal


@dataclass(slots=True)
class Ticket:
    """An admitted request's reservation, at the prices of ``card``. Whoever runs the request says in ``used_tokens``,
    ``price_picousd``, ``attempt`` and ``kind`` what it took; until then it counts as never dispatched.
    ``granted_tokens`` is per choice."""

    reservation: Reservation
    work: Work
    card: RateCard
    admitted_unix_ns: int
    granted_tokens: int
    used_tokens: int = 0
    price_picousd: int = 0
    attempt: int = 0
    kind: SettleKind = "void"
    refused_extension: bool = False

    @property
    def is_prepaid(self) -> bool:
        return self.work.principal.budget.is_prepaid

    @property
    def is_extensible(self) -> bool:
        """It is granted less than its answer may come to."""
        return self.granted_tokens < self.work.sampling.max_tokens

    @property
    def bound_picousd(self) -> int:
        """The most that it can cost with what it is granted now."""
        output_tokens = self.work.total_choices * self.granted_tokens
        model, flow_class = self.work.target.model.name, self.work.flow_class
        return bound_picousd(self.card, model, flow_class, self.work.prompt_tokens, output_tokens)

    def price_of(self, output_tokens: int) -> int:
        """The most that so many further output tokens can cost."""
        return output_tokens * self.card.price("output_tokens", self.work.target.model.name, self.work.flow_class)

    def grow(self, output_tokens: int) -> None:
        """An extension of so many tokens, all choices together, was granted."""
        self.reservation = self.reservation.grown(output_tokens, self.price_of(output_tokens))
        self.granted_tokens += output_tokens // self.work.total_choices

    def spent(self) -> tuple[Reservation, int]:
        """Of one that has ended: the reservation with what it came to, and the attempt that did."""
        spend = self.reservation.spend
        assert spend is not None
        picousd = self.price_picousd if self.kind == "exact" else max(spend.picousd, self.price_picousd)
        return replace(self.reservation, spend=replace(spend, picousd=picousd)), self.attempt

    def count(self, budget: Budget | None) -> None:
        """Counts in the windows of a limit that is younger than the request."""
        if self.reservation.spend is None and budget is not None:
            spend = spend_of(budget, self.work, self.card, self.admitted_unix_ns, self.granted_tokens)
            self.reservation = replace(self.reservation, spend=spend)


def spend_of(budget: Budget, work: Work, card: RateCard, unix_ns: int, granted_tokens: int) -> Spend | None:
    """What a request that begins at that time takes of its windows; None where none of them has a limit."""
    target = work.target
    adapter = target.adapter.name if target.adapter else ""
    windows = budget.windows(work.principal.key_id, target.model.name, adapter, unix_ns)
    if not windows:
        return None
    output_tokens = work.total_choices * granted_tokens
    return Spend(bound_picousd(card, target.model.name, work.flow_class, work.prompt_tokens, output_tokens), windows)


@dataclass(slots=True)
class Tickets:
    """The running ones by request, and for a while those that have ended."""

    _open: dict[str, Ticket] = field(default_factory=dict)
    _ended: deque[tuple[float, Ticket]] = field(default_factory=deque)

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Ticket]:
        return iter(list(self._open.values()))

    def begin(self, ticket: Ticket) -> None:
        self._open[ticket.reservation.request_id] = ticket

    def end(self, ticket: Ticket) -> None:
        del self._open[ticket.reservation.request_id]
        if ticket.kind != "void":
            self._ended.append((time.monotonic(), ticket))
        while self._ended and self._ended[0][0] < time.monotonic() - REMEMBERED_S:
            self._ended.popleft()

    def ended(self) -> list[Ticket]:
        """Those of the last REMEMBERED_S, whose records the ledger may not have yet."""
        return [ticket for at_s, ticket in self._ended if at_s >= time.monotonic() - REMEMBERED_S]
