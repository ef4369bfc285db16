"""Invoices: one a tenant and month, made from the ledger, checked, and never changed.

What comes late for an invoiced month (a record whose engine was away) is a correction on the next invoice: the ledger
of that month less what was invoiced of it, line by line. So it is billed once, however late it comes and whatever
committed while an invoice was made.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from zoneinfo import ZoneInfo

from sqlmodel import col, select
from sqlmodel.ext.asyncio.session import AsyncSession

from tenants.database import one_snapshot
from tenants.errors import InvalidValue, NotFound, PeriodOpen, Superseded, UnsoundInvoice
from tenants.events import emit
from tenants.invoices.lines import (
    breaches,
    cents_of,
    credit_line,
    groups_of,
    less,
    number_text,
    rounding_line,
    usage_lines,
)
from tenants.invoices.payments import payments_of
from tenants.invoices.series import lock_series
from tenants.invoices.sums import detached_invoices, ledger_amount, ledger_groups, receipts_amount
from tenants.periods import Period, month_named
from tenants.repositories import RateCardRepository
from tenants.stamps import new_id
from tenants.tables import CreditNote, Invoice, InvoiceLine, InvoicePayment, Tenant

GRACE_NS = 3600 * 10**9  # after a month's end: what its last requests left is booked by then
LATE_NS = 100 * 86_400 * 10**9  # corrections are looked for in months that ended since: journals are kept for 90 days
_SLACK_NS = 2 * 86_400 * 10**9  # a tenant that changes its zone moves the ends of its months by about a day


@dataclass(frozen=True, slots=True)
class Order:
    """``period``: YYYY-MM, or the day on which the tenant's month begins. ``force`` issues it before its time; what
    comes after goes to the next invoice."""

    tenant_id: str
    period: str
    issuer: str
    now_unix_ns: int
    force: bool = False


@dataclass(frozen=True, slots=True)
class Issued:
    """An invoice with its lines, in their order."""

    invoice: Invoice
    lines: list[InvoiceLine]


@dataclass(frozen=True, slots=True)
class Draft:
    """A checked invoice without its number. ``known``: the tenant's invoices on which it builds."""

    invoice: Invoice
    lines: list[InvoiceLine]
    known: tuple[str, ...]
    payments: Sequence[InvoicePayment] = ()


