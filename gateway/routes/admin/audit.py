"""/admin/v1/audit: who changed what, in order. `tenora audit` checks that nothing of it was tampered with."""

from typing import Annotated

import msgspec
from litestar import Controller, Request, get
from litestar.datastructures import State

from gateway.administration import needs, session_of
from gateway.views.rows import Body, event_body, listed
from tenants.audit_log import AuditLog

MAX_EVENTS = 1000


class EventQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Events with a number above ``after``, oldest first."""

    after: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)] = 0
    limit: Annotated[int, msgspec.Meta(ge=1, le=MAX_EVENTS)] = 100


class Audit(Controller):
    path = "/audit"

    @get(guards=[needs("read")])
    async def page(self, request: Request, state: State) -> Body:
        """``next_after`` asks for the next page."""
        query = msgspec.convert(dict(request.query_params), EventQuery, strict=False)
        async with session_of(state) as session:
            events = await AuditLog(session).page(query.after, query.limit + 1)
        page = events[: query.limit]
        more = len(events) > query.limit
        return listed(
            [event_body(event) for event in page], has_more=more, next_after=page[-1].number if more else None
        )
