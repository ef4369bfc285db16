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
    without the route's scope, 503 for a key that we can't look for. No query: the directory is in memory."""
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
    """Whom ``find``, of the directory, knows by the bearer key of an Authorization header.

    A key that it never heard of may have been made a moment ago: it is looked for once more, by those who may still
    fail. Raises ApiError 401, 429, and 503 when nobody can say whether there is such a key.
    """
    text = _bearer(authorization)
    if (holder := find(text)) is not None:
        return holder
    peer = peer_of(scope)
    if authorization:  # nobody guesses with no key at all
        _count(failures, peer)
    if directory.may_be_new(text):
        looked = await directory.next_look()
        holder = find(text)
        if holder is not None or not looked:
            failures.forgive(peer)
        if holder is not None:
            return holder
        if not looked:
            raise ApiError("The database does not answer; try again.", code="store_unavailable")
    raise invalid_key()


def _bearer(authorization: str) -> str:
    """The key; '' for what can't be one."""
    scheme, _, key = authorization.partition(" ")
    text = key.strip() if scheme.lower() == "bearer" else ""
    return text if len(text) <= _MAX_KEY_CHARS else ""


def _count(failures: FailedAttempts, peer: str) -> None:
    """Raises ApiError 429 for an address with too many failures."""
    wait_s = failures.record(peer)
    if wait_s is not None:
        raise ApiError(
            "Too many failed authentications from this address; wait, and use a valid key.",
            code="rate_limit_exceeded",
            retry_ms=max(1, round(1000 * wait_s)),
        )
