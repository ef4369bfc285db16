"""/admin/v1/tenants/{id}/keys and /admin/v1/keys: make, show, limit, rotate, revoke."""

from typing import Any

import msgspec
from litestar import Controller, Request, delete, get, patch, post
from litestar.datastructures import State
from litestar.params import FromPath, JSONBody

from gateway.administration import Instant, Rotation, change, found, needs, optional_body, session_of
from gateway.routes.admin.tenants import tenant_of
from gateway.views.rows import Body, key_body, key_limits_body, listed
from tenants import keys
from tenants.audit_log import Change
from tenants.key_repository import KeyRepository
from tenants.limits import KEY_SCOPES
from tenants.repositories import TenantRepository
from tenants.tables import ApiKey

_NS = 10**9


class NewKey(msgspec.Struct, forbid_unknown_fields=True):
    """``expires_at`` in Unix seconds; None = never."""

    name: str = ""
    flow_class: str = msgspec.field(default="standard", name="class")
    scopes: tuple[str, ...] = KEY_SCOPES
    expires_at: Instant | None = None


class TenantKeys(Controller):
    path = "/tenants/{tenant_id:str}/keys"

    @get(guards=[needs("read")])
    async def list_all(self, state: State, tenant_id: FromPath[str]) -> Body:
        await tenant_of(state, tenant_id)
        async with session_of(state) as session:
            every = await KeyRepository(session).list_all(tenant_id)
        return listed([key_body(key) for key in every])

    @post(guards=[needs("admin")])
    async def create(self, request: Request, state: State, tenant_id: FromPath[str], data: JSONBody[NewKey]) -> Body:
        """The key's text is in this answer and nowhere else."""
        new = keys.issue("live", state.ops.secrets)
        fields = {"name": data.name, "flow_class": data.flow_class, "scopes": data.scopes}

        async def work(session) -> tuple[Body, Change]:
            expires = data.expires_at * _NS if data.expires_at else None
            key = await KeyRepository(session).create(tenant_id, new, **fields, expires_unix_ns=expires)
            return _changed("key.create", key, None)

        return await change(request, work) | {"api_key": new.minted.text}


class Keys(Controller):
    path = "/keys/{key_id:str}"

    @get(guards=[needs("read")])
    async def show(self, state: State, key_id: FromPath[str]) -> Body:
        async with session_of(state) as session:
            return key_body(await _key(session, key_id))

    @delete(guards=[needs("admin")], status_code=200)
    async def revoke(self, request: Request, key_id: FromPath[str]) -> Body:
        """What it runs ends at its next step."""

        async def work(session) -> tuple[Body, Change]:
            key = await _locked_key(session, key_id)
            before = key_body(key)
            return _changed("key.revoke", await KeyRepository(session).revoke(key.tenant_id, key_id), before)

        await change(request, work)
        return {"id": key_id, "object": "api_key", "deleted": True}

    @post("/rotate", guards=[needs("admin")])
    async def rotate(self, request: Request, state: State, key_id: FromPath[str]) -> Body:
        """A new key with the old one's name, class, scopes, expiry and limits; the old one lives on for a while."""
        overlap_s = (await optional_body(request, Rotation)).overlap_seconds
        new = keys.issue("live", state.ops.secrets)

        async def work(session) -> tuple[Body, Change]:
            old = await _locked_key(session, key_id)
            before = key_body(old)
            key = await KeyRepository(session).rotate(old.tenant_id, key_id, new, overlap_s)
            after = {"old": key_body(old), "new": key_body(key)}
            return key_body(key), Change("key.rotate", key_id, before, after)

        return await change(request, work) | {"api_key": new.minted.text}

    @get("/limits", guards=[needs("read")])
    async def limits(self, state: State, key_id: FromPath[str]) -> Body:
        async with session_of(state) as session:
            return key_limits_body(await _key(session, key_id))

    @patch("/limits", guards=[needs("admin")])
    async def set_limits(self, request: Request, key_id: FromPath[str], data: JSONBody[dict[str, Any]]) -> Body:
        """null takes a limit away. With ``model`` or ``adapter``: of what the key does with that one alone."""

        async def work(session) -> tuple[Body, Change]:
            key = await _locked_key(session, key_id)
            before = key_body(key)
            changed = await KeyRepository(session).set_limits(key.tenant_id, key_id, data)
            return _changed("key.set_limits", changed, before)

        return (await change(request, work))["limits"]


async def _key(session, key_id: str) -> ApiKey:
    repository = KeyRepository(session)
    tenant_id = await repository.owner(key_id)
    return found(tenant_id and await repository.get(tenant_id, key_id), f"no key {key_id}")


async def _locked_key(session, key_id: str) -> ApiKey:
    """For a change; its tenant first."""
    repository = KeyRepository(session)
    tenant_id = found(await repository.owner(key_id), f"no key {key_id}")
    await TenantRepository(session).lock(tenant_id)
    return await repository.lock(tenant_id, key_id)


def _changed(action: str, key: ApiKey, before: Body | None) -> tuple[Body, Change]:
    after = key_body(key)
    return after, Change(action, key.key_id, before, after)
