"""How invoices and credit notes are shown, to operators and to their tenant alike."""

from decimal import Decimal
from typing import Annotated, Any, Literal

from litestar import Response
from msgspec import Meta, Struct

from gateway.resources import Seconds
from gateway.views.documents import csv_answer, page_answer
from tenants.invoices.focus import focus_csv, focus_rows
from tenants.invoices.focus_check import check
from tenants.invoices.invoices import Issued
from tenants.invoices.lines import credit_number_text, number_text
from tenants.invoices.text import credit_note_page, dollars, invoice_csv, invoice_page
from tenants.pricing import unit_of
from tenants.tables import CreditNote, CreditNoteLine, Invoice, InvoiceLine

INVOICE_FORMATS, NOTE_FORMATS = ("json", "csv", "html"), ("json", "html")
_NS = 10**9
Cents = Annotated[str, Meta(pattern=r"^-?[0-9]+\.[0-9]{2}$", description="Decimal text")]


class InvoiceLineBody(Struct, frozen=True, kw_only=True, rename={"flow_class": "class"}):
    """``amount_picousd`` × ``price_is_for`` = ``quantity`` × ``unit_price_picousd``, exactly, but for credits and the
    rounding. ``reference``: the credit note that is taken off, or the invoice that is corrected."""

    number: Annotated[int, Meta(ge=1)]
    kind: Literal["usage", "correction", "credit", "rounding"]
    description: str
    model: str | None
    base_model: str | None
    flow_class: str | None
    meter: str | None
    rate_card_id: str | None
    reference: str | None
    start_time: Seconds
    end_time: Seconds
    quantity: int
    unit_price_picousd: int
    price_is_for: int
    amount_picousd: int
    amount: Cents


class InvoiceHead(Struct, frozen=True, kw_only=True):
    """An invoice without its lines. [``start_time``, ``end_time``) is the tenant's month. ``total`` =
    ``paid_from_credit`` + ``amount_due``; what is due is below zero where the tenant is owed something."""

    id: str
    object: Literal["invoice"] = "invoice"
    number: str
    tenant_id: str
    tenant_name: str
    issuer: str
    period: str
    start_time: Seconds
    end_time: Seconds
    time_zone: str
    issued_at: Seconds
    currency: str
    total: Cents
    paid_from_credit: Cents
    amount_due: Cents


class InvoiceBody(InvoiceHead, frozen=True, kw_only=True):
    """Both the amounts and the exact amounts of the lines sum to ``total``."""

    lines: list[InvoiceLineBody]


class CreditNoteLineBody(Struct, frozen=True, kw_only=True):
    """So much of a line of the invoice."""

    invoice_line: int
    amount: Cents


class CreditNoteBody(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["credit_note"] = "credit_note"
    number: str
    invoice_id: str
    tenant_id: str
    reason: str
    issued_at: Seconds
    currency: str
    total: Cents
    lines: list[CreditNoteLineBody]


def invoice_head(invoice: Invoice) -> InvoiceHead:
    return InvoiceHead(**_head(invoice))


def invoice_body(issued: Issued) -> InvoiceBody:
    return InvoiceBody(**_head(issued.invoice), lines=[_line(line) for line in issued.lines])


def invoice_answer(issued: Issued, wanted: str) -> Response[Any]:
    """In one of INVOICE_FORMATS."""
    if wanted == "csv":
        return csv_answer(invoice_csv(issued), issued.invoice.invoice_id)
    if wanted == "html":
        return page_answer(invoice_page(issued))
    return Response(invoice_body(issued))


def focus_answer(issued: Issued) -> Response[str]:
    """FOCUS as CSV. Raises AssertionError when it is not what FOCUS asks for: our bug."""
    payable = {number_text(issued.invoice): Decimal(issued.invoice.total_cents).scaleb(-2)}
    breaches = check(focus_rows(issued), payable)
    assert not breaches, breaches
    return csv_answer(focus_csv(issued), f"{issued.invoice.invoice_id}-focus")


def credit_note_body(note: CreditNote, lines: list[CreditNoteLine]) -> CreditNoteBody:
    return CreditNoteBody(
        id=note.credit_note_id,
        number=credit_number_text(note),
        invoice_id=note.invoice_id,
        tenant_id=note.tenant_id,
        reason=note.reason,
        issued_at=note.issued_unix_ns // _NS,
        currency=note.currency,
        total=dollars(note.total_cents),
        lines=[CreditNoteLineBody(invoice_line=line.invoice_line, amount=dollars(line.amount_cents)) for line in lines],
    )


def credit_note_answer(note: CreditNote, lines: list[CreditNoteLine], issued: Issued, wanted: str) -> Response[Any]:
    """In one of NOTE_FORMATS."""
    if wanted == "html":
        return page_answer(credit_note_page(note, lines, issued))
    return Response(credit_note_body(note, lines))


def _head(invoice: Invoice) -> dict:
    return {
        "id": invoice.invoice_id,
        "number": number_text(invoice),
        "tenant_id": invoice.tenant_id,
        "tenant_name": invoice.tenant_name,
        "issuer": invoice.issuer,
        "period": invoice.period,
        "start_time": invoice.start_unix_ns // _NS,
        "end_time": invoice.end_unix_ns // _NS,
        "time_zone": invoice.time_zone,
        "issued_at": invoice.issued_unix_ns // _NS,
        "currency": invoice.currency,
        "total": dollars(invoice.total_cents),
        "paid_from_credit": dollars(invoice.paid_cents),
        "amount_due": dollars(invoice.total_cents - invoice.paid_cents),
    }


def _line(line: InvoiceLine) -> InvoiceLineBody:
    return InvoiceLineBody(
        number=line.number,
        kind=line.kind,  # pyright: ignore[reportArgumentType]
        description=line.description,
        model=line.model or None,
        base_model=line.base_model or None,
        flow_class=line.flow_class or None,
        meter=line.meter or None,
        rate_card_id=line.rate_card_id or None,
        reference=line.reference or None,
        start_time=line.start_unix_ns // _NS,
        end_time=line.end_unix_ns // _NS,
        quantity=line.quantity,
        unit_price_picousd=line.unit_price_picousd,
        price_is_for=unit_of(line.meter),
        amount_picousd=line.amount_picousd,
        amount=dollars(line.amount_cents),
    )
