"""/admin/v1: tenants, keys, limits, models, engines, ledger and prices, for operators' keys.

Scopes: ``read`` looks at everything but money, ``billing`` at money, ``admin`` may do all. Every change is
announced through the epoch and is in force at every gateway within a second.
"""

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal

import msgspec
from litestar import Controller, Request, Router, delete, get, patch, post
from litestar.connection import ASGIConnection
from litestar.datastructures import State
from litestar.handlers import BaseRouteHandler
from litestar.params import FromPath, JSONBody

from gateway.errors import ApiError, invalid, invalid_key
from gateway.ledger_view import EntryQuery, entries, entry_body
from tenants import keys
from tenants.directory import bump_epoch
from tenants.errors import NotFound
from tenants.pricing import RateCard
from tenants.repositories import (
    KEY_LIMITS,
    TENANT_LIMITS,
    KeyRepository,
    RateCardRepository,
    TenantRepository,
)
from tenants.tables import ApiKey, Tenant

_NS = 10**9
Body = dict[str, Any]


class NewTenant(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    time_zone: str = "UTC"
    limits: dict[str, Any] = {}


class TenantChanges(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    status: Literal["active", "suspended"] | None = None
    time_zone: str | None = None


class NewKey(msgspec.Struct, forbid_unknown_fields=True):
    name: str = ""
    flow_class: str = msgspec.field(default="standard", name="class")
    expires_at: Annotated[int, msgspec.Meta(gt=0, lt=1 << 33)] | None = None  # Unix seconds


def needs(scope: str) -> Callable[[ASGIConnection, BaseRouteHandler], None]:
    """A guard: 401 without an operator's key, 403 without the scope (``admin`` has all)."""

    def guard(connection: ASGIConnection, handler: BaseRouteHandler) -> None:
        text = connection.headers.get("authorization", "")
        kind, _, key = text.partition(" ")
        operator = connection.app.state.ops.directory.authenticate_operator(key.strip())
        if kind.lower() != "bearer" or operator is None:
            raise invalid_key()
        if not operator.scopes & {scope, "admin"}:
            raise ApiError(f"This operator key lacks the scope `{scope}`.", code="insufficient_scope")

    return guard


def admin_routes() -> Router:
    """Everything under /admin/v1."""
    return Router("/admin/v1", route_handlers=[Tenants, Keys, Machines, Money])


class Tenants(Controller):
    path = "/tenants"

    @get(guards=[needs("read")])
    async def list_all(self, state: State) -> Body:
        async with state.ops.database.session() as session:
            tenants = await TenantRepository(session).list_all()
        return _list([tenant_body(tenant) for tenant in tenants])

    @post(guards=[needs("admin")])
    async def create(self, state: State, data: JSONBody[NewTenant]) -> Body:
        async def work(session) -> Tenant:
            return await TenantRepository(session).create(data.name, data.time_zone, data.limits)

        return tenant_body(await _change(state, work))

    @get("/{tenant_id:str}", guards=[needs("read")])
    async def show(self, state: State, tenant_id: FromPath[str]) -> Body:
        return tenant_body(await _tenant(state, tenant_id))

    @patch("/{tenant_id:str}", guards=[needs("admin")])
    async def change(self, state: State, tenant_id: FromPath[str], data: JSONBody[TenantChanges]) -> Body:
        async def work(session) -> Tenant:
            tenants = TenantRepository(session)
            if data.status is not None:
                await tenants.set_status(tenant_id, data.status)
            if data.time_zone is not None:
                await tenants.set_time_zone(tenant_id, data.time_zone)
            return _found(await tenants.get(tenant_id), f"no tenant {tenant_id}")

        return tenant_body(await _change(state, work))

    @get("/{tenant_id:str}/limits", guards=[needs("read")])
    async def limits(self, state: State, tenant_id: FromPath[str]) -> Body:
        return _limits(await _tenant(state, tenant_id), TENANT_LIMITS)

    @patch("/{tenant_id:str}/limits", guards=[needs("admin")])
    async def set_limits(self, state: State, tenant_id: FromPath[str], data: JSONBody[dict[str, Any]]) -> Body:
        async def work(session) -> Tenant:
            return await TenantRepository(session).set_limits(tenant_id, data)

        return _limits(await _change(state, work), TENANT_LIMITS)

    @get("/{tenant_id:str}/keys", guards=[needs("read")])
    async def keys(self, state: State, tenant_id: FromPath[str]) -> Body:
        await _tenant(state, tenant_id)
        async with state.ops.database.session() as session:
            found = await KeyRepository(session).list_all(tenant_id)
        return _list([key_body(key) for key in found])

    @post("/{tenant_id:str}/keys", guards=[needs("admin")])
    async def create_key(self, state: State, tenant_id: FromPath[str], data: JSONBody[NewKey]) -> Body:
        """The key's text is in this answer and nowhere else."""
        minted = keys.mint("live")

        async def work(session) -> ApiKey:
            return await KeyRepository(session).create(
                tenant_id,
                minted,
                keys.digest(minted.text, state.ops.secrets.key_pepper),
                name=data.name,
                flow_class=data.flow_class,
                expires_unix_ns=data.expires_at * _NS if data.expires_at else None,
            )

        return key_body(await _change(state, work)) | {"api_key": minted.text}


class Keys(Controller):
    path = "/keys/{key_id:str}"

    @get(guards=[needs("read")])
    async def show(self, state: State, key_id: FromPath[str]) -> Body:
        async with state.ops.database.session() as session:
            return key_body(await _key(session, key_id))

    @delete(guards=[needs("admin")], status_code=200)
    async def revoke(self, state: State, key_id: FromPath[str]) -> Body:
        async def work(session) -> ApiKey:
            key = await _key(session, key_id)
            return await KeyRepository(session).revoke(key.tenant_id, key_id)

        await _change(state, work)
        return {"id": key_id, "object": "api_key", "deleted": True}

    @post("/rotate", guards=[needs("admin")])
    async def rotate(self, state: State, key_id: FromPath[str]) -> Body:
        """A new key with the old one's name, class, expiry and limits; the old one is revoked with it."""
        minted = keys.mint("live")
        digest = keys.digest(minted.text, state.ops.secrets.key_pepper)

        async def work(session) -> ApiKey:
            repository, old = KeyRepository(session), await _key(session, key_id)
            if old.revoked_unix_ns is not None:
                raise invalid(f"Key {key_id} is revoked: create another.")
            same = {"name": old.name, "flow_class": old.flow_class, "expires_unix_ns": old.expires_unix_ns}
            new = await repository.create(old.tenant_id, minted, digest, **same)
            await repository.set_limits(old.tenant_id, new.key_id, _limits(old, KEY_LIMITS))
            await repository.revoke(old.tenant_id, key_id)
            return new

        return key_body(await _change(state, work)) | {"api_key": minted.text}

    @get("/limits", guards=[needs("read")])
    async def limits(self, state: State, key_id: FromPath[str]) -> Body:
        async with state.ops.database.session() as session:
            return _limits(await _key(session, key_id), KEY_LIMITS)

    @patch("/limits", guards=[needs("admin")])
    async def set_limits(self, state: State, key_id: FromPath[str], data: JSONBody[dict[str, Any]]) -> Body:
        async def work(session) -> ApiKey:
            key = await _key(session, key_id)
            return await KeyRepository(session).set_limits(key.tenant_id, key_id, data)

        return _limits(await _change(state, work), KEY_LIMITS)


class Machines(Controller):
    @get("/models", guards=[needs("read")])
    async def models(self, state: State) -> Body:
        return _list(state.fleet.models())

    @get("/engines", guards=[needs("read")])
    async def engines(self, state: State) -> Body:
        await state.fleet.pull()
        return _list(await state.fleet.engines())


class Money(Controller):
    @get("/ledger", guards=[needs("billing")])
    async def ledger(self, request: Request, state: State) -> Body:
        """A tenant's charges, newest first, filtered by the fields of EntryQuery."""
        query = msgspec.convert(dict(request.query_params), EntryQuery, strict=False)
        await _tenant(state, query.tenant_id)
        async with state.ops.database.session() as session:
            found = await entries(session, query)
        return _list([entry_body(entry) for entry in found[: query.limit]], has_more=len(found) > query.limit)

    @get("/rate-cards", guards=[needs("billing")])
    async def rate_cards(self, state: State) -> Body:
        async with state.ops.database.session() as session:
            cards = await RateCardRepository(session).list_all()
        return _list([rate_card_body(card) for card in cards])


def tenant_body(tenant: Tenant) -> Body:
    return {
        "id": tenant.tenant_id,
        "object": "tenant",
        "name": tenant.name,
        "status": tenant.status,
        "time_zone": tenant.time_zone,
        "created_at": tenant.created_unix_ns // _NS,
        "limits": _limits(tenant, TENANT_LIMITS),
    }


def key_body(key: ApiKey) -> Body:
    """Never the key itself, nor its digest."""
    return {
        "id": key.key_id,
        "object": "api_key",
        "tenant_id": key.tenant_id,
        "name": key.name,
        "last4": key.last4,
        "class": key.flow_class,
        "created_at": key.created_unix_ns // _NS,
        "expires_at": _seconds(key.expires_unix_ns),
        "revoked_at": _seconds(key.revoked_unix_ns),
        "limits": _limits(key, KEY_LIMITS),
    }


def rate_card_body(card: RateCard) -> Body:
    items = [
        {"meter": meter, "model": model, "class": flow_class, "price_picousd": price}
        for (meter, model, flow_class), price in sorted(card.prices.items())
    ]
    return {
        "id": card.rate_card_id,
        "object": "rate_card",
        "version": card.version,
        "effective_at": _seconds(card.effective_unix_ns),
        "currency": card.currency,
        "items": items,
    }


async def _change(state: State, work: Callable[[Any], Awaitable[Any]]) -> Any:
    """One transaction, then the word to every gateway."""
    async with state.ops.database.transaction() as session:
        changed = await work(session)
    await bump_epoch(state.ops.redis)
    return changed


async def _tenant(state: State, tenant_id: str) -> Tenant:
    async with state.ops.database.session() as session:
        return _found(await TenantRepository(session).get(tenant_id), f"no tenant {tenant_id}")


async def _key(session, key_id: str) -> ApiKey:
    repository = KeyRepository(session)
    tenant_id = await repository.owner(key_id)
    return _found(tenant_id and await repository.get(tenant_id, key_id), f"no key {key_id}")


def _found(thing: Any, message: str) -> Any:
    if not thing:
        raise NotFound(message)
    return thing


def _limits(row: Tenant | ApiKey, names: tuple[str, ...]) -> Body:
    return {name: getattr(row, name) for name in names}


def _seconds(unix_ns: int | None) -> int | None:
    return None if unix_ns is None else unix_ns // _NS


def _list(data: list[Body], **more: Any) -> Body:
    return {"object": "list", "data": data, **more}
