"""The ledger's only writer: usage records in, receipts, charges and their sums out, each once for ever."""

import hashlib
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter

from sqlmodel.ext.asyncio.session import AsyncSession

from tenants.bulk import insert_new, insert_telling
from tenants.postings import number_postings
from tenants.pricing import Charge, Quantities, RateCard, charges, is_billed
from tenants.repositories import RateCardRepository, TenantRepository
from tenants.set_aside import UNKNOWN_RATE_CARD, set_aside
from tenants.settled import COSTS, DURATIONS, TOKENS, Booked, Fold, SettledRequest
from tenants.tables import LedgerEntry, RequestRecord
from tenants.usage.rollups import add_booked

_NAMESPACE = uuid.UUID("6f1f3f6e-7a55-5f0e-9d6e-1c6a2f0f7e11").bytes  # ours, fixed for ever: entry ids depend on it
_COPIED = ("outcome", *TOKENS, *DURATIONS, "finished_unix_ns", *COSTS)
_FROM_CONTEXT = (
    *("request_id", "attempt", "tenant_id", "key_id", "operation", "model", "base_model", "adapter_version_id"),
    *("flow_class", "rate_card_id", "admitted_unix_ns", "trace_id", "label", "streamed", "num_choices"),
)
_SHARED = ("request_id", "tenant_id", "key_id", "model", "base_model", "flow_class", "rate_card_id")
_RECORD = (*_FROM_CONTEXT, *_COPIED, "billed", "price_picousd")
_ENTRY = ("entry_id", "meter", "quantity", "unit_price_picousd", "amount_picousd", "occurred_unix_ns", *_SHARED)
_of_context, _copied, _shared = attrgetter(*_FROM_CONTEXT), attrgetter(*_COPIED), attrgetter(*_SHARED)
_entry_key = itemgetter(0)


class Ledger:
    """Inserts, and adds up what it inserted. The caller owns the transaction, and acknowledges after the commit.
    ``folds`` run in their order, behind the inserts. ``count_unbooked`` is called with the reason of each record that
    was set aside."""

    def __init__(self, folds: Sequence[Fold] = (), count_unbooked: Callable[[str], None] = lambda _: None) -> None:
        self._folds = tuple(folds)
        self._count_unbooked = count_unbooked

    async def post(
        self, session: AsyncSession, settled: Sequence[SettledRequest], rate_cards: Mapping[str, RateCard]
    ) -> int:
        """Books a batch; returns how many records were new. Any record, in any order, any number of times: the
        same rows. A card that ``rate_cards`` lacks is read from the database; a billed record with one that nobody has
        is set aside, and the others are booked.
        """
        await TenantRepository(session).hold({request.context.tenant_id for request in settled})
        cards = await _with_missing_cards(session, settled, rate_cards)
        bills = _bills([request for request in settled if not _is_unpriced(request, cards)], cards)
        records = [_record_row(bill) for bill in bills]
        new_records = await insert_telling(session, RequestRecord, _RECORD, records, ("request_id", "attempt"))
        bills = [bill for bill in bills if _record_id(bill.request) in new_records]
        charged = await _charge(session, bills)
        booked = [Booked(bill.request, bill.charges if _record_id(bill.request) in charged else ()) for bill in bills]
        await add_booked(session, booked)
        for fold in self._folds:
            await fold.fold(session, booked)
        await number_postings(session, [each.request.context.request_id for each in booked if each.charges])
        await self._set_aside(session, [request for request in settled if _is_unpriced(request, cards)])
        return len(new_records)

    async def _set_aside(self, session: AsyncSession, strangers: Sequence[SettledRequest]) -> None:
        for _ in range(await set_aside(session, strangers, UNKNOWN_RATE_CARD)):
            self._count_unbooked(UNKNOWN_RATE_CARD)


def entry_id(request_id: str, meter: str) -> str:
    """The permanent name of a charge: uuid5, written out, since the library's took a quarter of posting's time."""
    name = hashlib.sha1(_NAMESPACE + f"{request_id}/{meter}".encode(), usedforsecurity=False).hexdigest()
    variant = "89ab"[int(name[16], 16) & 3]
    return f"{name[:8]}-{name[8:12]}-5{name[13:16]}-{variant}{name[17:20]}-{name[20:32]}"


@dataclass(frozen=True, slots=True)
class _Bill:
    request: SettledRequest
    charges: tuple[Charge, ...]


def _bills(settled: Sequence[SettledRequest], cards: Mapping[str, RateCard]) -> list[_Bill]:
    """One a record, in key order: two gateways never wait for each other in a circle."""
    unique = {_record_id(request): request for request in settled}
    return [_Bill(unique[key], tuple(_charges(unique[key], cards))) for key in sorted(unique)]


async def _charge(session: AsyncSession, bills: Sequence[_Bill]) -> set[tuple[str, int]]:
    """Writes the entries of each request's first bill; the records whose they are. The entry of the meter ``requests``,
    which every bill has, says which was first."""
    first: dict[str, _Bill] = {}
    for bill in bills:
        if bill.charges:
            first.setdefault(entry_id(bill.request.context.request_id, "requests"), bill)
    marks = [_entry_row(name, bill, bill.charges[-1]) for name, bill in sorted(first.items(), key=_entry_key)]
    new = await insert_telling(session, LedgerEntry, _ENTRY, marks, ("entry_id",))
    charged = [bill for name, bill in first.items() if (name,) in new]
    rest = [
        _entry_row(entry_id(bill.request.context.request_id, charge.meter), bill, charge)
        for bill in charged
        for charge in bill.charges[:-1]
    ]
    await insert_new(session, LedgerEntry, _ENTRY, sorted(rest, key=_entry_key))
    return {_record_id(bill.request) for bill in charged}


def _record_id(request: SettledRequest) -> tuple[str, int]:
    return request.context.request_id, request.context.attempt


def _is_unpriced(request: SettledRequest, cards: Mapping[str, RateCard]) -> bool:
    return is_billed(request.outcome, request.output_tokens) and request.context.rate_card_id not in cards


def _charges(request: SettledRequest, cards: Mapping[str, RateCard]) -> list[Charge]:
    if not is_billed(request.outcome, request.output_tokens):
        return []
    context = request.context
    quantities = Quantities(request.prompt_tokens, request.cached_tokens, request.output_tokens)
    return charges(quantities, cards[context.rate_card_id], context.base_model, context.flow_class)


def _record_row(bill: _Bill) -> tuple:
    request = bill.request
    price = sum(charge.amount_picousd for charge in bill.charges)
    is_one = is_billed(request.outcome, request.output_tokens)
    return (*_of_context(request.context), *_copied(request), is_one, price)


def _entry_row(name: str, bill: _Bill, charge: Charge) -> tuple:
    amounts = (charge.quantity, charge.unit_price_picousd, charge.amount_picousd)
    return (name, charge.meter, *amounts, bill.request.finished_unix_ns, *_shared(bill.request.context))


async def _with_missing_cards(
    session: AsyncSession, settled: Sequence[SettledRequest], rate_cards: Mapping[str, RateCard]
) -> Mapping[str, RateCard]:
    if all(request.context.rate_card_id in rate_cards for request in settled):
        return rate_cards
    return {card.rate_card_id: card for card in await RateCardRepository(session).list_all()} | dict(rate_cards)
