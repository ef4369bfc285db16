"""How everything under /admin/v1 is done: by an operator with the scope, in one transaction with its audit event."""

import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Annotated, Any, TypeVar

import msgspec
from litestar import Request
from litestar.connection import ASGIConnection
from litestar.datastructures import State
from litestar.handlers import BaseRouteHandler
from redis.asyncio import Redis
from sqlmodel.ext.asyncio.session import AsyncSession

from gateway.auth import holder_of
from gateway.errors import ApiError
from tenants.audit_log import Actor, AuditLog, Change
from tenants.database import PROMPT_S
from tenants.directory import bump_epoch
from tenants.errors import NotFound, StoreUnavailable

DEFAULT_OVERLAP_S = 86_400
MAX_OVERLAP_S = 30 * 86_400
_T = TypeVar("_T")
_Body = TypeVar("_Body", bound=msgspec.Struct)
_log = logging.getLogger("gateway.administration")

Instant = Annotated[int, msgspec.Meta(gt=0, lt=1 << 33)]  # Unix seconds


class Rotation(msgspec.Struct, forbid_unknown_fields=True):
    """How long the old key lives beside the new one; 0 ends it at once."""

    overlap_seconds: Annotated[int, msgspec.Meta(ge=0, le=MAX_OVERLAP_S)] = DEFAULT_OVERLAP_S


def needs(scope: str) -> Callable[[ASGIConnection, BaseRouteHandler], Awaitable[None]]:
    """A guard: 401 without an operator's key, 429 after many of those, 403 without the scope (``admin`` has all)."""

    async def guard(connection: ASGIConnection, handler: BaseRouteHandler) -> None:
        state, directory = connection.app.state, connection.app.state.ops.directory
        header = connection.headers.get("authorization", "")
        find = directory.authenticate_operator
        operator = await holder_of(header, directory, find, state.failures, connection.scope)
        if not operator.scopes & {scope, "admin"}:
            raise ApiError(f"This operator key lacks the scope `{scope}`.", code="insufficient_scope")
        connection.scope["state"]["actor"] = Actor(operator.key_id, operator.name)

    return guard


async def change(
    request: Request,
    work: Callable[[AsyncSession], Awaitable[tuple[_T, Change | None]]],
    deadline_s: float = PROMPT_S,
) -> _T:
    """Does the work and writes what it changed into the audit log, both or neither; then tells every gateway. None:
    there was nothing to do. Raises SQLAlchemyError when the database does not do it in time."""
    ops = request.app.state.ops
    async with ops.database.within(deadline_s).transaction() as session:
        result, what = await work(session)
        if what is not None:
            await AuditLog(session).append(request.scope["state"]["actor"], what)
    if what is not None:
        await announce(ops.redis)
    return result


async def announce(redis: Redis) -> None:
    """As well as can be: the change is made, and a gateway that can't reach the store reads the database."""
    try:
        await bump_epoch(redis)
    except StoreUnavailable as error:
        _log.warning("%s; gateways that miss the store as well find it within a second", error)


async def optional_body(request: Request, kind: type[_Body]) -> _Body:
    """The body, or what an absent one stands for. Raises msgspec's errors."""
    body = await request.body()
    return msgspec.json.decode(body, type=kind) if body else kind()


def session_of(state: State, deadline_s: float = PROMPT_S) -> AbstractAsyncContextManager[AsyncSession]:
    """For reading, in time."""
    return state.ops.database.within(deadline_s).session()


def found(thing: Any, message: str) -> Any:
    """Raises NotFound."""
    if not thing:
        raise NotFound(message)
    return thing
