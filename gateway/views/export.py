"""All that is kept of one tenant, as JSON lines: read in pages, so that a slow reader holds no transaction open."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
from sqlalchemy import and_, tuple_
from sqlmodel import col, select

from gateway.views.ledger import entry_body
from gateway.views.rows import Body, key_body, tenant_body
from gateway.webhooks.resources import webhook_facts
from tenants.database import Database
from tenants.slo.minutes import decode_minutes
from tenants.slo.objectives import MINUTE_S
from tenants.slo.service import decode_sums
from tenants.tables import (
    AdapterAlias,
    AdapterVersion,
    ApiKey,
    CreditNote,
    CreditNoteLine,
    Event,
    Invoice,
    InvoiceLine,
    InvoicePayment,
    LedgerEntry,
    ObjectiveHour,
    RefusalMinute,
    RequestRecord,
    ServiceSum,
    SloIncident,
    SloObjective,
    Tenant,
    UnbookedRecord,
    Wallet,
    WalletGrant,
    WebhookDelivery,
    WebhookEndpoint,
)

PAGE_ROWS = 500


def _columns(kind: str) -> Callable[[Any], Body]:
    return lambda row: {"object": kind, **row.model_dump()}


_MINUTE = ("minute_s", "model", "flow_class")


def _hour_body(row: ObjectiveHour) -> Body:
    facts = {"tenant_id": row.tenant_id, "version_id": row.version_id, "hour_s": row.hour_s}
    minutes = [
        {"minute_s": row.hour_s + minute * MINUTE_S, "valid": valid, "good": good}
        for minute, (valid, good) in decode_minutes(row.minutes).items()
    ]
    return {"object": "objective_hour", **facts, "valid": row.valid, "good": row.good, "minutes": minutes}


def _service_body(row: ServiceSum) -> Body:
    sums = decode_sums(row.sums)
    facts = {"tenant_id": row.tenant_id, "minute_s": row.start_s, "model": row.model, "flow_class": row.flow_class}
    counts = {"valid": sums.valid, "good": sums.good, "excluded": sums.excluded}
    histograms = {measure: msgspec.structs.asdict(each) for measure, each in sums.histograms.items()}
    return {"object": "service_minute", **facts, **counts, "histograms": histograms}


PARTS: tuple[tuple[Any, tuple[str, ...], Callable[[Any], Body]], ...] = (  # table, its key, how a row is shown
    (ApiKey, ("key_id",), key_body),
    (AdapterVersion, ("adapter_version_id",), _columns("adapter_version")),
    (AdapterAlias, ("name",), _columns("adapter_alias")),
    (WebhookEndpoint, ("endpoint_id",), lambda row: {"object": "webhook", **webhook_facts(row)}),
    (Event, ("event_id",), _columns("event")),
    (WebhookDelivery, ("event_id", "endpoint_id"), _columns("webhook_delivery")),
    (RequestRecord, ("request_id", "attempt"), _columns("request_record")),
    (UnbookedRecord, ("request_id", "attempt"), _columns("unbooked_record")),
    (LedgerEntry, ("entry_id",), entry_body),
    (Invoice, ("invoice_id",), _columns("invoice")),
    (InvoiceLine, ("invoice_id", "number"), _columns("invoice_line")),
    (InvoicePayment, ("invoice_id", "month_of"), _columns("invoice_payment")),
    (CreditNote, ("credit_note_id",), _columns("credit_note")),
    (CreditNoteLine, ("credit_note_id", "invoice_line"), _columns("credit_note_line")),
    (Wallet, ("tenant_id",), _columns("wallet")),
    (WalletGrant, ("reference",), _columns("wallet_grant")),
    (SloObjective, ("version_id",), _columns("slo_objective")),
    (SloIncident, ("incident_id",), _columns("slo_incident")),
    (ObjectiveHour, ("hour_s", "version_id"), _hour_body),
    (ServiceSum, ("width_s", "start_s", "model", "flow_class"), _service_body),
    (RefusalMinute, (*_MINUTE, "base_model", "status", "reason", "process_id"), _columns("refusal_minute")),
)


async def export_lines(database: Database, tenant: Tenant) -> AsyncIterator[bytes]:
    """The tenant and the rows of PARTS, keys without their digests; last of all how many lines there were: an export
    without that line is cut off."""
    yield _line(tenant_body(tenant))
    count = 1
    for table, key, body in PARTS:
        async for row in _rows(database, table, key, tenant.tenant_id):
            yield _line(body(row))
            count += 1
    yield _line({"object": "end", "lines": count})


async def _rows(database: Database, table: Any, key: tuple[str, ...], tenant_id: str) -> AsyncIterator[Any]:
    columns = [col(getattr(table, name)) for name in key]
    query = select(table).where(_is_of(table, tenant_id)).order_by(*columns).limit(PAGE_ROWS)
    page: list[Any] = []
    while not page or len(page) == PAGE_ROWS:
        behind = tuple_(*columns) > tuple(getattr(page[-1], name) for name in key) if page else True
        async with database.session() as session:
            page = list((await session.exec(query.where(behind))).all())
        for row in page:
            yield row
        if not page:
            return


def _is_of(table: Any, tenant_id: str) -> Any:
    if table is ServiceSum:  # the wider ones are sums of these
        return and_(col(ServiceSum.tenant_id) == tenant_id, col(ServiceSum.width_s) == MINUTE_S)
    if table is CreditNoteLine:
        notes = select(CreditNote.credit_note_id).where(CreditNote.tenant_id == tenant_id)
        return col(CreditNoteLine.credit_note_id).in_(notes)
    if table not in (InvoiceLine, InvoicePayment):
        return col(table.tenant_id) == tenant_id
    return col(table.invoice_id).in_(select(Invoice.invoice_id).where(Invoice.tenant_id == tenant_id))


def _line(body: Body) -> bytes:
    return msgspec.json.encode(body) + b"\n"
