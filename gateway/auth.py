"""Who is calling: the bearer key of a request → Principal, if it may use the route that it calls."""

from collections.abc import Callable
from typing import TypeVar

from litestar.types import Scope

from gateway.access import access_of
from gateway.call import Call
from gateway.errors import ApiError, invalid_key
from gateway.failures import FailedAttempts, peer_of
from tenants.directory import Directory, Principal

_MAX_KEY_CHARS = 128
_Holder = TypeVar("_Holder")


async def authenticate(directory: Directory, failures: FailedAttempts, call: Call) -> Principal:
    """Raises ApiError 401, the same for every reason, 429 for an address with too many of those, 403 for a key
    without the route's scope. No query: the directory is in memory."""
    header = call.header(b"authorization") or ""
    principal = call.principal = await holder_of(header, directory, directory.authenticate, failures, call.scope)
    scope = access_of(call.scope).scope
    if scope is not None and scope not in principal.scopes:
        raise ApiError(f"This key lacks the scope `{scope}`.", code="insufficient_scope")
    return principal


async def holder_of(
    authorization: str,
    directory: Directory,
    find: Callable[[str], _Holder | None],
    failures: FailedAttempts,
    scope: Scope,
) -> _Holder:
    """Whom ``find``, of the directory, knows by the bearer key of an Authorization header. A key that it never heard of
    may have been made a moment ago, so that it is looked for once more. Raises ApiError 401 and 429."""
    scheme, _, key = authorization.partition(" ")
    text = key.strip() if scheme.lower() == "bearer" else ""
    text = text if len(text) <= _MAX_KEY_CHARS else ""
    holder = find(text)
    if holder is None and directory.may_be_new(text):
        await directory.next_look()
        holder = find(text)
    if holder is not None:
        return holder
    wait_s = failures.record(peer_of(scope)) if authorization else None  # nobody guesses with no key at all
    if wait_s is None:
        raise invalid_key()
    raise ApiError(
        "Too many failed authentications from this address; wait, and use a valid key.",
        code="rate_limit_exceeded",
        retry_ms=max(1, round(1000 * wait_s)),
    )
