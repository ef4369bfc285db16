"""Invoices: what is on them, what they are held to, what comes after them."""

import asyncio
import random
from collections import Counter
from decimal import ROUND_HALF_EVEN, Decimal

import pytest
from invoicing import (
    DAY,
    HOUR,
    book,
    enormous,
    instant,
    issue,
    keep,
    make_tenant,
    prepare,
    publish,
    random_requests,
    read,
    request,
)
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlmodel import select
from tampering import tamper

from tenants.errors import InvalidValue, NotFound, PeriodOpen, Superseded, UnsoundInvoice
from tenants.invoices.credit_notes import CreditNoteRepository
from tenants.invoices.invoices import InvoiceRepository, Issued, Order
from tenants.invoices.lines import cents_of
from tenants.pricing import ANY, MAX_PRICE_PICOUSD, METERS
from tenants.repositories import TenantRepository
from tenants.tables import Event, LedgerEntry

NOVEMBER = instant("2026-11-01"), instant("2026-12-01")


def by_kind(issued, kind: str):
    return [line for line in issued.lines if line.kind == kind]


def exact(lines) -> int:
    return sum(line.amount_picousd for line in lines)


async def ledger(database, tenant_id: str, start: int = 0, end: int = 1 << 62) -> list[LedgerEntry]:
    async with database.session() as session:
        entries = (await session.exec(select(LedgerEntry).where(LedgerEntry.tenant_id == tenant_id))).all()
    return [entry for entry in entries if start <= entry.occurred_unix_ns < end]


async def give_back(database, issued, cents=None, reason="we were down"):
    async with database.transaction() as session:
        return await CreditNoteRepository(session).issue(issued, cents, reason, instant("2027-01-01"))


def test_an_invoice_has_a_line_for_each_model_class_meter_and_price_and_sums_to_the_ledger(with_database):
    async def body(database):
        tenant, other, card = await make_tenant(database), await make_tenant(database, "other"), await publish(database)
        dear = await publish(database, "2026-11-16", {("output_tokens", ANY, "batch"): 123_457})
        rng = random.Random(5)
        middle = instant("2026-11-16")
        await book(database, *random_requests(rng, tenant, card, NOVEMBER[0], middle, 60))
        await book(database, *random_requests(rng, tenant, dear, middle, NOVEMBER[1], 60))
        await book(database, *random_requests(rng, other, card, *NOVEMBER, 5))
        await book(database, request(tenant, card, NOVEMBER[0] - 1), request(tenant, card, NOVEMBER[1]))

        issued = await issue(database, tenant, "2026-11")

        entries = await ledger(database, tenant, *NOVEMBER)
        quantities, amounts = Counter(), Counter()
        for entry in entries:
            key = entry.model, entry.flow_class, entry.meter, entry.rate_card_id, entry.unit_price_picousd
            quantities[key] += entry.quantity
            amounts[key] += entry.amount_picousd
        lines = by_kind(issued, "usage")
        keys = [(line.model, line.flow_class, line.meter, line.rate_card_id, line.unit_price_picousd) for line in lines]
        assert {key: line.quantity for key, line in zip(keys, lines, strict=True)} == dict(quantities)
        assert {key: line.amount_picousd for key, line in zip(keys, lines, strict=True)} == dict(amounts)
        assert len(keys) == len(set(keys)) > 40
        assert exact(issued.lines) == issued.invoice.total_cents * 10**10
        assert sum(line.amount_cents for line in issued.lines) == issued.invoice.total_cents
        for line in lines:
            cents = (Decimal(line.amount_picousd) / 10**10).quantize(Decimal(1), ROUND_HALF_EVEN)
            assert line.amount_cents == cents
        (rounding,) = by_kind(issued, "rounding")
        assert issued.lines[-1] is rounding
        assert abs(rounding.amount_picousd) <= 5 * 10**9
        assert [line.number for line in issued.lines] == list(range(1, len(issued.lines) + 1))
        kept = await read(database, issued.invoice.invoice_id)
        assert [line.model_dump() for line in kept.lines] == [line.model_dump() for line in issued.lines]
        assert kept.invoice == issued.invoice

    with_database(body)


