"""/admin/v1/reports/cost: what requests cost, beside what they were charged."""

import msgspec
from litestar import Controller, Request, get
from litestar.datastructures import State

from gateway.administration import needs, session_of
from gateway.views.margins import CostQuery, cost_body
from gateway.views.rows import Body
from tenants.database import REPORT_S
from tenants.margins import margins


class CostReport(Controller):
    path = "/reports/cost"

    @get(guards=[needs("billing")])
    async def cost(self, request: Request, state: State) -> Body:
        """By the fields of CostQuery; the price of a GPU hour is the setting's unless given."""
        query = msgspec.convert(dict(request.query_params), CostQuery, strict=False)
        wanted = query.margins(state.ops.gpu_hour_picousd)
        async with session_of(state, REPORT_S) as session:
            return cost_body(await margins(session, wanted), query.limit)
