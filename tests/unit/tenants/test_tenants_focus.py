"""The FOCUS export: what we export passes the checker, and the checker finds what is planted."""

import csv
import io
import random
from decimal import Decimal

import pytest
from invoicing import book, instant, issue, make_tenant, publish, random_requests

from tenants.invoices.credit_notes import CreditNoteRepository
from tenants.invoices.focus import focus_csv, focus_rows
from tenants.invoices.focus_check import COLUMNS, check
from tenants.invoices.lines import number_text
from tenants.pricing import ANY

MANDATORY_1_2 = set(
    "BilledCost BillingAccountId BillingAccountName BillingCurrency BillingPeriodEnd BillingPeriodStart ChargeCategory "
    "ChargeClass ChargeDescription ChargePeriodEnd ChargePeriodStart ContractedCost EffectiveCost InvoiceIssuerName "
    "ListCost PricingQuantity PricingUnit ProviderName PublisherName ServiceCategory ServiceName".split()
)
MANDATORY_NEWEST = MANDATORY_1_2 - {"ProviderName", "PublisherName"} | {"HostProviderName", "ServiceProviderName"}


def payable(issued) -> dict[str, Decimal]:
    return {number_text(issued.invoice): Decimal(issued.invoice.total_cents) / 100}


async def invoices(database):
    """November, and December with a correction and a credit."""
    tenant = await make_tenant(database, '=HYPERLINK("http://x")')
    card = await publish(
        database, prices={("requests", ANY, ANY): 10**10 + 7, ("output_tokens", "smollm2", "batch"): 33_333}
    )
    rng = random.Random(11)
    start, end = instant("2026-11-01"), instant("2026-12-01")
    await book(database, *random_requests(rng, tenant, card, start, end, 40))
    november = await issue(database, tenant, "2026-11")
    await book(database, *random_requests(rng, tenant, card, start, end, 3))
    line = next(line for line in november.lines if line.amount_cents > 3)
    async with database.transaction() as session:
        await CreditNoteRepository(session).issue(november, {line.number: 3}, "slow", end)
    return november, await issue(database, tenant, "2026-12")


def test_what_is_exported_passes_the_checker(with_database):
    async def body(database):
        for issued in await invoices(database):
            rows = list(csv.DictReader(io.StringIO(focus_csv(issued), newline="")))

            assert len(rows) == len(issued.lines)
            assert check(rows, payable(issued)) == []
            assert check(focus_rows(issued), payable(issued)) == []
            assert set(rows[0]) >= MANDATORY_1_2 | MANDATORY_NEWEST
            assert {row["BillingAccountName"] for row in rows} == {'\'=HYPERLINK("http://x")'}
        categories = {(row["ChargeCategory"], row["ChargeClass"]) for row in rows}
        assert categories == {("Usage", "Correction"), ("Credit", "Correction"), ("Adjustment", "")}

    with_database(body)


def test_the_checkers_table_has_the_mandatory_columns_of_both_versions():
    mandatory = {name for name, column in COLUMNS.items() if column.mandatory}
    assert mandatory == MANDATORY_1_2 | MANDATORY_NEWEST | {"PricingCategory"}


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """The rows of one export, and what is to be paid."""
    import asyncio

    import migrations
    from tenants.database import Database

    url = f"sqlite:///{tmp_path_factory.mktemp('focus') / 'tenora.db'}"
    migrations.upgrade(url)

    async def work():
        database = Database(url)
        await database.start()
        try:
            return [(focus_rows(issued), payable(issued)) for issued in await invoices(database)]
        finally:
            await database.close()

    return asyncio.run(work())


PLANTED = {
    "a mandatory column is left out": (lambda row: row.pop("ServiceName"), "ServiceName is missing"),
    "a column has a name of our own": (lambda row: row.update(Price="1"), "Price is no column"),
    "a cost is null": (lambda row: row.update(ListCost=None), "ListCost is null"),
    "a cost is no number": (lambda row: row.update(EffectiveCost="1,50"), "EffectiveCost is no number"),
    "a cost is not finite": (lambda row: row.update(EffectiveCost="NaN"), "EffectiveCost is no number"),
    "a time has no zone": (lambda row: row.update(ChargePeriodEnd="2026-12-01 00:00:00"), "ChargePeriodEnd is no UTC"),
    "a category is unheard of": (lambda row: row.update(ChargeCategory="Fee"), "ChargeCategory is not one of"),
    "a class is unheard of": (lambda row: row.update(ChargeClass="Late"), "ChargeClass is not one of"),
    "a service category is unheard of": (lambda row: row.update(ServiceCategory="AI"), "ServiceCategory is not one of"),
    "the billed costs are not what is to be paid": (
        lambda row: row.update(BilledCost=row["BilledCost"] + Decimal("0.01")),
        "to be paid is",
    ),
    "a row is on another invoice": (lambda row: row.update(InvoiceId="INV-000099"), "to be paid is"),
    "price times quantity is not the list cost": (
        lambda row: row.update(ListUnitPrice=row["ListUnitPrice"] * 2),
        "is not ListCost",
    ),
    "price times quantity is not the contracted cost": (
        lambda row: row.update(ContractedCost=row["ContractedCost"] + Decimal("0.000000000001")),
        "is not ContractedCost",
    ),
    "a charge ends before it begins": (
        lambda row: row.update(ChargePeriodEnd=row["ChargePeriodStart"]),
        "does not end after it begins",
    ),
    "a charge of another month is no correction": (
        lambda row: row.update(ChargePeriodStart="2026-10-01T00:00:00Z"),
        "is a Correction",
    ),
    "a quantity has no unit": (lambda row: row.update(PricingUnit=None), "PricingQuantity and PricingUnit"),
    "what was consumed has no unit": (lambda row: row.update(ConsumedUnit=""), "ConsumedQuantity and ConsumedUnit"),
    "usage has no price": (lambda row: row.update(ListUnitPrice=None), "ListUnitPrice is null in a row of usage"),
    "usage has no sku": (lambda row: row.update(SkuId=None), "SkuId is null in a row of usage"),
    "a credit consumes": (lambda row: row.update(ChargeCategory="Credit"), "ConsumedQuantity is for usage only"),
    "a credit charges": (lambda row: row.update(ChargeCategory="Credit"), "a credit is not above zero"),
    "an adjustment is large": (lambda row: row.update(ChargeCategory="Adjustment"), "at most half a cent"),
    "usage is below zero": (lambda row: row.update(BilledCost=-row["BilledCost"]), "usage is not below zero"),
    "a currency is no code": (lambda row: row.update(BillingCurrency="usd"), "BillingCurrency is no ISO 4217"),
    "two rows have one id": (lambda row: row.update(InvoiceDetailId="INV-000001-2"), "is there twice"),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_violation_is_found(sound, planted):
    change, says = PLANTED[planted]
    rows, to_be_paid = sound[0]
    rows = [dict(row) for row in rows]
    change(next(row for row in rows if row["ChargeCategory"] == "Usage" and row["BilledCost"] > Decimal("0.01")))

    assert any(says in words for words in check(rows, to_be_paid))


def test_an_invoice_without_its_rows_is_found(sound):
    rows, to_be_paid = sound[0]
    assert "to be paid is 7" in check(rows, to_be_paid | {"INV-000007": Decimal(7)})[0]
    assert check([], {}) == []


def test_a_row_that_is_left_out_or_doubled_is_found(sound):
    rows, to_be_paid = sound[0]
    assert any("to be paid is" in words for words in check(rows[1:], to_be_paid))
    assert any("is there twice" in words for words in check([*rows, rows[0]], to_be_paid))
