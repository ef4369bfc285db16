"""/admin/v1/ledger: for operators who may see money."""

import msgspec
from litestar import Controller, Request, get
from litestar.datastructures import State

from gateway.administration import found, needs, session_of
from gateway.views.ledger import EntryQuery, entries, entry_body
from gateway.views.rows import Body, listed
from tenants.database import REPORT_S
from tenants.repositories import TenantRepository


class Money(Controller):
    @get("/ledger", guards=[needs("billing")])
    async def ledger(self, request: Request, state: State) -> Body:
        """A tenant's charges, also a deleted one's, newest first, filtered by the fields of EntryQuery."""
        query = msgspec.convert(dict(request.query_params), EntryQuery, strict=False)
        async with session_of(state, REPORT_S) as session:
            found(await TenantRepository(session).ever_was(query.tenant_id), f"no tenant {query.tenant_id}")
            page = await entries(session, query)
        return listed([entry_body(entry) for entry in page[: query.limit]], has_more=len(page) > query.limit)
