"""/admin/v1/slo-objectives and /reports/slo: what tenants are promised, and what they got."""

import time
from typing import Any, Literal

import msgspec
from litestar import Controller, Request, Response, delete, get, put
from litestar.datastructures import State

from gateway.administration import change, found, needs, session_of
from gateway.errors import ApiError
from gateway.views.rows import Body, listed, objective_body
from gateway.views.slo import answer
from tenants.audit_log import Change
from tenants.database import REPORT_S
from tenants.errors import InvalidValue
from tenants.repositories import TenantRepository
from tenants.slo import openslo
from tenants.slo.objectives import Objective, Sli
from tenants.slo.repository import ObjectiveRepository
from tenants.slo.watch import incident_data, incidents_of

MAX_INCIDENTS = 1000
_YAML = "application/yaml; charset=utf-8"


class ObjectiveQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``history``: every version that ever was, in JSON only."""

    tenant: str
    format: Literal["json", "openslo"] = "json"
    history: bool = False


class ObjectiveScope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which objectives; of no ``sli`` all of that model and class."""

    tenant: str
    model: str
    flow_class: str = msgspec.field(name="class")
    sli: Sli | None = None


class IncidentQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tenant: str


class SloObjectives(Controller):
    path = "/slo-objectives"

    @get(guards=[needs("read")])
    async def show(self, request: Request, state: State) -> Response[Any]:
        """The last version of each, which may come into force in a minute; as JSON or as OpenSLO documents."""
        query = msgspec.convert(dict(request.query_params), ObjectiveQuery, strict=False)
        async with session_of(state) as session:
            found(await TenantRepository(session).ever_was(query.tenant), f"no tenant {query.tenant}")
            objectives = ObjectiveRepository(session)
            last = await (objectives.history(query.tenant) if query.history else objectives.latest(query.tenant))
        if query.format == "openslo":
            return Response(openslo.write(last) if last else "", media_type=_YAML)
        return Response(listed([objective_body(each) for each in last]))

    @put(guards=[needs("admin")])
    async def set(self, request: Request) -> Body:
        """The body is one OpenSLO document or several, YAML or JSON. What it does not name stays; a version that is
        not new is none. In force from the next minute on."""
        drafts = openslo.read(await _body(request))
        tenant_ids = {each.tenant_id for each in drafts}
        if len(tenant_ids) > 1:
            raise InvalidValue("document", "is of one tenant; put those of others apart")
        tenant_id = tenant_ids.pop()

        async def work(session) -> tuple[list[Objective], Change]:
            found(await TenantRepository(session).get(tenant_id), f"no tenant {tenant_id}")
            objectives = ObjectiveRepository(session)
            before = await objectives.latest(tenant_id)
            standing = await objectives.set(drafts, time.time_ns())
            return standing, _changed("slo.set", tenant_id, before, await objectives.latest(tenant_id))

        return listed([objective_body(each) for each in await change(request, work)])

    @delete(guards=[needs("admin")], status_code=200)
    async def retire(self, request: Request) -> Body:
        """From the next minute on nothing is promised there; reports of earlier times keep their versions."""
        scope = msgspec.convert(dict(request.query_params), ObjectiveScope, strict=False)

        async def work(session) -> tuple[list[Objective], Change]:
            objectives = ObjectiveRepository(session)
            before = await objectives.latest(scope.tenant)
            wanted = [each for each in before if _is_in(scope, each)]
            found(wanted, f"{scope.tenant} has no such objective")
            await objectives.retire(wanted, time.time_ns())
            return wanted, _changed("slo.delete", scope.tenant, before, await objectives.latest(scope.tenant))

        gone = await change(request, work)
        return {"object": "slo_objective", "tenant_id": scope.tenant, "deleted": True, "num_objectives": len(gone)}


class SloReports(Controller):
    @get("/slo-incidents", guards=[needs("read")])
    async def incidents(self, request: Request, state: State) -> Body:
        """Alerts that were raised for a tenant, the last MAX_INCIDENTS, newest first; ``closed_at`` null: still so."""
        query = msgspec.convert(dict(request.query_params), IncidentQuery)
        async with session_of(state) as session:
            found(await TenantRepository(session).ever_was(query.tenant), f"no tenant {query.tenant}")
            newest = await incidents_of(session, query.tenant, MAX_INCIDENTS)
        return listed([{"object": "slo_incident", **incident_data(each)} for each in newest])

    @get("/reports/slo", guards=[needs("billing")])
    async def report(self, request: Request, state: State) -> Response[Any]:
        """Of ``tenant``, also a deleted one, in [start, end); ``format`` is json, csv or html."""
        asked = dict(request.query_params)
        tenant_id = asked.get("tenant")
        if not tenant_id:
            raise InvalidValue("tenant", "is required")
        async with session_of(state, REPORT_S) as session:
            tenant = found(await TenantRepository(session).even_deleted(tenant_id), f"no tenant {tenant_id}")
            return await answer(session, tenant, asked)


async def _body(request: Request) -> bytes:
    """Read no further than it may be."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > openslo.MAX_DOCUMENT_BYTES:
            raise ApiError(f"The body is larger than {openslo.MAX_DOCUMENT_BYTES} bytes.", code="payload_too_large")
    return body


def _is_in(scope: ObjectiveScope, objective: Objective) -> bool:
    mine = (objective.model, objective.flow_class) == (scope.model, scope.flow_class)
    return mine and scope.sli in (None, objective.sli)


def _changed(action: str, tenant_id: str, before: list[Objective], after: list[Objective]) -> Change:
    return Change(action, tenant_id, {"objectives": _bodies(before)}, {"objectives": _bodies(after)})


def _bodies(objectives: list[Objective]) -> list[Body]:
    return [objective_body(each) for each in objectives]
