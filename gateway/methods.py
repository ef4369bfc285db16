"""Methods that the framework answers by itself: OPTIONS, which our APIs don't have, and HEAD, GET without its body."""

from typing import Any, cast

from litestar.exceptions import HTTPException
from litestar.types import ASGIApp, HTTPScope, Receive, Scope, Send

_ROUTED_AS = {"OPTIONS": "TRACE", "HEAD": "GET"}
_ASKED = "asked_method"


def with_our_methods(app: Any) -> ASGIApp:
    """HEAD is routed as GET: the server, which has seen what was asked, sends no body. OPTIONS is routed as TRACE,
    which no route has: 405 with what is allowed there, or 404, and never an answer without a key."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] in _ROUTED_AS:
            state = {**scope.get("state", {}), _ASKED: scope["method"]}
            scope = {**scope, "method": _ROUTED_AS[scope["method"]], "state": state}  # pyright: ignore[reportAssignmentType]
        await app(scope, receive, send)

    return serve


def asked_method(scope: Scope) -> str:
    """What the caller said, however it was routed."""
    return cast(HTTPScope, scope)["state"].get(_ASKED) or cast(HTTPScope, scope)["method"]


def allowed_methods(error: HTTPException) -> str:
    """Of the framework's 405: what its Allow header says, without what we don't have."""
    methods = set((error.headers or {}).get("allow", "").split(", ")) - {"", "OPTIONS"}
    return ", ".join(sorted(methods | ({"HEAD"} if "GET" in methods else set())))
