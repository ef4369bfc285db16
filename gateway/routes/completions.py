"""POST /v1/chat/completions and /v1/completions: all of it is the pipeline."""

from litestar import post
from litestar.types import ASGIApp, Receive, Scope, Send

from gateway.access import needs
from gateway.schemas import ChatRequest, CompletionRequest
from gateway.work import Kind


def _piped(kind: Kind) -> ASGIApp:
    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        await scope["litestar_app"].state.parts.pipeline.serve(kind, scope, receive, send)

    return serve


_chats, _texts = _piped(ChatRequest), _piped(CompletionRequest)


@post("/v1/chat/completions", status_code=200, opt=needs("inference", metered=True))
async def chat_completions() -> ASGIApp:
    return _chats


@post("/v1/completions", status_code=200, opt=needs("inference", metered=True))
async def completions() -> ASGIApp:
    return _texts


handlers = [chat_completions, completions]
