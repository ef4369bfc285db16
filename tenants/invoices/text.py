"""An invoice as CSV, and invoices and credit notes as pages for people."""

from collections.abc import Sequence
from datetime import UTC, datetime
from decimal import Context, Decimal
from zoneinfo import ZoneInfo

from tenants.csv_text import csv_text
from tenants.invoices.invoices import Issued
from tenants.invoices.lines import PICOUSD_PER_CENT, credit_number_text, number_text
from tenants.page import Column, facts, page, table
from tenants.pricing import ADAPTER_METERS, MEGABYTE, unit_of
from tenants.tables import CreditNote, CreditNoteLine, Invoice, InvoiceLine

_NS = 10**9
_GB_HOUR_BYTE_SECONDS = 10**9 * 3600
_EXACT = Context(prec=60)  # more digits than any total has
PAID_FROM_CREDIT = "Paid from prepaid credit"
_METER_NAMES = {
    "input_uncached_tokens": "input tokens",
    "input_cached_tokens": "cached input tokens",
    "output_tokens": "output tokens",
    "requests": "requests",
    "adapter_storage_byte_seconds": "adapter storage",
    "adapter_residency_byte_seconds": "adapter residency",
}
_CSV_COLUMNS = (
    *("line", "kind", "description", "model", "base_model", "class", "meter", "rate_card_id", "reference"),
    *("period_start", "period_end", "quantity", "unit_price_picousd", "price_is_for"),
    *("amount_picousd", "amount", "currency"),
)


def dollars(cents: int) -> str:
    """-1234567 → -12345.67."""
    whole, rest = divmod(abs(cents), 100)
    return f"{'-' if cents < 0 else ''}{whole}.{rest:02}"


def exact_usd(picousd: int) -> Decimal:
    """Without a rounding, and without zeros behind."""
    return Decimal(picousd).scaleb(-12, _EXACT).normalize(_EXACT)


def invoice_csv(issued: Issued) -> str:
    """A row a line, and one of what prepaid credit has paid, if anything: amounts are exact, and as shown, and sum to
    what is due."""
    rows = [_csv_row(issued.invoice, line) for line in issued.lines]
    return csv_text(_CSV_COLUMNS, [*rows, *_csv_payment(issued.invoice)])


def invoice_page(issued: Issued) -> str:
    """One printed page for a usual invoice."""
    invoice = issued.invoice
    zone = ZoneInfo(invoice.time_zone)
    about = facts(
        (
            ("From", invoice.issuer),
            ("To", f"{invoice.tenant_name} ({invoice.tenant_id})"),
            (
                "Period",
                f"{_day(invoice.start_unix_ns, zone)} to {_day(invoice.end_unix_ns - 1, zone)}, {invoice.time_zone}",
            ),
            ("Issued", _day(invoice.issued_unix_ns, zone)),
            ("Total", _money(invoice.total_cents, invoice.currency)),
            *_paid(invoice),
        )
    )
    columns = (
        *(Column("Line", number=True), Column("Description", heads=True), Column("Quantity", number=True)),
        *(Column("Unit price", number=True), Column(f"Amount ({invoice.currency})", number=True)),
    )
    rows = [_row(line, zone) for line in issued.lines if line.kind != "rounding" or line.amount_cents]
    total = (None, "Total", None, None, _grouped(invoice.total_cents))
    number = number_text(invoice)
    return page(f"Invoice {number}", about, table(columns, rows, total, f"Charges of {number}"), _footer(issued))


def credit_note_page(note: CreditNote, lines: Sequence[CreditNoteLine], issued: Issued) -> str:
    """``lines`` of a note to the invoice ``issued``, in whose words they are told."""
    invoice, number = issued.invoice, credit_number_text(note)
    zone, invoiced = ZoneInfo(invoice.time_zone), {line.number: line for line in issued.lines}
    about = facts(
        (
            ("From", invoice.issuer),
            ("To", f"{invoice.tenant_name} ({invoice.tenant_id})"),
            ("Invoice", f"{number_text(invoice)} of {_day(invoice.issued_unix_ns, zone)}"),
            ("Reason", note.reason),
            ("Issued", _day(note.issued_unix_ns, zone)),
            ("Total", _money(note.total_cents, note.currency)),
        )
    )
    columns = (
        *(Column("Invoice line", number=True), Column("Description", heads=True)),
        Column(f"Amount ({note.currency})", number=True),
    )
    rows = [
        (line.invoice_line, _row(invoiced[line.invoice_line], zone)[1], _grouped(line.amount_cents)) for line in lines
    ]
    given = table(columns, rows, (None, "Total", _grouped(note.total_cents)), f"Given back by {number}")
    end = f"Credit note {note.credit_note_id}. The next invoice takes its total off."
    return page(f"Credit note {number}", about, given, f"<footer><p>{end}</p></footer>")


