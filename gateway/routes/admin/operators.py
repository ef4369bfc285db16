"""/admin/v1/operators: named keys of this port."""

import msgspec
from litestar import Controller, Request, delete, get, post
from litestar.datastructures import State
from litestar.params import FromPath, JSONBody

from gateway.administration import Instant, Rotation, change, found, needs, optional_body, session_of
from gateway.views.rows import Body, listed, operator_body
from tenants import keys
from tenants.audit_log import Change
from tenants.key_repository import OperatorRepository
from tenants.tables import OperatorKey

_NS = 10**9


class NewOperator(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    scopes: tuple[str, ...] = ("read",)
    expires_at: Instant | None = None


class Operators(Controller):
    path = "/operators"

    @get(guards=[needs("read")])
    async def list_all(self, state: State) -> Body:
        async with session_of(state) as session:
            every = await OperatorRepository(session).list_all()
        return listed([operator_body(key) for key in every])

    @post(guards=[needs("admin")])
    async def create(self, request: Request, state: State, data: JSONBody[NewOperator]) -> Body:
        """The key's text is in this answer and nowhere else."""
        new = keys.issue("ops", state.ops.secrets)

        async def work(session) -> tuple[Body, Change]:
            expires = data.expires_at * _NS if data.expires_at else None
            key = await OperatorRepository(session).create(new, data.name, data.scopes, expires)
            return _changed("operator.create", key, None)

        return await change(request, work) | {"operator_key": new.minted.text}

    @get("/{key_id:str}", guards=[needs("read")])
    async def show(self, state: State, key_id: FromPath[str]) -> Body:
        async with session_of(state) as session:
            return operator_body(await _operator(session, key_id))

    @post("/{key_id:str}/rotate", guards=[needs("admin")])
    async def rotate(self, request: Request, state: State, key_id: FromPath[str]) -> Body:
        """A new key with the old one's name, scopes and expiry; the old one lives on for a while."""
        overlap_s = (await optional_body(request, Rotation)).overlap_seconds
        new = keys.issue("ops", state.ops.secrets)

        async def work(session) -> tuple[Body, Change]:
            old = await _operator(session, key_id)
            before = operator_body(old)
            key = await OperatorRepository(session).rotate(key_id, new, overlap_s)
            after = {"old": operator_body(old), "new": operator_body(key)}
            return operator_body(key), Change("operator.rotate", key_id, before, after)

        return await change(request, work) | {"operator_key": new.minted.text}

    @delete("/{key_id:str}", guards=[needs("admin")], status_code=200)
    async def revoke(self, request: Request, key_id: FromPath[str]) -> Body:
        """Refused for the last key that may administer."""

        async def work(session) -> tuple[Body, Change]:
            before = operator_body(await _operator(session, key_id))
            return _changed("operator.revoke", await OperatorRepository(session).revoke(key_id), before)

        await change(request, work)
        return {"id": key_id, "object": "operator", "deleted": True}


async def _operator(session, key_id: str) -> OperatorKey:
    return found(await OperatorRepository(session).get(key_id), f"no operator {key_id}")


def _changed(action: str, key: OperatorKey, before: Body | None) -> tuple[Body, Change]:
    after = operator_body(key)
    return after, Change(action, key.key_id, before, after)
