"""GET /v1/organization/invoices and the credit notes to them: the caller's own."""

from typing import Any

from litestar import Request, Response, get
from litestar.params import FromPath
from sqlmodel.ext.asyncio.session import AsyncSession

from gateway.access import needs
from gateway.errors import ApiError
from gateway.parts import parts_of, principal_of
from gateway.resources import Listed
from gateway.views.documents import format_of
from gateway.views.invoices import (
    INVOICE_FORMATS,
    NOTE_FORMATS,
    CreditNoteBody,
    InvoiceHead,
    credit_note_answer,
    credit_note_body,
    invoice_answer,
    invoice_head,
)
from tenants.database import REPORT_S
from tenants.invoices.credit_notes import CreditNoteRepository
from tenants.invoices.invoices import InvoiceRepository, Issued


@get("/v1/organization/invoices", opt=needs("usage"))
async def list_invoices(request: Request) -> Listed[InvoiceHead]:
    async with parts_of(request).database.within(REPORT_S).session() as session:
        every = await InvoiceRepository(session).list_all(principal_of(request).tenant_id)
    return Listed(data=[invoice_head(invoice) for invoice in every])


@get("/v1/organization/invoices/{invoice_id:str}", opt=needs("usage"))
async def get_invoice(request: Request, invoice_id: FromPath[str]) -> Response[Any]:
    """Raises ApiError 404 for absent and for another tenant's; so do the others here."""
    wanted = format_of(request, *INVOICE_FORMATS)
    async with parts_of(request).database.within(REPORT_S).session() as session:
        issued = await _own(session, request, invoice_id)
    return invoice_answer(issued, wanted)


@get("/v1/organization/invoices/{invoice_id:str}/credit-notes", opt=needs("usage"))
async def list_credit_notes(request: Request, invoice_id: FromPath[str]) -> Listed[CreditNoteBody]:
    async with parts_of(request).database.within(REPORT_S).session() as session:
        await _own(session, request, invoice_id)
        every = await CreditNoteRepository(session).list_of(invoice_id)
    return Listed(data=[credit_note_body(note, lines) for note, lines in every])


@get("/v1/organization/invoices/{invoice_id:str}/credit-notes/{credit_note_id:str}", opt=needs("usage"))
async def get_credit_note(request: Request, invoice_id: FromPath[str], credit_note_id: FromPath[str]) -> Response[Any]:
    wanted = format_of(request, *NOTE_FORMATS)
    async with parts_of(request).database.within(REPORT_S).session() as session:
        issued = await _own(session, request, invoice_id)
        notes = CreditNoteRepository(session)
        note = await notes.get(credit_note_id, invoice_id)
        if note is None:
            raise ApiError(f"No credit note `{credit_note_id}` is known.", code="not_found", param="credit_note_id")
        lines = await notes.lines(credit_note_id)
    return credit_note_answer(note, lines, issued, wanted)


async def _own(session: AsyncSession, request: Request, invoice_id: str) -> Issued:
    issued = await InvoiceRepository(session).get(invoice_id, principal_of(request).tenant_id)
    if issued is None:
        raise ApiError(f"No invoice `{invoice_id}` is known.", code="not_found", param="invoice_id")
    return issued


handlers = [list_invoices, get_invoice, list_credit_notes, get_credit_note]
