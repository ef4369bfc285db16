"""Credit notes: what is given back of an issued invoice. The tenant's next invoice takes them off."""

from collections.abc import Mapping

from sqlalchemy import func
from sqlmodel import col, select
from sqlmodel.ext.asyncio.session import AsyncSession

from tenants.errors import InvalidValue
from tenants.invoices.invoices import Issued
from tenants.invoices.series import lock_series
from tenants.stamps import new_id
from tenants.tables import CreditNote, CreditNoteLine, InvoiceLine
from tenants.tables.invoices import MAX_TEXT

_CHARGES = ("usage", "correction")


class CreditNoteRepository:
    """Bound to a session, never committing."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def list_of(self, invoice_id: str) -> list[tuple[CreditNote, list[CreditNoteLine]]]:
        """With their lines, by number."""
        query = select(CreditNote).where(CreditNote.invoice_id == invoice_id).order_by(col(CreditNote.number))
        return [(note, await self.lines(note.credit_note_id)) for note in (await self._session.exec(query)).all()]

    async def get(self, credit_note_id: str, invoice_id: str) -> CreditNote | None:
        query = select(CreditNote).where(CreditNote.credit_note_id == credit_note_id)
        return (await self._session.exec(query.where(CreditNote.invoice_id == invoice_id))).first()

    async def lines(self, credit_note_id: str) -> list[CreditNoteLine]:
        query = select(CreditNoteLine).where(CreditNoteLine.credit_note_id == credit_note_id)
        return list((await self._session.exec(query.order_by(col(CreditNoteLine.invoice_line)))).all())

    async def issue(self, issued: Issued, cents: Mapping[int, int] | None, reason: str, now_unix_ns: int) -> CreditNote:
        """``cents``: by the number of an invoice's line of usage; None gives back all that is left of the invoice but
        for credits that it took off itself. Raises InvalidValue."""
        if not 0 < len(reason) <= MAX_TEXT:
            raise InvalidValue("reason", f"is a text of at most {MAX_TEXT} characters")
        series = await lock_series(self._session, "credit_note")  # from here on nobody else gives anything back
        left = await self._left(issued)
        given = left if cents is None else _checked(cents, left, issued.lines)
        given = {number: amount for number, amount in given.items() if amount}
        if sum(given.values()) <= 0:
            raise InvalidValue("lines", "nothing is left to give back")
        series.number += 1
        self._session.add(series)
        return await self._keep(issued, given, reason, now_unix_ns, series.number)

    async def _left(self, issued: Issued) -> dict[int, int]:
        """Cents by line: as invoiced less what earlier notes have given back."""
        notes = select(CreditNote.credit_note_id).where(CreditNote.invoice_id == issued.invoice.invoice_id)
        sums = (
            select(CreditNoteLine.invoice_line, func.sum(CreditNoteLine.amount_cents))
            .where(col(CreditNoteLine.credit_note_id).in_(notes))
            .group_by(col(CreditNoteLine.invoice_line))
        )
        given = {number: int(amount) for number, amount in (await self._session.exec(sums)).all()}
        return {
            line.number: line.amount_cents - given.get(line.number, 0) for line in issued.lines if line.kind != "credit"
        }

    async def _keep(
        self, issued: Issued, given: Mapping[int, int], reason: str, now_unix_ns: int, number: int
    ) -> CreditNote:
        note = CreditNote(
            credit_note_id=new_id("crn"),
            number=number,
            invoice_id=issued.invoice.invoice_id,
            tenant_id=issued.invoice.tenant_id,
            reason=reason,
            issued_unix_ns=now_unix_ns,
            currency=issued.invoice.currency,
            total_cents=sum(given.values()),
        )
        self._session.add(note)
        await self._session.flush()
        for line, amount in given.items():
            self._session.add(
                CreditNoteLine(credit_note_id=note.credit_note_id, invoice_line=line, amount_cents=amount)
            )
        await self._session.flush()
        return note


def _checked(cents: Mapping[int, int], left: Mapping[int, int], lines: list[InvoiceLine]) -> Mapping[int, int]:
    charges = {line.number for line in lines if line.kind in _CHARGES}
    for number, amount in cents.items():
        if number not in charges:
            raise InvalidValue("lines", f"the invoice has no line of usage {number}")
        if not 0 < amount <= left[number]:
            raise InvalidValue("lines", f"of line {number} at most {left[number]} cents are left to give back")
    return cents