class InvoiceRepository:
    """Bound to a session, never committing."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def list_all(self, tenant_id: str) -> list[Invoice]:
        """A tenant's, by number."""
        query = select(Invoice).where(Invoice.tenant_id == tenant_id).order_by(col(Invoice.number))
        return list((await self._session.exec(query)).all())

    async def page(self, after: int, limit: int, tenant_id: str | None = None) -> list[Invoice]:
        """At most ``limit`` with a higher number, by number: everybody's, or one tenant's."""
        query = select(Invoice).where(col(Invoice.number) > after).order_by(col(Invoice.number)).limit(limit)
        if tenant_id is not None:
            query = query.where(Invoice.tenant_id == tenant_id)
        return list((await self._session.exec(query)).all())

    async def get(self, invoice_id: str, tenant_id: str | None = None) -> Issued | None:
        """None also when it is another tenant's."""
        invoice = await self._session.get(Invoice, invoice_id)
        if invoice is None or tenant_id not in (None, invoice.tenant_id):
            return None
        return Issued(invoice, await self._lines(InvoiceLine.invoice_id == invoice_id))

    async def prepare(self, order: Order) -> Draft:
        """Reads and checks, all of one moment; writes nothing, so that long sums hold nobody up: give it a session of
        its own, for reading.

        Raises NotFound (tenant), InvalidValue (period), PeriodOpen, UnsoundInvoice.
        """
        await one_snapshot(self._session)
        tenant = await self._session.get(Tenant, order.tenant_id)
        if tenant is None:
            raise NotFound(f"no tenant {order.tenant_id}")
        period = _period_of(tenant, order.period)
        known = await self.list_all(tenant.tenant_id)
        names = tuple(each.invoice_id for each in known)
        for invoice in known:
            if invoice.period == period.label:
                return Draft(invoice, [], names)
        _check_is_over(period, order)
        invoice = _head(tenant, order, _left_of(period, known))
        recent = [each for each in known if each.end_unix_ns > period.start_unix_ns - LATE_NS]
        detached = await detached_invoices(self._session, recent)
        recent = [each for each in recent if each.invoice_id not in detached]
        payments = await payments_of(self._session, invoice, recent)
        invoice.paid_cents = cents_of(sum(each.amount_picousd for each in payments))
        return Draft(invoice, await self._sound_lines(invoice, recent), names, payments)

    async def keep(self, draft: Draft) -> tuple[Issued, bool]:
        """Issues it, and whether it is new: a second draft of a month gets the first one's invoice. What was booked
        since it was prepared is late: it goes to the next one.

        Raises Superseded when another invoice or credit note of the tenant was issued since: prepare it again.
        """
        invoice, lines = draft.invoice, draft.lines
        series = await lock_series(self._session, "invoice")  # from here on there is one issuer
        known = await self.list_all(invoice.tenant_id)
        for each in known:
            if each.period == invoice.period:
                return Issued(each, await self._lines(InvoiceLine.invoice_id == each.invoice_id)), False
        owed = [line.reference for line in await self._credits(invoice.tenant_id)]
        taken = [line.reference for line in lines if line.kind == "credit"]
        if tuple(each.invoice_id for each in known) != draft.known or owed != taken:
            raise Superseded(f"another document of {invoice.tenant_id} was issued meanwhile")
        series.number += 1
        invoice.number = series.number
        self._session.add(series)
        await self._insert(draft)
        return Issued(invoice, lines), True

    async def _sound_lines(self, invoice: Invoice, known: Sequence[Invoice]) -> list[InvoiceLine]:
        """Sets the invoice's total. Raises UnsoundInvoice."""
        cards = {card.rate_card_id: card for card in await RateCardRepository(self._session).list_all()}
        lines = await self._draft(invoice, known)
        found = breaches(lines, invoice.total_cents, cards) + await self._differences(invoice, lines)
        if found:
            raise UnsoundInvoice(found)
        return lines

    async def _draft(self, invoice: Invoice, known: Sequence[Invoice]) -> list[InvoiceLine]:
        start, end = invoice.start_unix_ns, invoice.end_unix_ns
        lines = usage_lines(await ledger_groups(self._session, invoice.tenant_id, start, end), start, end)
        for earlier in known:
            lines += await self._corrections(earlier)
        lines += await self._credits(invoice.tenant_id)
        lines.append(rounding_line(lines, start, end))
        invoice.total_cents = cents_of(sum(line.amount_picousd for line in lines))
        for number, line in enumerate(lines, 1):
            line.invoice_id, line.number = invoice.invoice_id, number
        return lines

    async def _corrections(self, earlier: Invoice) -> list[InvoiceLine]:
        """What the ledger now has of an invoiced month and no invoice has."""
        start, end = earlier.start_unix_ns, earlier.end_unix_ns
        own = InvoiceLine.invoice_id == earlier.invoice_id, InvoiceLine.kind == "usage"
        invoiced = groups_of(await self._lines(*own))
        since = await self._lines(InvoiceLine.reference == earlier.invoice_id, InvoiceLine.kind == "correction")
        held = await ledger_groups(self._session, earlier.tenant_id, start, end)
        return usage_lines(less(less(held, invoiced), groups_of(since)), start, end, late_for=earlier)

    async def _credits(self, tenant_id: str) -> list[InvoiceLine]:
        """Credit notes that no invoice has taken off yet."""
        taken = select(InvoiceLine.reference).where(InvoiceLine.kind == "credit")
        open_notes = (
            select(CreditNote, Invoice)
            .join(Invoice, col(Invoice.invoice_id) == CreditNote.invoice_id)
            .where(CreditNote.tenant_id == tenant_id, col(CreditNote.credit_note_id).not_in(taken))
            .order_by(col(CreditNote.number))
        )
        return [credit_line(note, invoice) for note, invoice in (await self._session.exec(open_notes)).all()]

    async def _differences(self, invoice: Invoice, lines: Sequence[InvoiceLine]) -> list[str]:
        """Between the lines, the ledger summed at once, and the receipts: three ways to one figure."""
        span = invoice.tenant_id, invoice.start_unix_ns, invoice.end_unix_ns
        usage = sum(line.amount_picousd for line in lines if line.kind == "usage")
        everything, of_requests = await ledger_amount(self._session, *span)
        receipts = await receipts_amount(self._session, *span)
        found = [] if usage == everything else [f"the lines have {usage} picousd, the ledger {everything}"]
        if receipts != of_requests:
            found.append(
                f"the receipts have {receipts} picousd, the ledger {of_requests}: something is billed twice or not"
            )
        return found

    async def _insert(self, draft: Draft) -> None:
        invoice = draft.invoice
        self._session.add(invoice)
        await self._session.flush()
        self._session.add_all([*draft.lines, *draft.payments])
        await self._session.flush()
        told = {
            "invoice_id": invoice.invoice_id,
            "number": number_text(invoice),
            "period": invoice.period,
            "currency": invoice.currency,
            "total_cents": invoice.total_cents,
            "paid_cents": invoice.paid_cents,
        }
        await emit(self._session, invoice.tenant_id, "invoice.issued", told, once=invoice.invoice_id)

    async def _lines(self, *conditions) -> list[InvoiceLine]:
        query = select(InvoiceLine).where(*conditions).order_by(col(InvoiceLine.invoice_id), col(InvoiceLine.number))
        return list((await self._session.exec(query)).all())


