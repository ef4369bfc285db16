"""The ops port's application: health, metrics, and the admin API for operators' keys."""

import logging
import re
from dataclasses import dataclass
from typing import Any

import msgspec
from litestar import Litestar, Request, Response, get
from litestar.datastructures import State
from litestar.exceptions import HTTPException, MethodNotAllowedException, NotFoundException
from redis.asyncio import Redis

from gateway.errors import ApiError, as_api_error, invalid
from gateway.failures import FailedAttempts
from gateway.methods import allowed_methods
from gateway.routes.admin import admin_routes
from gateway.serve.fleet import Fleet
from tenants.adapters.blobs import BlobStore
from tenants.database import Database
from tenants.directory import Directory
from tenants.errors import (
    InvalidValue,
    LastAdministrator,
    NameTaken,
    NotFound,
    PeriodOpen,
    StoreUnavailable,
    UnsoundInvoice,
)
from tenants.quota.quota import Quota
from tenants.secrets import Secrets

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 1 << 20
_TOLD: dict[type[Exception], tuple[str, str | None]] = {  # errors whose words are the answer's: code, param
    NotFound: ("not_found", None),
    NameTaken: ("name_taken", "name"),
    PeriodOpen: ("period_open", "period"),
    LastAdministrator: ("last_administrator", None),
    StoreUnavailable: ("store_unavailable", None),
}


@dataclass(frozen=True, slots=True)
class OpsContext:
    """The stores that the admin API works on; what the operator says that an hour of a GPU costs, if anything."""

    database: Database
    redis: Redis
    quota: Quota
    secrets: Secrets
    directory: Directory
    blobs: BlobStore
    issuer: str  # of invoices
    gpu_hour_picousd: int | None  # what an hour of a GPU costs the operator, if that is known

    async def close(self) -> None:
        await self.directory.close()
        self.quota.close()
        await self.redis.aclose()
        await self.database.close()


def build_ops_app(context: OpsContext, fleet: Fleet) -> Litestar:
    """An ASGI application; its lifespan closes nothing, its caller does."""
    return Litestar(
        route_handlers=[healthz, readyz, metrics, admin_routes()],
        state=State({"ops": context, "fleet": fleet, "failures": FailedAttempts()}),
        exception_handlers={Exception: answer_error},
        request_max_body_size=MAX_BODY_BYTES,
        openapi_config=None,
        logging_config=None,
    )


@get("/healthz", sync_to_thread=False)
def healthz() -> dict[str, str]:
    """200 while the supervisor runs."""
    return {"status": "ok"}


@get("/readyz", sync_to_thread=False)
def readyz(state: State) -> Response[dict[str, Any]]:
    """200 when requests are accepted, else 503 with the reasons."""
    reasons = state.fleet.why_not_ready()
    return Response({"ready": not reasons, "reasons": reasons}, status_code=503 if reasons else 200)


@get("/metrics")
async def metrics(request: Request, state: State) -> Response[bytes]:
    """The sum over all processes, as OpenMetrics or Prometheus text, whichever was asked for."""
    await state.fleet.pull()
    text, content_type = state.fleet.registry.render(request.headers.get("accept", ""))
    return Response(text, headers={"content-type": content_type})


def answer_error(request: Request, error: Exception) -> Response[bytes]:
    """Every failure in OpenAI's shape; a failure of ours is logged and says nothing."""
    answer = _as_api_error(request, error)
    if answer.status >= 500:
        log.error("ops: %s", answer.message if isinstance(error, ApiError) else type(error).__name__, exc_info=error)
    body = msgspec.json.encode(answer.body())
    return Response(body, status_code=answer.status, media_type="application/json", headers=answer.response_headers())


def _as_api_error(request: Request, error: Exception) -> ApiError:
    match error:
        case ApiError():
            return error
        case InvalidValue():
            return invalid(str(error), error.field)
        case UnsoundInvoice():
            return ApiError(
                "The invoice does not add up; it is not issued.", "unsound_invoice", reasons=tuple(error.breaches)
            )
        case _ if type(error) in _TOLD:
            code, param = _TOLD[type(error)]
            return ApiError(str(error), code=code, param=param)
        case msgspec.ValidationError():
            return invalid(str(error), _named(str(error)))
        case msgspec.DecodeError():
            return invalid(str(error), code="invalid_json")
        case RecursionError():
            return invalid("The request body is nested too deeply.", code="invalid_json")
        case NotFoundException():
            return ApiError(f"Unknown request URL: {request.url.path}.", code="not_found")
        case MethodNotAllowedException():
            allowed = {"allow": allowed_methods(error)}
            return ApiError("This method is not allowed here.", code="method_not_allowed", headers=allowed)
        case HTTPException():
            return _from_litestar(error)
    return as_api_error(error)


def _from_litestar(error: HTTPException) -> ApiError:
    codes = {413: "payload_too_large", 415: "unsupported_media_type"}
    if error.status_code >= 500:
        return ApiError("Internal error.", code="internal")
    extra = [e if isinstance(e, dict) else {"message": e} for e in _listed(error.extra)]
    message = "; ".join([str(error.detail), *(str(e.get("message", e)) for e in extra)])
    named = [name for e in extra if (name := _named(str(e.get("message", ""))) or e.get("key"))]
    return ApiError(message, code=codes.get(error.status_code), param=named[0] if named else None)


def _named(message: str) -> str | None:
    """The field that msgspec's message is about."""
    field = re.search(r"unknown field `([^`]+)`|missing required field `([^`]+)`|at `\$\.([^`\[]+)", message)
    return next((name for name in field.groups() if name), None) if field else None


def _listed(extra: Any) -> list[Any]:
    return extra if isinstance(extra, list) else []
