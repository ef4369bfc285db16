"""/admin/v1/exports: the ledger for other systems, which come for it and remember where they were."""

import re
from collections.abc import Sequence
from typing import Annotated

import msgspec
from litestar import Controller, Request, Response, get
from litestar.datastructures import State

from gateway.administration import needs, session_of
from gateway.errors import invalid
from gateway.views.rows import Body, listed
from tenants.database import REPORT_S
from tenants.postings import Place, entries_from
from tenants.repositories import TenantRepository
from tenants.tables import LedgerEntry
from tenants.usage.events import cloud_event, meter_events

MAX_ENTRIES = 1000
BATCH = "application/cloudevents-batch+json"
NEXT_AFTER = "x-next-after"
_PLACE = re.compile(r"([1-9][0-9]{0,17})\.([0-9]{1,6})")


class ExportQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``after``: the ``next_after`` of the last answer; none: from the first entry on."""

    after: str = "1.0"
    limit: Annotated[int, msgspec.Meta(ge=1, le=MAX_ENTRIES)] = 100


class Exports(Controller):
    """Every entry once to who follows ``next_after``, whoever commits when; the same page for the same ``after`` and
    ``limit``, but the last, which grows. ``has_more`` False: come again later with the same ``next_after``."""

    path = "/exports"

    @get("/cloudevents", guards=[needs("billing")])
    async def cloudevents(self, request: Request, state: State) -> Response:
        """With ``Accept: application/cloudevents-batch+json`` the bare batch; where to go on is in a header then."""
        query = _query(request)
        entries, after = await _page(state, query)
        events = [cloud_event(entry) for entry in entries]
        if BATCH in request.headers.get("accept", ""):
            return Response(msgspec.json.encode(events), media_type=BATCH, headers={NEXT_AFTER: after})
        return Response(_listed(events, len(entries) == query.limit, after))

    @get("/meter-events", guards=[needs("billing")])
    async def meter_events(self, request: Request, state: State) -> Body:
        """Of tenants that have a billing reference; entries of others are passed over, and counted."""
        query = _query(request)
        entries, after = await _page(state, query)
        async with session_of(state, REPORT_S) as session:
            references = await TenantRepository(session).billing_references()
        events = meter_events(entries, references)
        passed_over = len(entries) - len(events)
        return _listed(events, len(entries) == query.limit, after) | {"num_without_reference": passed_over}


def _query(request: Request) -> ExportQuery:
    return msgspec.convert(dict(request.query_params), ExportQuery, strict=False)


async def _page(state: State, query: ExportQuery) -> tuple[Sequence[LedgerEntry], str]:
    """Raises ApiError 400."""
    found = _PLACE.fullmatch(query.after)
    if not found:
        raise invalid("'after' is the 'next_after' of an earlier answer.", "after")
    async with session_of(state, REPORT_S) as session:
        entries, place = await entries_from(session, Place(int(found[1]), int(found[2])), query.limit)
    return entries, f"{place.number}.{place.index}"


def _listed(events: list[Body], has_more: bool, after: str) -> Body:
    return listed(events, has_more=has_more, next_after=after)