def test_half_a_cent_is_rounded_to_the_even_one():
    half = 5 * 10**9
    amounts = [half, 3 * half, 5 * half, half - 1, half + 1, -half, -3 * half, 0, 10**32 + half]
    assert [cents_of(amount) for amount in amounts] == [0, 2, 2, 0, 1, 0, -2, 0, 10**22]


def test_amounts_above_ten_million_dollars_are_exact(with_database):
    async def body(database):
        tenant = await make_tenant(database)
        card = await publish(database, prices={(meter, ANY, ANY): MAX_PRICE_PICOUSD - 1 for meter in METERS})
        await book(database, *(enormous(tenant, card, NOVEMBER[0] + number) for number in range(3)))

        issued = await issue(database, tenant, "2026-11")

        entries = await ledger(database, tenant)
        total = sum(entry.amount_picousd for entry in entries)
        assert total > 20 * 10**6 * 10**12 > 1 << 63
        assert exact(by_kind(issued, "usage")) == total
        assert issued.invoice.total_cents == cents_of(total)
        kept = await read(database, issued.invoice.invoice_id)
        assert exact(kept.lines) == issued.invoice.total_cents * 10**10

    with_database(body)


def test_a_month_without_a_request_is_an_invoice_of_nothing(with_database):
    async def body(database):
        issued = await issue(database, await make_tenant(database), "2026-11")

        assert [(line.kind, line.amount_picousd) for line in issued.lines] == [("rounding", 0)]
        assert issued.invoice.total_cents == 0

    with_database(body)


def test_a_month_is_invoiced_once_and_numbers_have_no_gaps(with_database):
    async def body(database):
        one, two = await make_tenant(database), await make_tenant(database, "two")
        first = await issue(database, one, "2026-11")
        again = await issue(database, one, "2026-11-01", now="2041-01-01")
        with pytest.raises(InvalidValue):
            await issue(database, one, "2026-11-02")
        second = await issue(database, two, "2026-11")
        third = await issue(database, one, "2026-12")

        assert again.invoice.invoice_id == first.invoice.invoice_id
        assert [line.model_dump() for line in again.lines] == [line.model_dump() for line in first.lines]
        assert [each.invoice.number for each in (first, second, third)] == [1, 2, 3]
        async with database.session() as session:
            events = (await session.exec(select(Event))).all()
        assert sorted((event.tenant_id, event.kind) for event in events) == sorted(
            [(one, "invoice.issued"), (one, "invoice.issued"), (two, "invoice.issued")]
        )

    with_database(body)


def test_a_month_is_not_invoiced_before_an_hour_after_its_end_unless_forced(with_database):
    async def body(database):
        tenant = await make_tenant(database, time_zone="Asia/Kolkata")
        end = instant("2026-12-01", "Asia/Kolkata")
        for now, force, error in [
            ("2026-12-01T00:59:59", False, PeriodOpen),
            ("2026-11-15", False, PeriodOpen),
            ("2026-10-15", True, InvalidValue),
        ]:
            with pytest.raises(error):
                await issue(database, tenant, "2026-11", now=now, zone="Asia/Kolkata", force=force)
        issued = await issue(database, tenant, "2026-11", now="2026-12-01T01:00:00", zone="Asia/Kolkata")
        assert issued.invoice.end_unix_ns == end

    with_database(body)


def test_invoices_that_are_issued_at_once_have_numbers_without_gaps_and_a_month_has_one(with_database):
    async def body(database):
        tenants = [await make_tenant(database, f"tenant {number}") for number in range(3)]
        months = [(tenant, month) for tenant in tenants for month in ("2026-11", "2026-11", "2026-12")]
        done = await asyncio.gather(*(issue(database, *each) for each in months), return_exceptions=True)
        for each, outcome in zip(months, done, strict=True):
            if isinstance(outcome, Superseded):  # the tenant's other month came between
                await issue(database, *each)
            else:
                assert isinstance(outcome, Issued)
        async with database.session() as session:
            page = await InvoiceRepository(session).page(0, 100)

        assert [invoice.number for invoice in page] == [1, 2, 3, 4, 5, 6]
        assert len({(invoice.tenant_id, invoice.period) for invoice in page}) == 6

    with_database(body)


