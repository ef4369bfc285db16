"""A request's receipt: what the ledger has of it, as its caller sees it."""

from sqlmodel.ext.asyncio.session import AsyncSession

from gateway.resources import Receipt, ReceiptAdapter, ReceiptPhases, ReceiptPrice, ReceiptTokens, State
from tenants.adapters.repository import AdapterRepository
from tenants.record_repository import RecordRepository
from tenants.tables import AdapterVersion, RequestRecord

PICOUSD_DIGITS = 12
_STATES: dict[int, State] = {200: "completed", 499: "cancelled", 0: "lost"}


async def receipt_of(session: AsyncSession, tenant_id: str, request_id: str) -> Receipt | None:
    """None until the ledger has it, and for another tenant's."""
    record = await RecordRepository(session).get(tenant_id, request_id)
    if record is None:
        return None
    return _receipt(record, await _adapter(AdapterRepository(session), record))


async def _adapter(repository: AdapterRepository, record: RequestRecord) -> AdapterVersion | None:
    if not record.adapter_version_id:
        return None
    return await repository.get_by_id(record.tenant_id, record.adapter_version_id)


def _receipt(record: RequestRecord, adapter: AdapterVersion | None) -> Receipt:
    phases = {name: getattr(record, f"{name}_ns") for name in ReceiptPhases.__struct_fields__}
    return Receipt(
        id=record.request_id,
        status=record.outcome,
        state=_STATES.get(record.outcome, "failed"),
        operation=record.operation,
        model=record.model,
        base_model=record.base_model,
        adapter=adapter and ReceiptAdapter(adapter.adapter_version_id, adapter.name, adapter.version),
        flow_class=record.flow_class,
        tokens=ReceiptTokens(record.prompt_tokens, record.cached_tokens, record.output_tokens),
        phases=ReceiptPhases(**phases),
        time_to_first_token=record.first_token_ns or None,
        price=ReceiptPrice(record.price_picousd, _usd(record.price_picousd), record.billed),
        rate_card_id=record.rate_card_id,
        label=record.label or None,
        trace_id=record.trace_id,
        attempt=record.attempt,
        created_at=record.admitted_unix_ns // 1_000_000_000,
        finished_at=record.finished_unix_ns // 1_000_000_000,
    )


def _usd(picousd: int) -> str:
    """Exact decimal text."""
    whole, rest = divmod(picousd, 10**PICOUSD_DIGITS)
    return f"{whole}.{rest:0{PICOUSD_DIGITS}d}"
