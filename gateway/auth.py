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


def authenticate(directory: Directory, failures: FailedAttempts, call: Call) -> Principal:
    """Raises ApiError 401, the same for every reason, 429 for an address with too many of those, 403 for a key
    without the route's scope. No query: the directory is in memory."""
    header = call.header(b"authorization") or ""
    principal = call.principal = holder_of(header, directory.authenticate, failures, call.scope)
    scope = access_of(call.scope).scope
    if scope is not None and scope not in principal.scopes:
        raise ApiError(f"This key lacks the scope `{scope}`.", code="insufficient_scope")
    return principal


def holder_of(
    authorization: str, find: Callable[[str], _Holder | None], failures: FailedAttempts, scope: Scope
) -> _Holder:
    """Whom ``find`` knows by the bearer key of an Authorization header. Raises ApiError 401 and 429."""
    scheme, _, key = authorization.partition(" ")
    text = key.strip() if scheme.lower() == "bearer" else ""
    holder = find(text if len(text) <= _MAX_KEY_CHARS else "")
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