def test_a_draft_that_a_credit_note_overtook_is_not_issued_and_one_that_usage_overtook_is(with_database):
    async def body(database):
        tenant = await make_tenant(database)
        card = await publish(database, prices={("requests", ANY, ANY): 10**11})
        await book(database, request(tenant, card, NOVEMBER[0]))
        november = await issue(database, tenant, "2026-11")
        order = Order(tenant, "2026-12", "us", instant("2027-02-01"))
        draft = await prepare(database, order)
        await give_back(database, november)
        with pytest.raises(Superseded):
            await keep(database, draft)
        draft = await prepare(database, order)
        await book(database, request(tenant, card, instant("2026-12-05")))
        (december, _), january = await keep(database, draft), await issue(database, tenant, "2027-01")

        assert [line.kind for line in december.lines] == ["credit", "rounding"]
        assert exact(by_kind(january, "correction")) == exact(by_kind(november, "usage"))

    with_database(body)


def test_a_tenant_or_month_that_is_not_there_is_refused(with_database):
    async def body(database):
        tenant = await make_tenant(database)
        with pytest.raises(NotFound):
            await issue(database, "ten_0", "2026-11")
        for period in ("2026-13", "november", "", "2026", "2026-11-31", "999999-01"):
            with pytest.raises(InvalidValue):
                await issue(database, tenant, period)

    with_database(body)


# ── what comes after ─────────────────────────────────────────────────────────────────────────────


def test_a_price_change_leaves_issued_lines_and_rates_the_period_again_to_the_same_ones(with_database):
    async def body(database):
        tenant, card = await make_tenant(database), await publish(database)
        await book(database, *random_requests(random.Random(1), tenant, card, *NOVEMBER, 30))
        issued = await issue(database, tenant, "2026-11")
        await publish(database, "2026-12-01", {(meter, ANY, ANY): 7 for meter in METERS})

        kept = await read(database, issued.invoice.invoice_id)
        await tamper(database, "DELETE FROM invoice_line", "DELETE FROM invoice")  # as if it had never been issued
        rated_again = await issue(database, tenant, "2026-11")

        without_id = {"invoice_id"}
        lines = [line.model_dump(exclude=without_id) for line in issued.lines]
        assert [line.model_dump(exclude=without_id) for line in kept.lines] == lines
        assert [line.model_dump(exclude=without_id) for line in rated_again.lines] == lines

    with_database(body)


def test_what_comes_late_is_a_correction_on_the_next_invoice_once(with_database):
    async def body(database):
        tenant, card = await make_tenant(database), await publish(database)
        rng = random.Random(2)
        await book(database, *random_requests(rng, tenant, card, *NOVEMBER, 20))
        november = await issue(database, tenant, "2026-11")
        late = list(random_requests(rng, tenant, card, *NOVEMBER, 7))
        december = instant("2026-12-10")
        await book(database, *late, request(tenant, card, december))
        second = await issue(database, tenant, "2026-12")
        later = request(tenant, card, NOVEMBER[0] + HOUR)
        await book(database, later)
        third = await issue(database, tenant, "2027-01")
        fourth = await issue(database, tenant, "2027-02")

        assert [len(by_kind(each, "correction")) > 0 for each in (november, second, third, fourth)] == [
            False, True, True, False
        ]  # fmt: skip
        late_ids = {each.context.request_id for each in late}
        entries = await ledger(database, tenant)
        assert exact(by_kind(second, "correction")) == sum(
            e.amount_picousd for e in entries if e.request_id in late_ids
        )
        assert {line.reference for line in by_kind(second, "correction")} == {november.invoice.invoice_id}
        assert {(line.start_unix_ns, line.end_unix_ns) for line in by_kind(second, "correction")} == {NOVEMBER}
        every = [line for each in (november, second, third, fourth) for line in each.lines]
        billed = [line for line in every if line.kind in ("usage", "correction")]
        assert exact(billed) == sum(entry.amount_picousd for entry in entries)

    with_database(body)


