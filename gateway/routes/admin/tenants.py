"""/admin/v1/tenants: make, show, change, export, delete."""

import asyncio
import time
from typing import Any, Literal

import msgspec
from litestar import Controller, Request, delete, get, patch, post
from litestar.datastructures import State
from litestar.params import FromPath, JSONBody
from litestar.response import Stream

from gateway.administration import change, found, needs, session_of
from gateway.views.export import export_lines
from gateway.views.rows import Body, limits_of, listed, tenant_body
from tenants.audit_log import Change
from tenants.database import REPORT_S
from tenants.deletion import delete_tenant
from tenants.limits import TENANT_LIMITS
from tenants.quota.alerts import alert_of_limits
from tenants.repositories import TenantRepository
from tenants.tables import Tenant


class NewTenant(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    time_zone: str = "UTC"
    billing_anchor_day: int = 1
    limits: dict[str, Any] = {}


class TenantChanges(msgspec.Struct, forbid_unknown_fields=True):
    """None leaves a field as it is, but ``billing_reference``, which it takes away."""

    name: str | None = None
    status: Literal["active", "suspended"] | None = None
    time_zone: str | None = None
    billing_anchor_day: int | None = None
    billing_reference: str | msgspec.UnsetType | None = msgspec.UNSET


class Tenants(Controller):
    path = "/tenants"

    @get(guards=[needs("read")])
    async def list_all(self, state: State) -> Body:
        async with session_of(state) as session:
            tenants = await TenantRepository(session).list_all()
        return listed([tenant_body(tenant) for tenant in tenants])

    @post(guards=[needs("admin")])
    async def create(self, request: Request, data: JSONBody[NewTenant]) -> Body:
        async def work(session) -> tuple[Body, Change]:
            tenants = TenantRepository(session)
            tenant = await tenants.create(data.name, data.time_zone, data.limits)
            await tenants.set_billing_anchor_day(tenant.tenant_id, data.billing_anchor_day)
            return _changed("tenant.create", tenant, None)

        return await change(request, work)

    @get("/{tenant_id:str}", guards=[needs("read")])
    async def show(self, state: State, tenant_id: FromPath[str]) -> Body:
        return tenant_body(await tenant_of(state, tenant_id))

    @patch("/{tenant_id:str}", guards=[needs("admin")])
    async def change(self, request: Request, tenant_id: FromPath[str], data: JSONBody[TenantChanges]) -> Body:
        """Name, status, calendar, billing reference. A suspended tenant's running requests end at their next step."""

        async def work(session) -> tuple[Body, Change]:
            tenants = TenantRepository(session)
            tenant = await tenants.lock(tenant_id)
            before = tenant_body(tenant)
            if data.name is not None:
                await tenants.rename(tenant_id, data.name)
            if data.status is not None:
                await tenants.set_status(tenant_id, data.status)
            if data.time_zone is not None:
                await tenants.set_time_zone(tenant_id, data.time_zone)
            if data.billing_anchor_day is not None:
                await tenants.set_billing_anchor_day(tenant_id, data.billing_anchor_day)
            if data.billing_reference is not msgspec.UNSET:
                await tenants.set_billing_reference(tenant_id, data.billing_reference)
            return _changed("tenant.change", tenant, before)

        return await change(request, work)

    @get("/{tenant_id:str}/limits", guards=[needs("read")])
    async def limits(self, state: State, tenant_id: FromPath[str]) -> Body:
        return limits_of(await tenant_of(state, tenant_id), TENANT_LIMITS)

    @patch("/{tenant_id:str}/limits", guards=[needs("admin")])
    async def set_limits(self, request: Request, tenant_id: FromPath[str], data: JSONBody[dict[str, Any]]) -> Body:
        async def work(session) -> tuple[Body, Change]:
            tenants = TenantRepository(session)
            before = tenant_body(await tenants.lock(tenant_id))
            tenant = await tenants.set_limits(tenant_id, data)
            await alert_of_limits(session, tenant_id, time.time_ns())
            return _changed("tenant.set_limits", tenant, before)

        return (await change(request, work))["limits"]

    @get("/{tenant_id:str}/export", guards=[needs("admin")])
    async def export(self, state: State, tenant_id: FromPath[str]) -> Stream:
        """All that is kept of it, a JSON object a line; the last one counts them. No key's digest."""
        tenant = await tenant_of(state, tenant_id)
        return Stream(export_lines(state.ops.database.within(REPORT_S), tenant), media_type="application/x-ndjson")

    @delete("/{tenant_id:str}", guards=[needs("admin")], status_code=200)
    async def delete(self, request: Request, state: State, tenant_id: FromPath[str]) -> Body:
        """Keys, adapters and their bytes are gone, also at the engines; what it runs ends at its next step. Records
        and ledger entries stay for the books."""

        async def work(session) -> tuple[list[str], Change]:
            before = tenant_body(await TenantRepository(session).lock(tenant_id))
            orphans = await delete_tenant(session, tenant_id, time.time_ns())
            return orphans, Change("tenant.delete", tenant_id, before, None)

        orphans = await change(request, work)
        await asyncio.to_thread(state.ops.blobs.delete_tenant, tenant_id)
        for sha256 in orphans:
            state.fleet.forget_adapter(state.ops.secrets.adapter_key(tenant_id, sha256))
        return {"id": tenant_id, "object": "tenant", "deleted": True}


async def tenant_of(state: State, tenant_id: str) -> Tenant:
    """Raises NotFound."""
    async with session_of(state) as session:
        return found(await TenantRepository(session).get(tenant_id), f"no tenant {tenant_id}")


def _changed(action: str, tenant: Tenant, before: Body | None) -> tuple[Body, Change]:
    after = tenant_body(tenant)
    return after, Change(action, tenant.tenant_id, before, after)
