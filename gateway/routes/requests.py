"""GET /v1/requests/{id}: a request's receipt."""

from typing import Any

from litestar import Request, get
from litestar.params import FromPath

from gateway.access import needs
from gateway.errors import ApiError
from gateway.parts import parts_of, principal_of
from tenants.repositories import AdapterRepository, RecordRepository
from tenants.tables import AdapterVersion, RequestRecord

PICOUSD_DIGITS = 12
_STATES = {200: "completed", 499: "cancelled", 0: "lost"}
_PREFIXES = ("chatcmpl-", "cmpl-")


@get("/v1/requests/{request_id:str}", opt=needs("usage"))
async def get_request(request: Request, request_id: FromPath[str]) -> dict[str, Any]:
    """As soon as the ledger has it. Raises ApiError 404 for absent and for another tenant's."""
    principal, parts = principal_of(request), parts_of(request)
    bare = request_id
    for prefix in _PREFIXES:  # the id of an answer's body serves as well
        bare = bare.removeprefix(prefix)
    async with parts.database.session() as session:
        record = await RecordRepository(session).get(principal.tenant_id, bare)
        if record is None:
            raise ApiError(f"No request `{request_id}` is known.", code="not_found", param="request_id")
        adapter = await _adapter(AdapterRepository(session), record)
    return _receipt(record, adapter)


async def _adapter(repository: AdapterRepository, record: RequestRecord) -> AdapterVersion | None:
    if not record.adapter_version_id:
        return None
    return await repository.get_by_id(record.tenant_id, record.adapter_version_id)


def _receipt(record: RequestRecord, adapter: AdapterVersion | None) -> dict[str, Any]:
    phases = {name: getattr(record, f"{name}_ns") for name in ("queue", "prefill", "decode", "post", "network")}
    return {
        "id": record.request_id,
        "object": "request",
        "status": record.outcome,
        "state": _STATES.get(record.outcome, "failed"),
        "operation": record.operation,
        "model": record.model,
        "base_model": record.base_model,
        "adapter": adapter and {"id": adapter.adapter_version_id, "name": adapter.name, "version": adapter.version},
        "class": record.flow_class,
        "tokens": {"input": record.prompt_tokens, "cached": record.cached_tokens, "output": record.output_tokens},
        "phases": phases | {"total": record.total_ns},
        "time_to_first_token": record.first_token_ns or None,
        "price": {"picousd": record.price_picousd, "usd": _usd(record.price_picousd), "billed": record.billed},
        "rate_card_id": record.rate_card_id,
        "label": record.label or None,
        "trace_id": record.trace_id,
        "attempt": record.attempt,
        "created_at": record.admitted_unix_ns // 1_000_000_000,
        "finished_at": record.finished_unix_ns // 1_000_000_000,
    }


def _usd(picousd: int) -> str:
    """Exact decimal text."""
    whole, rest = divmod(picousd, 10**PICOUSD_DIGITS)
    return f"{whole}.{rest:0{PICOUSD_DIGITS}d}"


handlers = [get_request]
