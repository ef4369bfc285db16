"""Invoices of tenants that pay in advance: what their credit has paid, and what is due."""

import csv
import io
from decimal import Decimal

import pytest
from invoicing import HOUR, book, instant, issue, make_tenant, publish, read, request
from tampering import tamper

from gateway.views.invoices import invoice_body
from tenants.audit import audit, begin_snapshot
from tenants.invoices.credit_notes import CreditNoteRepository
from tenants.invoices.focus import focus_rows
from tenants.invoices.focus_check import check
from tenants.invoices.lines import cents_of, number_text
from tenants.invoices.text import dollars, invoice_csv, invoice_page
from tenants.ledger import Ledger
from tenants.pricing import ANY
from tenants.quota.wallet import Hold, WalletFold, WalletRepository
from tenants.tables import Tenant

NOVEMBER = instant("2026-11-10")
PRICES = {("requests", ANY, ANY): 33 * 10**9 + 7}  # a little more than three cents each
PICOUSD = 33 * 10**9 + 7 + 4 * 50_000 + 16 * 5_000 + 5 * 100_000  # of one request


async def use_credit(database, tenant_id: str, *requests) -> None:
    """Holds, and the records that resolve them."""
    async with database.transaction() as session:
        for one in requests:
            assert await WalletRepository(session).reserve(Hold(tenant_id, one.context.request_id, 0, "g", 10**11))
    async with database.transaction() as session:
        await Ledger([WalletFold()]).post(session, requests, {})


async def grant(database, tenant_id: str, picousd: int = 10**13) -> None:
    async with database.transaction() as session:
        await WalletRepository(session).grant(await session.get(Tenant, tenant_id), picousd, f"{picousd}")


async def breaches(database) -> list[str]:
    async with database.session() as session:
        await begin_snapshot(session)
        found = (await audit(session, [])).findings
    return [f"{each.invariant}: {words}" for each in found for words in each.examples if each.invariant in ("I2", "I3")]


def shown(issued) -> tuple[str, str, str]:
    """Total, paid, due: the same as JSON, CSV and a page."""
    body = invoice_body(issued)
    rows = list(csv.DictReader(io.StringIO(invoice_csv(issued), newline="")))
    payments = [row for row in rows if row["kind"] == "payment"]
    due = sum(Decimal(row["amount"]) for row in rows)
    assert due == Decimal(body.amount_due)
    assert sum(int(row["amount_picousd"]) for row in rows) == int(due * 10**12)
    assert -sum(Decimal(row["amount"]) for row in payments) == Decimal(body.paid_from_credit)
    assert Decimal(body.total) == Decimal(body.paid_from_credit) + Decimal(body.amount_due)
    page = invoice_page(issued)
    assert ("Paid from prepaid credit" in page) == bool(payments)
    assert not payments or f"{body.paid_from_credit} USD" in page
    payable = {number_text(issued.invoice): Decimal(body.total)}
    assert check(focus_rows(issued), payable) == []
    return body.total, body.paid_from_credit, body.amount_due


def test_what_credit_has_paid_is_not_due_and_what_came_before_it_is(with_database):
    async def body(database):
        tenant_id, card = await make_tenant(database), await publish(database, prices=PRICES)
        await book(database, request(tenant_id, card, NOVEMBER))
        await grant(database, tenant_id)
        await use_credit(database, tenant_id, *(request(tenant_id, card, NOVEMBER + n * HOUR) for n in range(1, 6)))
        issued = await read(database, (await issue(database, tenant_id, "2026-11")).invoice.invoice_id)

        total, paid = cents_of(6 * PICOUSD), cents_of(5 * PICOUSD)
        assert shown(issued) == (dollars(total), dollars(paid), dollars(total - paid))
        assert await breaches(database) == []

    with_database(body)


def test_nothing_is_due_of_a_month_that_was_paid_in_advance_and_late_usage_is_paid_where_it_is_corrected(with_database):
    async def body(database):
        tenant_id, card = await make_tenant(database), await publish(database, prices=PRICES)
        await grant(database, tenant_id)
        await use_credit(database, tenant_id, *(request(tenant_id, card, NOVEMBER + n * HOUR) for n in range(3)))
        november = await issue(database, tenant_id, "2026-11")
        await use_credit(database, tenant_id, request(tenant_id, card, NOVEMBER))
        await use_credit(database, tenant_id, request(tenant_id, card, instant("2026-12-03")))
        december = await issue(database, tenant_id, "2026-12")
        january = await issue(database, tenant_id, "2027-01")

        assert shown(november) == (dollars(cents_of(3 * PICOUSD)), dollars(cents_of(3 * PICOUSD)), "0.00")
        assert shown(december) == (dollars(cents_of(2 * PICOUSD)), dollars(cents_of(2 * PICOUSD)), "0.00")
        assert shown(january) == ("0.00", "0.00", "0.00")
        assert await breaches(database) == []

    with_database(body)


def test_what_is_given_back_of_a_prepaid_month_is_owed_to_the_tenant(with_database):
    async def body(database):
        tenant_id, card = await make_tenant(database), await publish(database, prices=PRICES)
        await grant(database, tenant_id)
        await use_credit(database, tenant_id, request(tenant_id, card, NOVEMBER))
        november = await issue(database, tenant_id, "2026-11")
        async with database.transaction() as session:
            await CreditNoteRepository(session).issue(november, None, "we were down", instant("2026-12-01"))
        await use_credit(database, tenant_id, request(tenant_id, card, instant("2026-12-03")))

        assert shown(await issue(database, tenant_id, "2026-12")) == ("0.00", "0.03", "-0.03")
        assert await breaches(database) == []

    with_database(body)


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("UPDATE invoice SET paid_cents = paid_cents + 1", "I3: invoice 1: 4 cents were paid from credit"),
        (
            "UPDATE invoice_payment SET amount_picousd = 40000000000; UPDATE invoice SET paid_cents = 4",
            "I2: invoice 1: 40000000000 picousd of its month were paid from credit",
        ),
    ],
)
def test_a_payment_that_was_never_debited_is_found(with_database, statement: str, words: str):
    async def body(database):
        tenant_id, card = await make_tenant(database), await publish(database, prices=PRICES)
        await grant(database, tenant_id)
        await use_credit(database, tenant_id, request(tenant_id, card, NOVEMBER))
        await issue(database, tenant_id, "2026-11")
        await tamper(database, *statement.split("; "))

        found = await breaches(database)
        assert any(words in each for each in found), found

    with_database(body)
