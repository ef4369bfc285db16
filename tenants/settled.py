"""What is booked: an engine's usage records with what their gateways knew of them, and what follows from each."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from sqlmodel.ext.asyncio.session import AsyncSession

from tenants.errors import InvalidRecord
from tenants.meter import RequestContext
from tenants.pricing import MAX_QUANTITY, Charge

OUTCOME_LOST = 0
_MAX_NS = 1 << 62
TOKENS = ("prompt_tokens", "cached_tokens", "output_tokens")
DURATIONS = ("queue_ns", "prefill_ns", "decode_ns", "post_ns", "network_ns", "first_token_ns", "gpu_ns")
COSTS = ("load_ns", "recompute_ns")


@dataclass(frozen=True, slots=True)
class SettledRequest:
    """The engine's usage record with its unsealed context. Raises InvalidRecord, so that a batch never fails on one.

    ``outcome`` is the HTTP status, 499 when the caller left, 0 when the record was lost by a crash of ours.
    """

    context: RequestContext
    outcome: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    queue_ns: int
    prefill_ns: int
    decode_ns: int
    post_ns: int
    network_ns: int
    first_token_ns: int
    gpu_ns: int
    finished_unix_ns: int
    load_ns: int = 0
    recompute_ns: int = 0

    def __post_init__(self) -> None:
        for name in (*DURATIONS, *COSTS, "finished_unix_ns"):
            if not 0 <= getattr(self, name) <= _MAX_NS:
                raise InvalidRecord(f"{name} is {getattr(self, name)}")
        for name in TOKENS:
            if not 0 <= getattr(self, name) <= MAX_QUANTITY:
                raise InvalidRecord(f"{name} is {getattr(self, name)}")
        if self.cached_tokens > self.prompt_tokens:
            raise InvalidRecord(f"{self.cached_tokens} cached of {self.prompt_tokens} prompt tokens")
        if self.outcome != OUTCOME_LOST and not 100 <= self.outcome <= 599:
            raise InvalidRecord(f"outcome is {self.outcome}")


@dataclass(frozen=True, slots=True)
class Booked:
    """A record that was new in this batch. ``charges`` is empty where it is not billed, or another dispatch of the
    request was."""

    request: SettledRequest
    charges: tuple[Charge, ...]


class Fold(Protocol):
    """What follows from records: sums, wallets, reports. It sees each record once, ever, in the transaction that books
    it; so what it writes there holds exactly what the ledger holds."""

    async def fold(self, session: AsyncSession, booked: Sequence[Booked]) -> None: ...