def _paid(invoice: Invoice) -> list[tuple[str, str]]:
    if not invoice.paid_cents:
        return []
    due = invoice.total_cents - invoice.paid_cents
    return [
        (PAID_FROM_CREDIT, _money(invoice.paid_cents, invoice.currency)),
        ("Due" if due >= 0 else "Owed to you", _money(abs(due), invoice.currency)),
    ]


def _row(line: InvoiceLine, zone: ZoneInfo) -> tuple[object, ...]:
    amount = _grouped(line.amount_cents)
    if line.kind in ("credit", "rounding"):
        return line.number, line.description[:1].upper() + line.description[1:], None, None, amount
    return line.number, _description(line, zone), _quantity(line), _unit_price(line), amount


def _description(line: InvoiceLine, zone: ZoneInfo) -> str:
    model = line.model if line.model == line.base_model else f"{line.model} on {line.base_model}"
    parts = [model, _METER_NAMES.get(line.meter, line.meter)]
    if line.meter not in ADAPTER_METERS:
        parts.insert(1, line.flow_class)
    if line.kind == "correction":
        parts.append(f"{line.description} ({_day(line.start_unix_ns, zone)} to {_day(line.end_unix_ns - 1, zone)})")
    return ", ".join(parts)


def _quantity(line: InvoiceLine) -> str:
    if line.meter not in ADAPTER_METERS:
        return f"{line.quantity:,}"
    hours = Decimal(line.quantity) / _GB_HOUR_BYTE_SECONDS
    return f"{hours:,.3f} GB·h"


def _unit_price(line: InvoiceLine) -> str:
    if line.meter in ADAPTER_METERS:
        return f"{_price(line.unit_price_picousd * _GB_HOUR_BYTE_SECONDS // MEGABYTE)} / GB·h"
    return f"{_price(line.unit_price_picousd * 10**6)} / 1M"


def _price(picousd: int) -> str:
    """Exact, and in cents at least."""
    exact = exact_usd(picousd)
    return f"${exact:,.{max(2, -int(exact.as_tuple().exponent))}f}"


def _footer(issued: Issued) -> str:
    exact = exact_usd(sum(line.amount_picousd for line in issued.lines if line.kind != "rounding"))
    text = (
        f"Invoice {issued.invoice.invoice_id}. Each line is rounded once, half to even; exactly the lines are "
        f"{exact:,f} {issued.invoice.currency}, and the total is that, rounded to cents."
    )
    return f"<footer><p>{text}</p></footer>"


def _csv_row(invoice: Invoice, line: InvoiceLine) -> tuple[object, ...]:
    return (
        *(line.number, line.kind, line.description, line.model, line.base_model, line.flow_class, line.meter),
        *(line.rate_card_id, line.reference, utc_text(line.start_unix_ns), utc_text(line.end_unix_ns)),
        *(line.quantity, line.unit_price_picousd, unit_of(line.meter)),
        *(line.amount_picousd, Decimal(line.amount_cents).scaleb(-2), invoice.currency),
    )


def _csv_payment(invoice: Invoice) -> list[tuple[object, ...]]:
    if not invoice.paid_cents:
        return []
    about = {"kind": "payment", "description": PAID_FROM_CREDIT.lower(), "currency": invoice.currency}
    period = {"period_start": utc_text(invoice.start_unix_ns), "period_end": utc_text(invoice.end_unix_ns)}
    paid = {
        "amount_picousd": -invoice.paid_cents * PICOUSD_PER_CENT,
        "amount": Decimal(-invoice.paid_cents).scaleb(-2),
    }
    return [tuple((about | period | paid).get(name) for name in _CSV_COLUMNS)]


def utc_text(unix_ns: int) -> str:
    """ISO 8601, whole seconds."""
    return datetime.fromtimestamp(unix_ns // _NS, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _day(unix_ns: int, zone: ZoneInfo) -> str:
    return datetime.fromtimestamp(unix_ns // _NS, zone).date().isoformat()


def _money(cents: int, currency: str) -> str:
    return f"{_grouped(cents)} {currency}"


def _grouped(cents: int) -> str:
    whole, rest = divmod(abs(cents), 100)
    return f"{'-' if cents < 0 else ''}{whole:,}.{rest:02}"