def test_a_forced_invoice_leaves_the_rest_of_its_month_to_the_next_one(with_database):
    async def body(database):
        tenant, card = await make_tenant(database), await publish(database)
        await book(database, request(tenant, card, instant("2026-11-10")))
        november = await issue(database, tenant, "2026-11", now="2026-11-15", force=True)
        await book(database, request(tenant, card, instant("2026-11-20")))
        december = await issue(database, tenant, "2026-12")

        assert exact(by_kind(november, "usage")) == exact(by_kind(december, "correction")) == 2_100_000

    with_database(body)


def test_months_follow_one_another_when_a_tenant_moves_to_another_zone(with_database):
    async def body(database):
        tenant, card = await make_tenant(database), await publish(database)
        start, end = instant("2026-10-01"), instant("2027-03-01", "America/Los_Angeles")
        await book(database, *(request(tenant, card, at) for at in range(start, end, 5 * HOUR)))
        months = [await issue(database, tenant, "2026-10")]
        for zone, month in [
            ("Asia/Kolkata", "2026-11"),
            ("America/Los_Angeles", "2026-12"),
            ("America/Los_Angeles", "2027-01"),
        ]:
            async with database.transaction() as session:
                await TenantRepository(session).set_time_zone(tenant, zone)
            months.append(await issue(database, tenant, month))
        months.append(await issue(database, tenant, "2027-02"))

        spans = [(each.invoice.start_unix_ns, each.invoice.end_unix_ns) for each in months]
        assert [before[1] for before in spans[:-1]] == [after[0] for after in spans[1:]]
        assert (spans[0][0], spans[-1][1]) == (start, end)
        assert not any(by_kind(each, "correction") for each in months)
        assert exact(line for each in months for line in by_kind(each, "usage")) == sum(
            entry.amount_picousd for entry in await ledger(database, tenant)
        )

    with_database(body)


def test_months_follow_one_another_when_they_begin_on_another_day(with_database):
    async def body(database):
        tenant, card = await make_tenant(database), await publish(database)
        start, end = instant("2026-10-01"), instant("2027-03-01")
        await book(database, *(request(tenant, card, at) for at in range(start, end, 5 * HOUR)))
        months = []
        for day, month in [
            *((1, "2026-10"), (15, "2026-10"), (15, "2026-11"), (31, "2026-11"), (31, "2026-12"), (31, "2027-01")),
            (1, "2027-02"),
        ]:
            async with database.transaction() as session:
                await TenantRepository(session).set_billing_anchor_day(tenant, day)
            months.append(await issue(database, tenant, month))

        begins = [each.invoice.start_unix_ns for each in months]
        days = ("2026-10-01", "2026-11-01", "2026-11-15", "2026-12-15", "2026-12-31", "2027-01-31", "2027-02-28")
        assert begins == list(map(instant, days))
        assert [each.invoice.end_unix_ns for each in months] == [*begins[1:], end]
        assert not any(by_kind(each, "correction") for each in months)
        assert exact(line for each in months for line in by_kind(each, "usage")) == sum(
            entry.amount_picousd for entry in await ledger(database, tenant)
        )

    with_database(body)


# ── credit notes ─────────────────────────────────────────────────────────────────────────────────


def test_a_credit_note_is_taken_off_the_next_invoice_once(with_database):
    async def body(database):
        tenant = await make_tenant(database)
        card = await publish(database, prices={("requests", ANY, ANY): 10**11})
        await book(database, *(request(tenant, card, at) for at in range(NOVEMBER[0], NOVEMBER[1], DAY)))
        november = await issue(database, tenant, "2026-11")
        line = next(line for line in november.lines if line.meter == "requests")
        part = await give_back(database, november, {line.number: 50})
        rest = await give_back(database, november)
        with pytest.raises(InvalidValue):
            await give_back(database, november)
        await book(database, request(tenant, card, instant("2026-12-24")))
        december = await issue(database, tenant, "2026-12")
        january = await issue(database, tenant, "2027-01")

        assert (part.number, rest.number) == (1, 2)
        assert part.total_cents + rest.total_cents == november.invoice.total_cents == 300
        assert [(line.reference, line.amount_cents) for line in by_kind(december, "credit")] == [
            (part.credit_note_id, -50), (rest.credit_note_id, -250)
        ]  # fmt: skip
        assert december.invoice.total_cents == 10 - 300
        assert by_kind(january, "credit") == []

    with_database(body)


