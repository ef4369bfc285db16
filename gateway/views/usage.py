"""Usage and costs in OpenAI's shapes: a tenant's own, or for operators (``tenant_id`` None) those of all tenants."""

from litestar import Request

from gateway.resources import Amount, CostResult, ReportPage, UsageResult
from gateway.views.report_query import COSTS, USAGE, page_of
from gateway.work import TIER_OF
from tenants.database import REPORT_S, Database
from tenants.usage.query import CostRow, UsageRow
from tenants.usage.repository import UsageRepository

_PICO = 10**12


async def usage_page(request: Request, database: Database, tenant_id: str | None) -> ReportPage[UsageResult]:
    """Raises ApiError 400."""
    async with database.within(REPORT_S).session() as session:
        usage = UsageRepository(session)
        page = await page_of(request, USAGE, usage, tenant_id)
        return page.answer(await usage.usage_buckets(tenant_id, page.query), _used)


async def cost_page(request: Request, database: Database, tenant_id: str | None) -> ReportPage[CostResult]:
    """Raises ApiError 400."""
    async with database.within(REPORT_S).session() as session:
        usage = UsageRepository(session)
        page = await page_of(request, COSTS, usage, tenant_id)
        return page.answer(await usage.cost_buckets(tenant_id, page.query), _cost)


def _used(row: UsageRow, grouped: frozenset[str]) -> UsageResult:
    return UsageResult(
        input_tokens=row.input_tokens,
        input_cached_tokens=row.input_cached_tokens,
        input_uncached_tokens=row.input_tokens - row.input_cached_tokens,
        output_tokens=row.output_tokens,
        num_model_requests=row.num_model_requests,
        project_id=row.project_id,
        api_key_id=row.api_key_id,
        model=row.model,
        batch=False if "batch" in grouped else None,
        service_tier=row.flow_class and TIER_OF[row.flow_class],
        api_source=_source(grouped),
    )


def _cost(row: CostRow, grouped: frozenset[str]) -> CostResult:
    return CostResult(
        amount=Amount(value=row.amount_picousd / _PICO, picousd=row.amount_picousd),
        line_item=row.line_item,
        project_id=row.project_id,
        api_key_id=row.api_key_id,
        api_source=_source(grouped),
    )


def _source(grouped: frozenset[str]) -> str | None:
    return "unlabeled" if "api_source" in grouped else None
