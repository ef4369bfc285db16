"""What stands on an invoice: pure integer arithmetic over what the ledger holds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tenants.pricing import ADAPTER_METERS, METERS, RateCard, unit_of
from tenants.tables import CreditNote, Invoice, InvoiceLine

PICOUSD_PER_CENT = 10**10
_METERS = (*METERS, *ADAPTER_METERS)


@dataclass(frozen=True, slots=True, order=True)
class LineKey:
    """Entries that differ in none of these are one line."""

    model: str
    base_model: str
    flow_class: str
    meter: str
    rate_card_id: str
    unit_price_picousd: int


@dataclass(frozen=True, slots=True)
class Sums:
    quantity: int
    amount_picousd: int

    def __sub__(self, other: "Sums") -> "Sums":
        return Sums(self.quantity - other.quantity, self.amount_picousd - other.amount_picousd)

    def __add__(self, other: "Sums") -> "Sums":
        return Sums(self.quantity + other.quantity, self.amount_picousd + other.amount_picousd)


NOTHING = Sums(0, 0)
Groups = Mapping[LineKey, Sums]


def cents_of(amount_picousd: int) -> int:
    """Rounded half to even."""
    whole, rest = divmod(amount_picousd, PICOUSD_PER_CENT)
    half = PICOUSD_PER_CENT // 2
    return whole + (rest > half or (rest == half and whole % 2 == 1))


def usage_lines(
    groups: Groups, start_unix_ns: int, end_unix_ns: int, late_for: Invoice | None = None
) -> list[InvoiceLine]:
    """A line a group, in an order of its own; with ``late_for`` they are corrections of that invoice."""
    kind, reference = ("correction", late_for.invoice_id) if late_for else ("usage", "")
    about = f"late usage of {late_for.period}, invoice {number_text(late_for)}" if late_for else ""
    return [
        InvoiceLine(
            invoice_id="",
            number=0,
            kind=kind,
            description=about,
            model=key.model,
            base_model=key.base_model,
            flow_class=key.flow_class,
            meter=key.meter,
            rate_card_id=key.rate_card_id,
            reference=reference,
            start_unix_ns=start_unix_ns,
            end_unix_ns=end_unix_ns,
            quantity=sums.quantity,
            unit_price_picousd=key.unit_price_picousd,
            amount_picousd=sums.amount_picousd,
            amount_cents=cents_of(sums.amount_picousd),
        )
        for key, sums in sorted(groups.items(), key=lambda item: _order(item[0]))
        if sums != NOTHING
    ]


def credit_line(note: CreditNote, invoice: Invoice) -> InvoiceLine:
    """A credit note, taken off; it is about the month of the invoice that it corrects."""
    return InvoiceLine(
        invoice_id="",
        number=0,
        kind="credit",
        description=f"credit note {credit_number_text(note)} to invoice {number_text(invoice)}",
        reference=note.credit_note_id,
        start_unix_ns=invoice.start_unix_ns,
        end_unix_ns=invoice.end_unix_ns,
        amount_picousd=-note.total_cents * PICOUSD_PER_CENT,
        amount_cents=-note.total_cents,
    )


def rounding_line(lines: Sequence[InvoiceLine], start_unix_ns: int, end_unix_ns: int) -> InvoiceLine:
    """What makes the lines sum to the total, exactly and in cents: the total is the exact sum, rounded once more."""
    exact, shown = sum(line.amount_picousd for line in lines), sum(line.amount_cents for line in lines)
    total = cents_of(exact)
    return InvoiceLine(
        invoice_id="",
        number=0,
        kind="rounding",
        description="rounding to cents",
        start_unix_ns=start_unix_ns,
        end_unix_ns=end_unix_ns,
        amount_picousd=total * PICOUSD_PER_CENT - exact,
        amount_cents=total - shown,
    )


def groups_of(lines: Sequence[InvoiceLine]) -> dict[LineKey, Sums]:
    """What lines of usage and corrections have of each group."""
    found: dict[LineKey, Sums] = {}
    for line in lines:
        key = key_of(line)
        found[key] = found.get(key, NOTHING) + Sums(line.quantity, line.amount_picousd)
    return found


def key_of(line: InvoiceLine) -> LineKey:
    return LineKey(line.model, line.base_model, line.flow_class, line.meter, line.rate_card_id, line.unit_price_picousd)


def less(groups: Groups, invoiced: Groups) -> dict[LineKey, Sums]:
    """What is in the ledger and on no invoice. A group that is only on an invoice comes out below zero."""
    return {key: groups.get(key, NOTHING) - invoiced.get(key, NOTHING) for key in {**groups, **invoiced}}


def number_text(invoice: Invoice) -> str:
    return f"INV-{invoice.number:06}"


def credit_number_text(note: CreditNote) -> str:
    return f"CN-{note.number:06}"


def breaches(lines: Sequence[InvoiceLine], total_cents: int, cards: Mapping[str, RateCard]) -> list[str]:
    """Why such an invoice may not be issued; none when it is sound."""
    found = [breach for line in lines if line.kind in ("usage", "correction") for breach in _unsound(line, cards)]
    found += [f"line {line.number} is a credit of {line.amount_cents} cents" for line in lines if _adds(line)]
    if sum(line.amount_picousd for line in lines) != total_cents * PICOUSD_PER_CENT:
        found.append("the exact amounts do not sum to the total")
    if sum(line.amount_cents for line in lines) != total_cents:
        found.append("the amounts in cents do not sum to the total")
    rounding = [line for line in lines if line.kind == "rounding"]
    if len(rounding) != 1 or abs(rounding[0].amount_picousd) > PICOUSD_PER_CENT // 2:
        found.append("there is not one rounding of at most half a cent")
    return found


def _unsound(line: InvoiceLine, cards: Mapping[str, RateCard]) -> list[str]:
    found = []
    if line.quantity < 0 or line.amount_picousd < 0:
        found.append(f"line {line.number} is below zero: the ledger has lost what was invoiced")
    if line.amount_picousd * unit_of(line.meter) != line.quantity * line.unit_price_picousd:
        found.append(f"line {line.number} is not quantity × unit price")
    if line.amount_cents != cents_of(line.amount_picousd):
        found.append(f"line {line.number} is not rounded half to even")
    card = cards.get(line.rate_card_id)
    if card is None or line.meter not in _METERS:
        return [*found, f"line {line.number} has no rate card or meter that we know"]
    if card.price(line.meter, line.base_model, line.flow_class) != line.unit_price_picousd:  # pyright: ignore[reportArgumentType]
        found.append(f"line {line.number} has another price than its rate card")
    return found


def _adds(line: InvoiceLine) -> bool:
    return line.kind == "credit" and line.amount_cents >= 0


def _order(key: LineKey) -> tuple:
    return key.model, key.flow_class, _METERS.index(key.meter) if key.meter in _METERS else -1, key.rate_card_id, key
