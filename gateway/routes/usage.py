"""GET /v1/organization/usage/completions and /costs: OpenAI's query and result shapes, for the caller's tenant."""

from litestar import Request, get

from gateway.access import needs
from gateway.parts import parts_of, principal_of
from gateway.resources import Amount, CostResult, ReportPage, UsageResult
from gateway.views.report_query import COSTS, USAGE, page_of
from gateway.work import TIER_OF
from tenants.repositories import UsageRepository, UsageRow
from tenants.usage.query import CostRow

_PICO = 10**12


@get("/v1/organization/usage/completions", opt=needs("usage"))
async def usage_completions(request: Request) -> ReportPage[UsageResult]:
    principal, page = principal_of(request), await page_of(request, USAGE)
    async with parts_of(request).database.session() as session:
        buckets = await UsageRepository(session).usage_buckets(principal.tenant_id, page.query)
    return page.answer(buckets, _used)


@get("/v1/organization/costs", opt=needs("usage"))
async def costs(request: Request) -> ReportPage[CostResult]:
    principal, page = principal_of(request), await page_of(request, COSTS)
    async with parts_of(request).database.session() as session:
        buckets = await UsageRepository(session).cost_buckets(principal.tenant_id, page.query)
    return page.answer(buckets, _cost)


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


handlers = [usage_completions, costs]
