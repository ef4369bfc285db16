"""Whether rows are as FOCUS has them: our own checker, a table of columns and a list of rules.

Source: FOCUS 1.2 (columns and their conformance rules) and the newest draft's mandatory columns. It reads what was
exported (text or decimals; None and '' are null), not what it was made from.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal, InvalidOperation, localcontext
from typing import Any

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Column:
    """``kind``: decimal, time or text. ``required``: never null. ``values``: nothing else but null."""

    kind: str = "text"
    mandatory: bool = True
    required: bool = True
    values: tuple[str, ...] = ()


_OPTIONAL = Column(mandatory=False, required=False)
_NUMBER = Column("decimal", mandatory=False, required=False)
COLUMNS: dict[str, Column] = {
    **dict.fromkeys(("BilledCost", "ContractedCost", "EffectiveCost", "ListCost"), Column("decimal")),
    **dict.fromkeys(("BillingPeriodStart", "BillingPeriodEnd"), Column("time")),
    **dict.fromkeys(("ChargePeriodStart", "ChargePeriodEnd"), Column("time")),
    **dict.fromkeys(("BillingAccountId", "BillingAccountName", "BillingCurrency", "ChargeDescription"), Column()),
    **dict.fromkeys(("InvoiceIssuerName", "ProviderName", "PublisherName", "ServiceName"), Column()),
    **dict.fromkeys(("ServiceProviderName", "HostProviderName"), Column()),
    "ServiceCategory": Column(values=("AI and Machine Learning",)),
    "ChargeCategory": Column(values=("Usage", "Purchase", "Tax", "Credit", "Adjustment")),
    "ChargeClass": Column(required=False, values=("Correction",)),
    "PricingQuantity": Column("decimal", required=False),
    "PricingUnit": Column(required=False),
    "PricingCategory": Column(required=False, values=("Standard", "Dynamic", "Committed", "Other")),
    "ChargeFrequency": Column(mandatory=False, required=False, values=("One-Time", "Recurring", "Usage-Based")),
    **dict.fromkeys(("ConsumedQuantity", "ListUnitPrice", "ContractedUnitPrice"), _NUMBER),
    **dict.fromkeys(("ConsumedUnit", "InvoiceId", "InvoiceDetailId", "SkuId", "SkuMeter", "SkuPriceId"), _OPTIONAL),
    **dict.fromkeys(("SkuPriceDetails", "ResourceId", "ResourceName", "ResourceType", "Tags"), _OPTIONAL),
    **dict.fromkeys(("SubAccountId", "SubAccountName"), _OPTIONAL),
}
_PAIRS = (("PricingQuantity", "PricingUnit"), ("ConsumedQuantity", "ConsumedUnit"), ("ResourceId", "ResourceType"))
_OF_USAGE = ("PricingQuantity", "PricingCategory", "ListUnitPrice", "ContractedUnitPrice", "SkuId", "SkuPriceId")
_HALF_CENT = Decimal("0.005")


def check(rows: Sequence[Row], payable: Mapping[str, Decimal]) -> list[str]:
    """Every breach in words; none when the export is sound. ``payable``: InvoiceId → what is to be paid."""
    found = list(_missing_columns(rows))
    with localcontext() as context:
        context.prec = 100
        if not found:
            found += [f"row {number}: {words}" for number, row in enumerate(rows, 1) for words in _of_row(row)]
        if not found:  # sums of what can be read
            found += _unpaid(rows, payable)
            found += _twice(rows)
    return found


def _of_row(row: Row) -> Iterator[str]:
    unreadable = [words for name, column in COLUMNS.items() for words in _of_cell(name, column, row.get(name))]
    yield from unreadable
    if not unreadable:
        for rule in RULES:
            yield from rule(row)


def _missing_columns(rows: Sequence[Row]) -> Iterator[str]:
    for number, row in enumerate(rows, 1):
        for name, column in COLUMNS.items():
            if column.mandatory and name not in row:
                yield f"row {number}: the column {name} is missing"
        for name in row:
            if name not in COLUMNS and not (name.startswith("x_") and name[2:3].isupper()):
                yield f"row {number}: {name} is no column, and a column of one's own begins with x_"


def _of_cell(name: str, column: Column, value: Any) -> Iterator[str]:
    if _is_null(value):
        if column.required:
            yield f"{name} is null"
        return
    if column.kind == "decimal" and _decimal(value) is None:
        yield f"{name} is no number: {value}"
    if column.kind == "time" and _time(value) is None:
        yield f"{name} is no UTC time in ISO 8601: {value}"
    if column.values and value not in column.values:
        yield f"{name} is not one of {', '.join(column.values)}: {value}"


# ── rules of one row ─────────────────────────────────────────────────────────────────────────────


def _cost_is_price_times_quantity(row: Row) -> Iterator[str]:
    if row["ChargeClass"] == "Correction":
        return
    for name in ("List", "Contracted"):
        price, quantity = row.get(f"{name}UnitPrice"), row["PricingQuantity"]
        if _is_null(price) or _is_null(quantity):
            continue
        if _number(price) * _number(quantity) != _number(row[f"{name}Cost"]):
            yield f"{name}UnitPrice × PricingQuantity is not {name}Cost"


def _periods_are_in_order(row: Row) -> Iterator[str]:
    for name in ("BillingPeriod", "ChargePeriod"):
        if not row[f"{name}Start"] < row[f"{name}End"]:
            yield f"{name} does not end after it begins"
    outside = row["ChargePeriodStart"] < row["BillingPeriodStart"] or row["ChargePeriodEnd"] > row["BillingPeriodEnd"]
    if outside and row["ChargeClass"] != "Correction":
        yield "a charge outside its billing period is a Correction"


def _quantities_have_units(row: Row) -> Iterator[str]:
    for one, other in _PAIRS:
        if _is_null(row.get(one)) != _is_null(row.get(other)):
            yield f"{one} and {other} are null together"


def _usage_is_priced(row: Row) -> Iterator[str]:
    if row["ChargeCategory"] == "Usage":
        yield from (f"{name} is null in a row of usage" for name in _OF_USAGE if _is_null(row.get(name)))
    elif not _is_null(row.get("ConsumedQuantity")):
        yield "ConsumedQuantity is for usage only"
    if _is_null(row.get("SkuId")) and not _is_null(row.get("SkuPriceId")):
        yield "a SkuPriceId has a SkuId"


def _credits_and_roundings_are_what_they_are_called(row: Row) -> Iterator[str]:
    cost = _number(row["BilledCost"])
    if row["ChargeCategory"] == "Credit" and cost > 0:
        yield "a credit is not above zero"
    if row["ChargeCategory"] == "Adjustment" and abs(cost) > _HALF_CENT:
        yield "a rounding is at most half a cent"
    if row["ChargeCategory"] == "Usage" and cost < 0:
        yield "usage is not below zero"


def _currency_is_a_code(row: Row) -> Iterator[str]:
    code = row["BillingCurrency"]
    if not (len(code) == 3 and code.isascii() and code.isalpha() and code.isupper()):
        yield f"BillingCurrency is no ISO 4217 code: {code}"


RULES: tuple[Callable[[Row], Iterator[str]], ...] = (
    _cost_is_price_times_quantity,
    _periods_are_in_order,
    _quantities_have_units,
    _usage_is_priced,
    _credits_and_roundings_are_what_they_are_called,
    _currency_is_a_code,
)


# ── rules of an invoice ──────────────────────────────────────────────────────────────────────────


def _unpaid(rows: Sequence[Row], payable: Mapping[str, Decimal]) -> list[str]:
    sums: dict[str, Decimal] = defaultdict(Decimal)
    for row in rows:
        sums[row.get("InvoiceId") or ""] += _number(row["BilledCost"])
    named = {**dict.fromkeys(payable, Decimal()), **sums}
    return [
        f"invoice {name or 'null'}: the billed costs are {sums[name]:f}, to be paid is {payable.get(name)}"
        for name in named
        if sums[name] != payable.get(name)
    ]


def _twice(rows: Sequence[Row]) -> list[str]:
    seen: set[str] = set()
    found = []
    for row in rows:
        name = row.get("InvoiceDetailId")
        if not _is_null(name) and name in seen:
            found.append(f"InvoiceDetailId {name} is there twice")
        seen.add(str(name))
    return found


def _is_null(value: Any) -> bool:
    return value is None or value == ""


def _decimal(value: Any) -> Decimal | None:
    try:
        found = Decimal(value) if isinstance(value, str | Decimal) else None
    except InvalidOperation:
        return None
    return found if found is not None and found.is_finite() else None


def _number(value: Any) -> Decimal:
    found = _decimal(value)
    assert found is not None, "its cell was checked first"
    return found


def _time(value: Any) -> datetime | None:
    try:
        return datetime.strptime(value, "%Y-%m-%dT%H:%M:%SZ")
    except (ValueError, TypeError):
        return None
