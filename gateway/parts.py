"""The parts of a running gateway, for its routes."""

from dataclasses import dataclass

from litestar import Request

from gateway.adapters import Adapters
from gateway.auth import authenticate
from gateway.call import call_of
from gateway.models import Catalog
from gateway.pipeline import Pipeline
from gateway.targets import Targets
from tenants.blobs import BlobStore
from tenants.database import Database
from tenants.directory import Principal
from tenants.staged_uploads import StagedUploads


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
    started_unix_s: int


def parts_of(request: Request) -> Parts:
    return request.app.state.parts


def principal_of(request: Request) -> Principal:
    """Raises ApiError 401."""
    return authenticate(parts_of(request).pipeline.directory, call_of(request.scope))