def test_more_than_a_line_has_is_not_given_back(with_database):
    async def body(database):
        tenant = await make_tenant(database)
        card = await publish(database, prices={("requests", ANY, ANY): 10**11})
        await book(database, request(tenant, card, NOVEMBER[0]))
        november = await issue(database, tenant, "2026-11")
        line = next(line for line in november.lines if line.meter == "requests")
        await give_back(database, november, {line.number: 7})
        for cents in ({line.number: 4}, {line.number: 0}, {line.number: -1}, {99: 1}, {len(november.lines): 1}):
            with pytest.raises(InvalidValue):
                await give_back(database, november, cents)
        with pytest.raises(InvalidValue):
            await give_back(database, november, {line.number: 1}, reason="")
        assert (await give_back(database, november, {line.number: 3})).number == 2

    with_database(body)


# ── what an invoice is held to ───────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("statement", "says"),
    [
        (
            "UPDATE ledger_entry SET amount_picousd = amount_picousd + 1 WHERE meter = 'requests'",
            "quantity × unit price",
        ),
        ("UPDATE ledger_entry SET quantity = quantity + 1 WHERE meter = 'requests'", "quantity × unit price"),
        (
            "UPDATE ledger_entry SET unit_price_picousd = 2, amount_picousd = 2 * quantity WHERE meter = 'requests'",
            "another price",
        ),
        ("UPDATE ledger_entry SET rate_card_id = 'rc_0'", "no rate card"),
        ("DELETE FROM ledger_entry WHERE meter = 'requests'", "the receipts have"),
        ("DELETE FROM request_record", "the receipts have"),
        (
            "INSERT INTO ledger_entry SELECT 'twice', request_id, tenant_id, key_id, meter, model, base_model,"
            " flow_class, rate_card_id, quantity, unit_price_picousd, amount_picousd, occurred_unix_ns"
            " FROM ledger_entry WHERE meter = 'requests'",
            "billed twice",
        ),
    ],
)
def test_what_does_not_add_up_is_not_issued(with_database, statement, says):
    async def body(database):
        tenant, card = await make_tenant(database), await publish(database)
        await book(database, request(tenant, card, NOVEMBER[0]))
        await tamper(database, statement)

        with pytest.raises(UnsoundInvoice, match=says):
            await issue(database, tenant, "2026-11")

        async with database.session() as session:
            assert (await session.exec(text("SELECT count(*) FROM invoice"))).one()[0] == 0

    with_database(body)


def test_a_ledger_that_lost_what_was_invoiced_stops_the_next_invoice(with_database):
    async def body(database):
        tenant, card = await make_tenant(database), await publish(database)
        await book(database, request(tenant, card, NOVEMBER[0]))
        await issue(database, tenant, "2026-11")
        await tamper(database, "DELETE FROM ledger_entry", "DELETE FROM request_record")

        with pytest.raises(UnsoundInvoice, match="below zero"):
            await issue(database, tenant, "2026-12")

    with_database(body)


IN_THE_BOOKS = {  # table → a column of it
    "invoice": "tenant_id",
    "invoice_line": "description",
    "credit_note": "reason",
    "credit_note_line": "amount_cents",
    "ledger_entry": "model",
    "request_record": "model",
    "rate_card": "currency",
    "rate_card_item": "meter",
}


def test_the_database_refuses_to_change_what_is_in_the_books(with_database):
    async def body(database):
        tenant = await make_tenant(database)
        card = await publish(database, prices={("requests", ANY, ANY): 10**11})
        await book(database, request(tenant, card, NOVEMBER[0]))
        await give_back(database, await issue(database, tenant, "2026-11"))
        for table, column in IN_THE_BOOKS.items():
            statements = [f"UPDATE {table} SET {column} = {column}", f"DELETE FROM {table}"]
            statements += [f"TRUNCATE {table} CASCADE"] if database.url.startswith("postgres") else []
            for statement in statements:
                with pytest.raises(DBAPIError, match=f"{table} is append-only"):
                    async with database.transaction() as session:
                        await session.exec(text(statement))

    with_database(body)
