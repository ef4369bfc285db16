"""GET /v1/organization/usage/completions and /costs: OpenAI's query and result shapes, for the caller's tenant."""

from litestar import Request, get

from gateway.access import needs
from gateway.parts import parts_of, principal_of
from gateway.resources import CostResult, ReportPage, UsageResult
from gateway.views.usage import cost_page, usage_page


@get("/v1/organization/usage/completions", opt=needs("usage"))
async def usage_completions(request: Request) -> ReportPage[UsageResult]:
    return await usage_page(request, parts_of(request).database, principal_of(request).tenant_id)


@get("/v1/organization/costs", opt=needs("usage"))
async def costs(request: Request) -> ReportPage[CostResult]:
    return await cost_page(request, parts_of(request).database, principal_of(request).tenant_id)


handlers = [usage_completions, costs]
