"""Methods that neither of our APIs has, and that the framework would answer by itself, without a key."""

from typing import Any

import msgspec
from litestar import Request, Response
from litestar.types import ASGIApp, Receive, Scope, Send

from gateway.errors import ApiError


def without_options(app: Any) -> ASGIApp:
    """The app, with OPTIONS and TRACE refused before it hears of them."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in ("OPTIONS", "TRACE"):
            await app(scope, receive, send)
            return
        error = ApiError(f"The method {scope['method']} is not allowed here.", code="method_not_allowed")
        body = msgspec.json.encode(error.body())
        answer = Response(
            body, status_code=error.status, media_type="application/json", headers=error.response_headers()
        )
        await answer.to_asgi_response(app=None, request=Request(scope))(scope, receive, send)

    return serve
