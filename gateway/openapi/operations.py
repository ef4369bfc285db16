"""What the public API can do: one row for each route and method, for the OpenAPI document.

A row says what its handler in ``routes/`` reads, answers and refuses; handlers read their bodies themselves (they come
in pieces, or without end), so nothing of this can be taken from their signatures.
"""

from typing import Any

from gateway.adapters.upload import CONFIG, FIELDS, FILES, WEIGHTS
from gateway.errors import TABLE
from gateway.openapi.operation import ANY, BODY, KEYED, LABELS, SECONDS, SENT, STRING, Codes, Operation, Parameter
from gateway.resources import (
    AdapterBody,
    AdapterDetail,
    AdapterFile,
    CostResult,
    CreditBody,
    Deleted,
    ErrorBody,
    Health,
    Listed,
    ModelBody,
    Receipt,
    ReportPage,
    UsageResult,
)
from gateway.schemas import (
    Answer,
    ChatChoice,
    ChatChunkChoice,
    ChatRequest,
    Commit,
    CompletionRequest,
    Rollback,
    TextChoice,
)
from gateway.views.documents import CSV, HTML
from gateway.views.invoices import CreditNoteBody, InvoiceBody, InvoiceHead
from gateway.views.report_query import COSTS, USAGE, Report
from gateway.views.slo import FORMATS
from gateway.webhooks.operations import WEBHOOKS
from tenants.slo.page import TABLES
from tenants.slo.report import Report as SloReport

# ── refusals ─────────────────────────────────────────────────────────────────────────────────────

_UPLOADING: Codes = (*KEYED, "name_taken", "storage_full")
_PUBLISHING: Codes = (*_UPLOADING, "model_not_found", "invalid_adapter", "version_conflict", "limit_reached")
_RUNNING: Codes = (
    *BODY,
    *("model_not_found", "context_length_exceeded", "unsupported_parameter"),
    *("adapter_corrupt", "adapter_unavailable", "invalid_adapter"),
    *("idempotency_in_flight", "idempotency_mismatch"),
    *("engine_lost", "draining", "billing_unavailable"),
    *("spend_limit_exceeded", "credit_balance_exhausted"),
)

# ── parameters ───────────────────────────────────────────────────────────────────────────────────