def _period_of(tenant: Tenant, text: str) -> Period:
    try:
        return month_named(text, ZoneInfo(tenant.time_zone), tenant.billing_anchor_day)
    except ValueError as error:
        raise InvalidValue("period", f"is YYYY-MM, or the month's first day: {error}") from None


def _check_is_over(period: Period, order: Order) -> None:
    if order.now_unix_ns < period.start_unix_ns:
        raise InvalidValue("period", "has not begun")
    if order.now_unix_ns < period.end_unix_ns + GRACE_NS and not order.force:
        raise PeriodOpen(f"the month of {period.label} can be invoiced an hour after its end")


def _left_of(period: Period, known: Sequence[Invoice]) -> Period:
    """The month without what neighbours have of it, and with what they have left: after a change of the tenant's zone
    or anchor day its months still follow one another without a gap or an overlap. Raises InvalidValue."""
    before = [
        each.end_unix_ns
        for each in known
        if each.start_unix_ns < period.start_unix_ns and each.end_unix_ns > period.start_unix_ns - _SLACK_NS
    ]
    behind = [
        each.start_unix_ns
        for each in known
        if each.start_unix_ns >= period.start_unix_ns and each.start_unix_ns < period.end_unix_ns + _SLACK_NS
    ]
    left = Period(max(before, default=period.start_unix_ns), min(behind, default=period.end_unix_ns), period.label)
    if left.start_unix_ns >= left.end_unix_ns:
        raise InvalidValue("period", "is covered by other invoices")
    return left


def _head(tenant: Tenant, order: Order, period: Period) -> Invoice:
    return Invoice(
        invoice_id=new_id("inv"),
        number=0,
        tenant_id=tenant.tenant_id,
        period=period.label,
        start_unix_ns=period.start_unix_ns,
        end_unix_ns=period.end_unix_ns,
        issued_unix_ns=order.now_unix_ns,
        tenant_name=tenant.name,
        time_zone=tenant.time_zone,
        issuer=order.issuer,
        total_cents=0,
    )
