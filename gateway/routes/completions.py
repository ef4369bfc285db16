"""POST /v1/chat/completions and /v1/completions: all of it is the pipeline."""

from functools import partial

from litestar import Request, post
from litestar.types import ASGIApp

from gateway.access import needs
from gateway.parts import parts_of
from gateway.schemas import ChatRequest, CompletionRequest


@post("/v1/chat/completions", status_code=200, opt=needs("inference", metered=True))
async def chat_completions(request: Request) -> ASGIApp:
    return partial(parts_of(request).pipeline.serve, ChatRequest)


@post("/v1/completions", status_code=200, opt=needs("inference", metered=True))
async def completions(request: Request) -> ASGIApp:
    return partial(parts_of(request).pipeline.serve, CompletionRequest)


handlers = [chat_completions, completions]