_VERSION = {"type": "integer", "minimum": 0, "maximum": 999_999_999}
_ZONE = {"type": "string", "pattern": "^[A-Za-z0-9_+-]{1,32}(/[A-Za-z0-9_+-]{1,32}){0,3}$"}
_BINARY = {"type": "string", "format": "binary"}
_ONCE = (
    Parameter(
        "Idempotency-Key",
        "header",
        {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[!-~]([ -~]*[!-~])?$"},
        "A request sent twice under one key runs once.",
    ),
    *LABELS,
)
_NAME = Parameter("name", "path", STRING, "The adapter's name, or NAME@VERSION where one version is meant.", True)
_LIMITED = {
    f"x-ratelimit-{what}-{of}": f"{what.capitalize()} of the limit of {of}, where there is one."
    for of in ("requests", "tokens")
    for what in ("limit", "remaining", "reset")
}
_REPLAYED = {"idempotency-replayed": "`true`: what an earlier request with this key got."}


def _report(report: Report) -> tuple[Parameter, ...]:
    """The query of a report. Lists may be repeated, have [] behind their name, or be parted by commas."""
    texts = {"type": "array", "items": {"type": "string", "minLength": 1, "pattern": "^[^,]+$"}}
    groups = {"type": "array", "items": {"enum": list(report.groups)}, "maxItems": len(report.groups)}
    most = max(longest for _, longest in report.limits.values())
    query = {
        "start_time": (SECONDS, "Unix seconds; needed unless `page` is given."),
        "end_time": (SECONDS, "Unix seconds; now by default."),
        "bucket_width": ({"enum": list(report.limits)}, "1d by default."),
        "time_zone": (_ZONE, "Hours and days are that zone's (IANA name); UTC's by default."),
        "limit": ({"type": "integer", "minimum": 1, "maximum": most}, "Buckets in a page; fewer of wider buckets."),
        "page": ({"type": "string", "pattern": "^(page_)?[0-9]{1,10}$"}, "The `next_page` of an earlier answer."),
        "group_by": (groups, "What results are parted by."),
        "models": (texts, "Only these."),
        "api_key_ids": (texts, "Only these."),
        "project_ids": (texts, "A tenant is its only project."),
        "user_ids": (texts, "Users are not told apart: none match."),
        "batch": ({"enum": ["true", "false"]}, "There are no batch jobs."),
    }
    return tuple(Parameter(name, "query", schema, text) for name, (schema, text) in query.items())


def _slo() -> tuple[Parameter, ...]:
    instant = {"type": "string", "pattern": "^([0-9]{1,10}|[0-9]{4}-[0-9]{2}-[0-9]{2})$"}
    query = {
        "start": (instant, "Unix seconds of a whole minute, or a date in your time zone."),
        "end": (instant, "Not included; now, unless told."),
        "group": ({"enum": ["model", "class", "model,class", "none"]}, "What rows are parted by."),
        "format": ({"enum": list(FORMATS)}, "JSON as here, CSV, or a page."),
        "table": ({"enum": list(TABLES)}, "Which part a CSV is of."),
    }
    return tuple(Parameter(name, "query", schema, text) for name, (schema, text) in query.items())


def _form() -> dict[str, Any]:
    fields = {name: {"type": "string", "minLength": 1} for name in FIELDS} | {"expected_version": _VERSION}
    schema = {
        "type": "object",
        "properties": fields | dict.fromkeys(FILES, _BINARY),
        "required": ["name", "base_model", CONFIG, WEIGHTS],
        "additionalProperties": False,
    }
    return {"multipart/form-data": {"schema": schema}}


# ── the table ────────────────────────────────────────────────────────────────────────────────────

_COMPLETIONS = (
    Operation(
        method="POST",
        path="/v1/chat/completions",
        name="createChatCompletion",
        summary="Answers a conversation",
        body=ChatRequest,
        answers=(Answer[ChatChoice], Receipt),
        chunk=Answer[ChatChunkChoice],
        parameters=_ONCE,
        headers=_LIMITED | _REPLAYED,
        refusals=_RUNNING,
    ),
    Operation(
        method="POST",
        path="/v1/completions",
        name="createCompletion",
        summary="Continues a text",
        body=CompletionRequest,
        answers=(Answer[TextChoice], Receipt),
        chunk=Answer[TextChoice],
        parameters=_ONCE,
        headers=_LIMITED | _REPLAYED,
        refusals=_RUNNING,
    ),
)

_MODELS = (
    Operation(
        method="GET",
        path="/v1/models",
        name="listModels",
        summary="The base models and your adapters",
        answers=(Listed[ModelBody],),
        parameters=LABELS,
        refusals=KEYED,
    ),
    Operation(
        method="GET",
        path="/v1/models/{model_id}",
        name="getModel",
        summary="A base model or one of your adapters",
        answers=(ModelBody,),
        parameters=(Parameter("model_id", "path", STRING, "As `model` of a completion.", True), *LABELS),
        refusals=(*KEYED, "model_not_found"),
    ),
)

_ADAPTERS = (
    Operation(
        method="POST",
        path="/v1/adapters",
        name="uploadAdapter",
        summary="Checks and publishes an adapter, as the name's next version",
        status=201,
        content=_form(),
        answers=(AdapterBody,),
        parameters=LABELS,
        refusals=(*_PUBLISHING, *SENT),
    ),
    Operation(
        method="GET",
        path="/v1/adapters",
        name="listAdapters",
        summary="Your adapters, each as its name means it now",
        answers=(Listed[AdapterBody],),
        parameters=LABELS,
        refusals=KEYED,
    ),
    Operation(
        method="GET",
        path="/v1/adapters/{name}",
        name="getAdapter",
        summary="An adapter with its versions and where their weights are",
        answers=(AdapterDetail,),
        parameters=(_NAME, *LABELS),
        refusals=KEYED,
    ),
    Operation(
        method="DELETE",
        path="/v1/adapters/{name}",
        name="deleteAdapter",
        summary="Deletes an adapter, or one version of it",
        answers=(Deleted,),
        parameters=(_NAME, *LABELS),
        refusals=(*KEYED, "version_conflict"),
    ),
    Operation(
        method="PUT",
        path="/v1/adapters/{name}/files/{file}",
        name="putAdapterFile",
        summary="Takes one file of an adapter as it is; POST …/commit publishes them",
        content={"application/octet-stream": {"schema": _BINARY}},
        answers=(AdapterFile,),
        parameters=(_NAME, Parameter("file", "path", {"enum": list(FILES)}, "Which file.", True), *LABELS),
        refusals=(*_UPLOADING, *("invalid_adapter", "limit_reached"), *SENT),
    ),
    Operation(
        method="POST",
        path="/v1/adapters/{name}/commit",
        name="commitAdapter",
        summary="Checks and publishes the files that were PUT",
        status=201,
        body=Commit,
        answers=(AdapterBody,),
        parameters=(_NAME, *LABELS),
        refusals=(*_PUBLISHING, *SENT),
    ),
    Operation(
        method="POST",
        path="/v1/adapters/{name}/rollback",
        name="rollbackAdapter",
        summary="Makes a name mean an earlier version",
        body=Rollback,
        answers=(AdapterBody,),
        parameters=(_NAME, *LABELS),
        refusals=(*BODY, "version_conflict"),
    ),
)

_REPORTS = (
    Operation(
        method="GET",
        path="/v1/requests/{request_id}",
        name="getRequest",
        summary="A request's receipt",
        answers=(Receipt,),
        parameters=(
            Parameter("request_id", "path", STRING, "As `x-request-id`, or an answer's `id`.", True),
            *LABELS,
        ),
        refusals=KEYED,
    ),
    Operation(
        method="GET",
        path="/v1/organization/usage/completions",
        name="getUsage",
        summary="What was used, in buckets of time",
        answers=(ReportPage[UsageResult],),
        parameters=(*_report(USAGE), *LABELS),
        refusals=KEYED,
    ),
    Operation(
        method="GET",
        path="/v1/organization/costs",
        name="getCosts",
        summary="What it cost, in buckets of time",
        answers=(ReportPage[CostResult],),
        parameters=(*_report(COSTS), *LABELS),
        refusals=KEYED,
    ),
    Operation(
        method="GET",
        path="/v1/organization/credit",
        name="getCredit",
        summary="What is left of your prepaid credit",
        answers=(CreditBody,),
        parameters=LABELS,
        refusals=(*KEYED, "not_found"),
    ),
    Operation(
        method="GET",
        path="/v1/organization/slo",
        name="getSlo",
        summary="What was promised and what was kept",
        answers=(SloReport,),
        texts=(CSV, HTML),
        parameters=(*_slo(), *LABELS),
        refusals=KEYED,
    ),
)

_INVOICE_ID = Parameter("invoice_id", "path", STRING, "As the list has it.", True)
_INVOICES = (
    Operation(
        method="GET",
        path="/v1/organization/invoices",
        name="listInvoices",
        summary="Your invoices, by number",
        answers=(Listed[InvoiceHead],),
        parameters=LABELS,
        refusals=KEYED,
    ),
    Operation(
        method="GET",
        path="/v1/organization/invoices/{invoice_id}",
        name="getInvoice",
        summary="An invoice with its lines",
        answers=(InvoiceBody,),
        texts=(CSV, HTML),
        parameters=(
            _INVOICE_ID,
            Parameter("format", "query", {"enum": ["json", "csv", "html"]}, "`html` is a page to print."),
            *LABELS,
        ),
        refusals=KEYED,
    ),
    Operation(
        method="GET",
        path="/v1/organization/invoices/{invoice_id}/credit-notes",
        name="listCreditNotes",
        summary="What was given back of an invoice",
        answers=(Listed[CreditNoteBody],),
        parameters=(_INVOICE_ID, *LABELS),
        refusals=KEYED,
    ),
    Operation(
        method="GET",
        path="/v1/organization/invoices/{invoice_id}/credit-notes/{credit_note_id}",
        name="getCreditNote",
        summary="A credit note with its lines",
        answers=(CreditNoteBody,),
        texts=(HTML,),
        parameters=(
            _INVOICE_ID,
            Parameter("credit_note_id", "path", STRING, "As the list has it.", True),
            Parameter("format", "query", {"enum": ["json", "html"]}, "`html` is a page to print."),
            *LABELS,
        ),
        refusals=KEYED,
    ),
)

_OPEN = (
    Operation(
        method="GET",
        path="/health",
        name="getHealth",
        summary="Whether requests are taken",
        answers=(Health,),
        refusals=(*ANY, "draining"),
        refused_as={TABLE["draining"].status: (Health, ErrorBody)},
        needs_key=False,
    ),
    Operation(
        method="GET",
        path="/v1/openapi.json",
        name="getOpenapi",
        summary="This document",
        refusals=ANY,
        needs_key=False,
    ),
)

OPERATIONS = (*_COMPLETIONS, *_MODELS, *_ADAPTERS, *_REPORTS, *_INVOICES, *WEBHOOKS, *_OPEN)
