"""The tables. Times are BIGINT nanoseconds since 1970 UTC, money is BIGINT picousd: integers that SQLite and
PostgreSQL keep alike. Nothing here is bound to a request body: table models don't validate."""

from tenants.tables.accounts import ApiKey, OperatorKey, Tenant
from tenants.tables.adapter_hours import AdapterMeterHead, AdapterResidency
from tenants.tables.adapters import AdapterAlias, AdapterVersion
from tenants.tables.detached import DetachedMonth, DetachedSum
from tenants.tables.events import Event, WebhookDelivery, WebhookEndpoint
from tenants.tables.gateways import GatewayLease
from tenants.tables.invoices import CreditNote, CreditNoteLine, DocumentSeries, Invoice, InvoiceLine, InvoicePayment
from tenants.tables.ledger import LedgerEntry, RateCardItem, RateCardVersion, RequestRecord
from tenants.tables.log import AuditEvent, AuditHead, IdempotentRequest
from tenants.tables.postings import Posting, PostingHead
from tenants.tables.replicas import ReplicaHour, ReplicaTime
from tenants.tables.rollups import UsageRollup, UsageSeries
from tenants.tables.slo import ObjectiveHour, RefusalMinute, ServiceSum, SloIncident, SloObjective, SloWatch
from tenants.tables.spending import SpendTotal
from tenants.tables.types import MAX_NAME_LENGTH, JsonList, Picousd, StringList, WideInteger, metadata
from tenants.tables.unbooked import UnbookedRecord
from tenants.tables.wallets import Wallet, WalletGrant, WalletHold

__all__ = [
    "MAX_NAME_LENGTH",
    "AdapterAlias",
    "AdapterMeterHead",
    "AdapterResidency",
    "AdapterVersion",
    "ApiKey",
    "AuditEvent",
    "AuditHead",
    "CreditNote",
    "CreditNoteLine",
    "DetachedMonth",
    "DetachedSum",
    "DocumentSeries",
    "Event",
    "GatewayLease",
    "IdempotentRequest",
    "Invoice",
    "InvoiceLine",
    "InvoicePayment",
    "JsonList",
    "LedgerEntry",
    "ObjectiveHour",
    "OperatorKey",
    "Picousd",
    "Posting",
    "PostingHead",
    "RateCardItem",
    "RateCardVersion",
    "RefusalMinute",
    "ReplicaHour",
    "ReplicaTime",
    "RequestRecord",
    "ServiceSum",
    "SloIncident",
    "SloObjective",
    "SloWatch",
    "SpendTotal",
    "StringList",
    "Tenant",
    "UnbookedRecord",
    "UsageRollup",
    "UsageSeries",
    "Wallet",
    "WalletGrant",
    "WalletHold",
    "WebhookDelivery",
    "WebhookEndpoint",
    "WideInteger",
    "metadata",
]
