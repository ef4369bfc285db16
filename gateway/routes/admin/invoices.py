"""/admin/v1/invoices: issue, show, give back. Nothing here is ever changed or taken away."""

import contextlib
import time
from typing import Annotated, Any

import msgspec
from litestar import Controller, Request, Response, get, post
from litestar.datastructures import State
from litestar.params import FromPath, JSONBody

from gateway.administration import change, found, needs, session_of
from gateway.errors import ApiError
from gateway.views.documents import format_of
from gateway.views.invoices import (
    INVOICE_FORMATS,
    NOTE_FORMATS,
    credit_note_answer,
    credit_note_body,
    focus_answer,
    invoice_answer,
    invoice_body,
    invoice_head,
)
from gateway.views.rows import Body, listed
from tenants.audit_log import Change
from tenants.database import REPORT_S
from tenants.errors import Superseded
from tenants.invoices.credit_notes import CreditNoteRepository
from tenants.invoices.invoices import InvoiceRepository, Issued, Order

MAX_INVOICES = 1000  # of a page
MAX_TRIES = 3


class InvoiceQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Invoices with a number above ``after``; None: everybody's."""

    tenant_id: str | None = None
    after: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)] = 0
    limit: Annotated[int, msgspec.Meta(ge=1, le=MAX_INVOICES)] = 100


class NewInvoice(msgspec.Struct, forbid_unknown_fields=True):
    """``tenant``: its id. ``period``: YYYY-MM, or the day on which its month begins. ``force`` issues before the
    month is over: what comes later goes to the next invoice."""

    tenant: str
    period: str
    force: bool = False


class CreditedLine(msgspec.Struct, forbid_unknown_fields=True):
    line: int
    amount_cents: Annotated[int, msgspec.Meta(gt=0, lt=1 << 62)]


class NewCreditNote(msgspec.Struct, forbid_unknown_fields=True):
    """Without ``lines``: all that is left of the invoice."""

    reason: str
    lines: list[CreditedLine] | None = None


class Invoices(Controller):
    path = "/invoices"

    @get(guards=[needs("billing")])
    async def page(self, request: Request, state: State) -> Body:
        """By number; ``next_after`` asks for the next page."""
        query = msgspec.convert(dict(request.query_params), InvoiceQuery, strict=False)
        async with session_of(state) as session:
            found = await InvoiceRepository(session).page(query.after, query.limit + 1, query.tenant_id)
        shown, more = found[: query.limit], len(found) > query.limit
        bodies = [msgspec.to_builtins(invoice_head(invoice)) for invoice in shown]
        return listed(bodies, has_more=more, next_after=shown[-1].number if more else None)

    @post(guards=[needs("admin")])
    async def issue(self, request: Request, state: State, data: JSONBody[NewInvoice]) -> Response[Any]:
        """201 with the month's invoice; 200 when it was issued before."""
        order = Order(data.tenant, data.period, state.ops.issuer, time.time_ns(), data.force)
        for _ in range(MAX_TRIES):
            with contextlib.suppress(Superseded):
                issued, is_new = await _issue(request, state, order)
                return Response(invoice_body(issued), status_code=201 if is_new else 200)
        raise ApiError("Other invoices of the tenant are being issued; try again.", code="store_unavailable")

    @get("/{invoice_id:str}", guards=[needs("billing")])
    async def show(self, request: Request, state: State, invoice_id: FromPath[str]) -> Response[Any]:
        """As ``format`` says: json, csv or html."""
        wanted = format_of(request, *INVOICE_FORMATS)
        async with session_of(state) as session:
            issued = await _invoice(session, invoice_id)
        return invoice_answer(issued, wanted)

    @get("/{invoice_id:str}/focus", guards=[needs("billing")])
    async def focus(self, state: State, invoice_id: FromPath[str]) -> Response[str]:
        """A CSV file of FinOps' FOCUS columns. What our own checker finds wrong is not given out."""
        async with session_of(state) as session:
            issued = await _invoice(session, invoice_id)
        return focus_answer(issued)

    @get("/{invoice_id:str}/credit-notes", guards=[needs("billing")])
    async def credit_notes(self, state: State, invoice_id: FromPath[str]) -> Body:
        async with session_of(state) as session:
            await _invoice(session, invoice_id)
            every = await CreditNoteRepository(session).list_of(invoice_id)
        return listed([msgspec.to_builtins(credit_note_body(note, lines)) for note, lines in every])

    @get("/{invoice_id:str}/credit-notes/{credit_note_id:str}", guards=[needs("billing")])
    async def credit_note(
        self, request: Request, state: State, invoice_id: FromPath[str], credit_note_id: FromPath[str]
    ) -> Response[Any]:
        """As ``format`` says: json or html."""
        wanted = format_of(request, *NOTE_FORMATS)
        async with session_of(state) as session:
            issued = await _invoice(session, invoice_id)
            notes = CreditNoteRepository(session)
            note = found(await notes.get(credit_note_id, invoice_id), f"no credit note {credit_note_id}")
            lines = await notes.lines(credit_note_id)
        return credit_note_answer(note, lines, issued, wanted)

    @post("/{invoice_id:str}/credit-notes", guards=[needs("admin")])
    async def give_back(self, request: Request, invoice_id: FromPath[str], data: JSONBody[NewCreditNote]) -> Body:
        """The tenant's next invoice takes it off."""
        cents = None if data.lines is None else {line.line: line.amount_cents for line in data.lines}

        async def work(session) -> tuple[Body, Change]:
            notes = CreditNoteRepository(session)
            note = await notes.issue(await _invoice(session, invoice_id), cents, data.reason, time.time_ns())
            body = msgspec.to_builtins(credit_note_body(note, await notes.lines(note.credit_note_id)))
            return body, Change("credit_note.issue", note.credit_note_id, None, body)

        return await change(request, work)


async def _issue(request: Request, state: State, order: Order) -> tuple[Issued, bool]:
    """Raises Superseded."""
    async with session_of(state, REPORT_S) as session:
        draft = await InvoiceRepository(session).prepare(order)

    async def work(session) -> tuple[tuple[Issued, bool], Change | None]:
        issued, is_new = await InvoiceRepository(session).keep(draft)
        body = msgspec.to_builtins(invoice_head(issued.invoice))
        made = Change("invoice.issue", issued.invoice.invoice_id, None, body) if is_new else None
        return (issued, is_new), made

    return await change(request, work)


async def _invoice(session, invoice_id: str) -> Issued:
    return found(await InvoiceRepository(session).get(invoice_id), f"no invoice {invoice_id}")
