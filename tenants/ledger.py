"""The ledger's only writer: usage records in, receipts and charges out, each once for ever."""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy.dialects import postgresql, sqlite
from sqlmodel import col
from sqlmodel.ext.asyncio.session import AsyncSession

from tenants.errors import InvalidRecord
from tenants.meter import RequestContext
from tenants.pricing import MAX_QUANTITY, Charge, Quantities, RateCard, charges, is_billed
from tenants.repositories import RateCardRepository
from tenants.tables import LedgerEntry, RequestRecord

OUTCOME_LOST = 0
_NAMESPACE = uuid.UUID("6f1f3f6e-7a55-5f0e-9d6e-1c6a2f0f7e11")  # ours, fixed for ever: entry ids depend on it
_MAX_NS = 1 << 62
_TOKENS = ("prompt_tokens", "cached_tokens", "output_tokens")
_DURATIONS = ("queue_ns", "prefill_ns", "decode_ns", "post_ns", "network_ns", "first_token_ns", "gpu_ns")
_COPIED = ("outcome", *_TOKENS, *_DURATIONS, "finished_unix_ns")
_FROM_CONTEXT = (
    *("request_id", "attempt", "tenant_id", "key_id", "operation", "model", "base_model", "adapter_version_id"),
    *("flow_class", "rate_card_id", "admitted_unix_ns", "trace_id", "label"),
)


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

    def __post_init__(self) -> None:
        for name in (*_DURATIONS, "finished_unix_ns"):
            if not 0 <= getattr(self, name) <= _MAX_NS:
                raise InvalidRecord(f"{name} is {getattr(self, name)}")
        for name in _TOKENS:
            if not 0 <= getattr(self, name) <= MAX_QUANTITY:
                raise InvalidRecord(f"{name} is {getattr(self, name)}")
        if self.cached_tokens > self.prompt_tokens:
            raise InvalidRecord(f"{self.cached_tokens} cached of {self.prompt_tokens} prompt tokens")
        if self.outcome != OUTCOME_LOST and not 100 <= self.outcome <= 599:
            raise InvalidRecord(f"outcome is {self.outcome}")


class Ledger:
    """Inserts and nothing else. The caller owns the transaction, and acknowledges after the commit."""

    async def post(
        self, session: AsyncSession, settled: Sequence[SettledRequest], rate_cards: Mapping[str, RateCard]
    ) -> int:
        """Books a batch; returns how many records were new. Any record, in any order, any number of times: the
        same rows. A card that ``rate_cards`` lacks is read from the database.

        Raises LookupError when a billed record names a rate card that nobody has.
        """
        records, entries = [], []
        cards = await _with_missing_cards(session, settled, rate_cards)
        for request in settled:
            billed = _charges(request, cards)
            records.append(_record_row(request, billed))
            entries += [_entry_row(request, charge) for charge in billed]
        num_new = await _insert(session, RequestRecord, records, ("request_id", "attempt"))
        await _insert(session, LedgerEntry, entries, ("entry_id",))
        return num_new


def entry_id(request_id: str, meter: str) -> str:
    """The permanent name of a charge."""
    return str(uuid.uuid5(_NAMESPACE, f"{request_id}/{meter}"))


def _charges(request: SettledRequest, cards: Mapping[str, RateCard]) -> list[Charge]:
    if not is_billed(request.outcome, request.output_tokens):
        return []
    context = request.context
    quantities = Quantities(request.prompt_tokens, request.cached_tokens, request.output_tokens)
    return charges(quantities, cards[context.rate_card_id], context.base_model, context.flow_class)


def _record_row(request: SettledRequest, billed: Sequence[Charge]) -> dict[str, Any]:
    row = {name: getattr(request.context, name) for name in _FROM_CONTEXT}
    row |= {name: getattr(request, name) for name in _COPIED}
    price = sum(charge.amount_picousd for charge in billed)
    return row | {"billed": is_billed(request.outcome, request.output_tokens), "price_picousd": price}


def _entry_row(request: SettledRequest, charge: Charge) -> dict[str, Any]:
    names = ("request_id", "tenant_id", "key_id", "model", "base_model", "flow_class", "rate_card_id")
    row = {name: getattr(request.context, name) for name in names}
    return row | {
        "entry_id": entry_id(request.context.request_id, charge.meter),
        "meter": charge.meter,
        "quantity": charge.quantity,
        "unit_price_picousd": charge.unit_price_picousd,
        "amount_picousd": charge.amount_picousd,
        "occurred_unix_ns": request.finished_unix_ns,
    }


async def _with_missing_cards(
    session: AsyncSession, settled: Sequence[SettledRequest], rate_cards: Mapping[str, RateCard]
) -> Mapping[str, RateCard]:
    if all(request.context.rate_card_id in rate_cards for request in settled):
        return rate_cards
    return {card.rate_card_id: card for card in await RateCardRepository(session).list_all()} | dict(rate_cards)


async def _insert(session: AsyncSession, table: Any, rows: list[dict[str, Any]], key: tuple[str, ...]) -> int:
    """INSERT … ON CONFLICT DO NOTHING, in key order (two gateways never wait for each other in a circle)."""
    if not rows:
        return 0
    dialect = session.get_bind().dialect.name
    insert = postgresql.insert if dialect == "postgresql" else sqlite.insert
    statement = insert(table).on_conflict_do_nothing().returning(col(getattr(table, key[0])))
    ordered = sorted(rows, key=lambda row: tuple(row[name] for name in key))
    inserted = await session.exec(statement, params=ordered)
    return len(inserted.all())
