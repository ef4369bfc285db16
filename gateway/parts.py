"""The parts of a running gateway, for its routes."""

from dataclasses import dataclass

from litestar import Request
from litestar.types import ASGIApp, Receive, Scope, Send

from gateway.access import access_of
from gateway.adapters.adapters import Adapters
from gateway.auth import authenticate
from gateway.call import call_of
from gateway.models import Catalog
from gateway.pipeline import Pipeline
from gateway.targets import Targets
from gateway.webhooks.endpoints import Webhooks
from tenants.adapters.blobs import BlobStore
from tenants.adapters.staged import StagedUploads
from tenants.database import Database
from tenants.directory import Principal


@dataclass(frozen=True, slots=True)
class Parts:
    """``started_unix_s`` stands in for when a base model was made."""

    pipeline: Pipeline
    catalog: Catalog
    targets: Targets
    adapters: Adapters
    database: Database
    blobs: BlobStore
    uploads: StagedUploads
    webhooks: Webhooks
    started_unix_s: int


def parts_of(request: Request) -> Parts:
    return request.app.state.parts


def authenticated(app: ASGIApp) -> ASGIApp:
    """The app's middleware: before any handler that needs a key, but for those whose request path does it itself.

    Raises ApiError 401, 403, 429. (The framework's guards each get a copy of their handler, which costs more.)
    """

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        access = access_of(scope)
        if access.needs_key and not access.metered:
            pipeline = scope["litestar_app"].state.parts.pipeline
            principal = await authenticate(pipeline.directory, pipeline.failures, call_of(scope))
            scope["state"]["principal"] = principal
        await app(scope, receive, send)

    return serve


def principal_of(request: Request) -> Principal:
    """Whom the guard let in."""
    return request.scope["state"]["principal"]
