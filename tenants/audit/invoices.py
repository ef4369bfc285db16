"""What was invoiced against the ledger, and whether each invoice adds up: I2, I3."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any, NamedTuple

from sqlalchemy import Row, text
from sqlalchemy.ext.asyncio import AsyncConnection

from tenants.audit.detached import Detached
from tenants.audit.findings import Finding, Findings

PICOUSD_A_CENT = 10**10
_SPLIT = 10**9  # SQLite's sums overflow: quotients and remainders are added apart
_LEDGER = text(
    f"SELECT model, base_model, flow_class, meter, rate_card_id, unit_price_picousd,"
    f" sum(amount_picousd / {_SPLIT}) AS high, sum(amount_picousd % {_SPLIT}) AS low,"
    f" sum(quantity / {_SPLIT}) AS quantity_high, sum(quantity % {_SPLIT}) AS quantity_low FROM ledger_entry"
    " WHERE tenant_id = :tenant_id AND occurred_unix_ns >= :start_ns AND occurred_unix_ns < :end_ns"
    " GROUP BY model, base_model, flow_class, meter, rate_card_id, unit_price_picousd"
)
_INVOICES = text("SELECT * FROM invoice ORDER BY number")
_LINES = text("SELECT * FROM invoice_line WHERE invoice_id = :invoice_id ORDER BY number")
_CORRECTIONS = text("SELECT * FROM invoice_line WHERE reference = :invoice_id AND kind = 'correction'")
_SERIES = text("SELECT kind, number FROM document_series")
_NOTES = text("SELECT * FROM credit_note ORDER BY number")
_NOTE_LINES = text("SELECT * FROM credit_note_line WHERE credit_note_id = :credit_note_id")
_CREDITED = text("SELECT invoice_id, number, reference, amount_cents FROM invoice_line WHERE kind = 'credit'")
_PAID = text("SELECT invoice_id, month_of, amount_picousd FROM invoice_payment")
_DEBITED = text(
    f"SELECT sum(h.spent_picousd / {_SPLIT}) AS high, sum(h.spent_picousd % {_SPLIT}) AS low"
    " FROM request_record r JOIN wallet_hold h ON h.request_id = r.request_id AND h.attempt = r.attempt"
    " WHERE r.tenant_id = :tenant_id AND r.finished_unix_ns >= :start_ns AND r.finished_unix_ns < :end_ns"
    " AND h.resolved_unix_ns IS NOT NULL"
)

Key = tuple[Any, ...]


class Sums(NamedTuple):
    quantity: int
    amount_picousd: int


async def check_invoices(connection: AsyncConnection, findings: Findings, detached: Detached) -> None:
    invoices = (await connection.execute(_INVOICES)).all()
    lines: dict[tuple[str, int], Row] = {}
    for invoice in invoices:
        own = (await connection.execute(_LINES, {"invoice_id": invoice.invoice_id})).all()
        lines |= {(invoice.invoice_id, line.number): line for line in own}
        _check_sums(invoice, own, findings["I3"])
        held = await _held(connection, invoice, detached)
        await _check_ledger(connection, invoice, own, held, findings["I2"])
    _check_overlaps(invoices, findings["I2"])
    await _check_payments(connection, invoices, findings, detached)
    await _check_notes(connection, lines, findings["I3"])
    await _check_numbers(connection, findings["I3"])


def _check_sums(invoice: Row, lines: Sequence[Row], finding: Finding) -> None:
    """Lines and rounding against the total, exactly and in cents."""
    name, total = f"invoice {invoice.number}", invoice.total_cents
    finding.checked += 1
    if [line.number for line in lines] != list(range(1, len(lines) + 1)):
        finding.breach(f"{name}: its lines are not numbered 1 to {len(lines)}")
    if (cents := sum(line.amount_cents for line in lines)) != total:
        finding.breach(f"{name}: its lines and rounding are {cents} cents, its total is {total}")
    if (exact := sum(int(line.amount_picousd) for line in lines)) != total * PICOUSD_A_CENT:
        finding.breach(f"{name}: its lines and rounding are {exact} picousd, its total is {total} cents")
    for line in lines:
        amount = int(line.amount_picousd)
        if line.kind != "rounding" and round(Fraction(amount, PICOUSD_A_CENT)) != line.amount_cents:
            finding.breach(f"{name}, line {line.number}: {amount} picousd are shown as {line.amount_cents} cents")
    rounding = [int(line.amount_picousd) for line in lines if line.kind == "rounding"]
    if len(rounding) != 1 or 2 * abs(rounding[0]) > PICOUSD_A_CENT:
        finding.breach(f"{name} has not one rounding row of at most half a cent")


async def _held(connection: AsyncConnection, invoice: Row, detached: Detached) -> Mapping[Key, Sums]:
    """What the ledger has of the invoice's time, and had of it before it was detached."""
    within = {"tenant_id": invoice.tenant_id, "start_ns": invoice.start_unix_ns, "end_ns": invoice.end_unix_ns}
    held = {tuple(row[:6]): _sums_of(row) for row in await connection.execute(_LEDGER, within)}
    for key, (quantity, amount) in detached.charges.get(invoice.invoice_id, {}).items():
        there = held.get(key, Sums(0, 0))
        held[key] = Sums(there.quantity + quantity, there.amount_picousd + amount)
    return held


