"""An issued invoice in the columns of FOCUS (FinOps Open Cost and Usage Specification).

The union of what 1.2 and the newest draft make mandatory, so that one file serves both: providers under their old and
their new names. A row is a line of the invoice; costs are exact, and the rounding is a row of its own, so that unit
price × quantity is the cost and the costs of an invoice sum to what is to be paid.
"""

import json
from decimal import Decimal

from tenants.csv_text import csv_text
from tenants.invoices.invoices import Issued
from tenants.invoices.lines import number_text
from tenants.invoices.text import exact_usd, utc_text
from tenants.pricing import ADAPTER_METERS
from tenants.tables import Invoice, InvoiceLine

Row = dict[str, Decimal | str | None]

CATEGORIES = {"usage": "Usage", "correction": "Usage", "credit": "Credit", "rounding": "Adjustment"}
_MILLION, _BILLION = 10**6, 10**9
_PRICED = (
    *("ConsumedQuantity", "ConsumedUnit", "PricingQuantity", "PricingUnit", "ListUnitPrice", "ContractedUnitPrice"),
    *("PricingCategory", "SkuId", "SkuMeter", "SkuPriceId", "SkuPriceDetails", "ResourceId", "ResourceName"),
    *("ResourceType", "x_Class", "x_BaseModel", "x_RateCardId"),
)


def focus_rows(issued: Issued) -> list[Row]:
    """A row a line, in their order; each has every column, None where it does not apply."""
    return [_row(issued.invoice, line) for line in issued.lines]


def focus_csv(issued: Issued) -> str:
    rows = focus_rows(issued)
    return csv_text(list(rows[0]), (list(row.values()) for row in rows))


def _row(invoice: Invoice, line: InvoiceLine) -> Row:
    cost = exact_usd(line.amount_picousd)
    priced = _priced(line) if line.meter else dict.fromkeys(_PRICED)
    return {
        "BilledCost": cost,
        "BillingAccountId": invoice.tenant_id,
        "BillingAccountName": invoice.tenant_name,
        "BillingCurrency": invoice.currency,
        "BillingPeriodStart": utc_text(invoice.start_unix_ns),
        "BillingPeriodEnd": utc_text(invoice.end_unix_ns),
        "ChargeCategory": CATEGORIES[line.kind],
        "ChargeClass": "Correction" if line.kind in ("correction", "credit") else None,
        "ChargeDescription": line.description or f"{line.meter} of {line.model}, {line.flow_class}",
        "ChargeFrequency": "Usage-Based" if line.meter else "One-Time",
        "ChargePeriodStart": utc_text(line.start_unix_ns),
        "ChargePeriodEnd": utc_text(line.end_unix_ns),
        "ContractedCost": cost,
        "EffectiveCost": cost,
        "ListCost": cost,
        "InvoiceId": number_text(invoice),
        "InvoiceDetailId": f"{number_text(invoice)}-{line.number}",
        "InvoiceIssuerName": invoice.issuer,
        "ProviderName": invoice.issuer,
        "PublisherName": invoice.issuer,
        "ServiceProviderName": invoice.issuer,
        "HostProviderName": invoice.issuer,
        "ServiceCategory": "AI and Machine Learning",
        "ServiceName": "Adapter Hosting" if line.meter in ADAPTER_METERS else "Inference",
        **priced,
    }


def _priced(line: InvoiceLine) -> Row:
    consumed, unit, per = _units(line.meter)
    price = exact_usd(line.unit_price_picousd * (1000 if line.meter in ADAPTER_METERS else _MILLION))
    sku = f"{line.base_model}/{line.flow_class}/{line.meter}"
    values = (
        *(Decimal(line.quantity), consumed, Decimal(line.quantity) / per, unit, price, price),
        *("Standard", sku, line.meter, f"{line.rate_card_id}/{sku}", json.dumps({"x_Class": line.flow_class})),
        *(line.model, line.model, "Model" if line.model == line.base_model else "Adapter"),
        *(line.flow_class, line.base_model, line.rate_card_id),
    )
    return dict(zip(_PRICED, values, strict=True))


def _units(meter: str) -> tuple[str, str, int]:
    """The unit of what was consumed, that of the price, and how many of the one are one of the other."""
    if meter in ADAPTER_METERS:
        return "Byte-Seconds", "GB-Seconds", _BILLION
    noun = "Requests" if meter == "requests" else "Tokens"
    return noun, f"{_MILLION} {noun}", _MILLION
