"""GET /v1/organization/slo: the caller's own SLO report."""

from litestar import Request, Response, get

from gateway.access import needs
from gateway.errors import invalid, invalid_key
from gateway.parts import parts_of, principal_of
from gateway.views.slo import answer
from tenants.database import REPORT_S
from tenants.errors import InvalidValue
from tenants.repositories import TenantRepository


@get("/v1/organization/slo", opt=needs("usage"))
async def organization_slo(request: Request) -> Response:
    async with parts_of(request).database.within(REPORT_S).session() as session:
        tenant = await TenantRepository(session).get(principal_of(request).tenant_id)
        if tenant is None:  # deleted since
            raise invalid_key()
        try:
            return await answer(session, tenant, dict(request.query_params))
        except InvalidValue as error:
            raise invalid(str(error), error.field) from None


handlers = [organization_slo]
