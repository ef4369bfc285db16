"""/admin/v1/reports/usage and /reports/charges: what all tenants used and were charged, as OpenAI's reports tell it."""

from litestar import Controller, Request, get
from litestar.datastructures import State

from gateway.administration import needs
from gateway.resources import CostResult, ReportPage, UsageResult
from gateway.views.usage import cost_page, usage_page


class UsageReports(Controller):
    """The routes of tenants, over everybody: ``project_id`` is a tenant, to group by, and ``project_ids`` to name
    some. Deleted tenants are in it."""

    path = "/reports"

    @get("/usage", guards=[needs("billing")])
    async def usage(self, request: Request, state: State) -> ReportPage[UsageResult]:
        return await usage_page(request, state.ops.database, None)

    @get("/charges", guards=[needs("billing")])
    async def charges(self, request: Request, state: State) -> ReportPage[CostResult]:
        """What requests cost us is in /reports/cost."""
        return await cost_page(request, state.ops.database, None)