async def _check_ledger(
    connection: AsyncConnection, invoice: Row, lines: Sequence[Row], held: Mapping[Key, Sums], finding: Finding
) -> None:
    """Group by group. What the ledger has beyond it came later, and stands on a next invoice; less is a breach."""
    corrections = (await connection.execute(_CORRECTIONS, {"invoice_id": invoice.invoice_id})).all()
    invoiced = _by_key([line for line in lines if line.kind == "usage"] + list(corrections))
    for key, sums in invoiced.items():
        finding.checked += 1
        there = held.get(key, Sums(0, 0))
        what = f"invoice {invoice.number}: {key[3]} of {key[0]} ({key[2]})"
        if sums.amount_picousd > there.amount_picousd or sums.quantity > there.quantity:
            finding.breach(f"{what} is {sums.amount_picousd} picousd, in the ledger {there.amount_picousd}")
        if sums.quantity == there.quantity and sums.amount_picousd != there.amount_picousd:
            finding.breach(f"{what} has the ledger's quantity and not its amount")


def _sums_of(row: Row) -> Sums:
    quantity = int(row.quantity_high) * _SPLIT + int(row.quantity_low)
    return Sums(quantity, int(row.high) * _SPLIT + int(row.low))


def _by_key(lines: Sequence[Row]) -> Mapping[Key, Sums]:
    found: dict[Key, Sums] = defaultdict(lambda: Sums(0, 0))
    for line in lines:
        key = (*(line.model, line.base_model, line.flow_class, line.meter, line.rate_card_id, line.unit_price_picousd),)
        before = found[key]
        found[key] = Sums(before.quantity + int(line.quantity), before.amount_picousd + int(line.amount_picousd))
    return found


def _check_overlaps(invoices: Sequence[Row], finding: Finding) -> None:
    """No moment of a tenant stands on two invoices."""
    by_tenant = sorted(invoices, key=lambda each: (each.tenant_id, each.start_unix_ns))
    for one, next_one in pairwise(by_tenant):
        if one.tenant_id == next_one.tenant_id and one.end_unix_ns > next_one.start_unix_ns:
            finding.breach(f"invoices {one.number} and {next_one.number} of {one.tenant_id} overlap")


async def _check_payments(
    connection: AsyncConnection, invoices: Sequence[Row], findings: Findings, detached: Detached
) -> None:
    """An invoice says that its payments were made; together they are no more than credit was debited for a month."""
    shown: dict[str, int] = defaultdict(int)
    of_month: dict[str, int] = defaultdict(int)
    for payment in await connection.execute(_PAID):
        shown[payment.invoice_id] += int(payment.amount_picousd)
        of_month[payment.month_of] += int(payment.amount_picousd)
    for invoice in invoices:
        exact = shown[invoice.invoice_id]
        if round(Fraction(exact, PICOUSD_A_CENT)) != invoice.paid_cents:
            words = f"{invoice.paid_cents} cents were paid from credit, its payments are {exact} picousd"
            findings["I3"].breach(f"invoice {invoice.number}: {words}")
        if paid := of_month[invoice.invoice_id]:
            debited = await _debited(connection, invoice) + detached.debits.get(invoice.invoice_id, 0)
            if paid > debited:
                words = f"{paid} picousd of its month were paid from credit, {debited} were debited"
                findings["I2"].breach(f"invoice {invoice.number}: {words}")


async def _debited(connection: AsyncConnection, invoice: Row) -> int:
    within = {"tenant_id": invoice.tenant_id, "start_ns": invoice.start_unix_ns, "end_ns": invoice.end_unix_ns}
    row = (await connection.execute(_DEBITED, within)).one()
    return int(row.high or 0) * _SPLIT + int(row.low or 0)


async def _check_notes(connection: AsyncConnection, lines: Mapping[tuple[str, int], Row], finding: Finding) -> None:
    """A credit note adds up, gives back no more than was invoiced, and was taken off at most once, wholly."""
    given: dict[tuple[str, int], int] = defaultdict(int)
    totals: dict[str, int] = {}
    for note in (await connection.execute(_NOTES)).all():
        finding.checked += 1
        totals[note.credit_note_id] = note.total_cents
        own = (await connection.execute(_NOTE_LINES, {"credit_note_id": note.credit_note_id})).all()
        if (cents := sum(line.amount_cents for line in own)) != note.total_cents or note.total_cents <= 0:
            finding.breach(f"credit note {note.number}: its lines are {cents} cents, its total is {note.total_cents}")
        for line in own:
            given[note.invoice_id, line.invoice_line] += line.amount_cents
    for key, cents in given.items():
        if key not in lines or abs(cents) > abs(lines[key].amount_cents):
            finding.breach(f"{cents} cents were given back of line {key[1]} of {key[0]}, which has less")
    taken: set[str] = set()
    for line in await connection.execute(_CREDITED):
        if line.reference in taken or -line.amount_cents != totals.get(line.reference):
            finding.breach(f"line {line.number} of {line.invoice_id} is not credit note {line.reference}, once")
        taken.add(line.reference)


async def _check_numbers(connection: AsyncConnection, finding: Finding) -> None:
    """Documents are numbered without a gap: one that is gone shows."""
    given = {row.kind: row.number for row in await connection.execute(_SERIES)}
    for table, kind in (("invoice", "invoice"), ("credit_note", "credit_note")):
        numbers = [row.number for row in await connection.execute(text(f"SELECT number FROM {table} ORDER BY number"))]
        if numbers != list(range(1, given.get(kind, 0) + 1)):
            finding.breach(f"{len(numbers)} of {given.get(kind, 0)} numbered {kind.replace('_', ' ')}s are there")
