"""Methods that our APIs don't have, and that the framework would answer by itself, without a key."""

from typing import Any

from litestar.exceptions import HTTPException
from litestar.types import ASGIApp, Receive, Scope, Send


def without_options(app: Any) -> ASGIApp:
    """OPTIONS is routed as TRACE, which no route has: 405 with what is allowed there, or 404."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "OPTIONS":
            scope = {**scope, "method": "TRACE"}  # pyright: ignore[reportAssignmentType]
        await app(scope, receive, send)

    return serve


def allowed_methods(error: HTTPException) -> str:
    """Of the framework's 405: what its Allow header says, without what we don't have."""
    methods = set((error.headers or {}).get("allow", "").split(", ")) - {"", "OPTIONS"}
    return ", ".join(sorted(methods))
