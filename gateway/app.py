"""The public API as a Litestar app over the parts of a running gateway."""

import logging

from litestar import Litestar, Request, Response
from litestar.datastructures import State
from litestar.exceptions import HTTPException, MethodNotAllowedException, NotFoundException
from litestar.handlers import HTTPRouteHandler
from litestar.types import ASGIApp
from sqlalchemy.exc import SQLAlchemyError

from gateway.access import undeclared
from gateway.call import named
from gateway.errors import ApiError, as_api_error
from gateway.methods import allowed_methods, asked_method, with_our_methods
from gateway.parts import Parts, authenticated
from gateway.routes import (
    adapters,
    completions,
    credit,
    health,
    invoices,
    models,
    openapi,
    requests,
    slo,
    usage,
    webhooks,
)

_log = logging.getLogger("gateway.app")


def build_app(parts: Parts) -> ASGIApp:
    """Every answer has its ``x-request-id``, every failure OpenAI's error body."""
    return with_our_methods(named(public_app(parts)))


def public_app(parts: Parts, *more: HTTPRouteHandler) -> Litestar:
    """The routes, ``more`` for tests of what may be one. Raises AssertionError for a route without its declaration."""
    app = Litestar(
        route_handlers=[
            *completions.handlers,
            *models.handlers,
            *adapters.handlers,
            *requests.handlers,
            *usage.handlers,
            *slo.handlers,
            *webhooks.handlers,
            *invoices.handlers,
            *credit.handlers,
            *health.handlers,
            *openapi.handlers,
            *more,
        ],
        middleware=[authenticated],
        exception_handlers={
            ApiError: _api_error,
            HTTPException: _framework_error,
            SQLAlchemyError: _no_database,
            Exception: _our_bug,
        },
        state=State({"parts": parts}),
        logging_config=None,
        openapi_config=None,
    )
    assert not undeclared(app), undeclared(app)
    return app


def _api_error(_: Request, error: ApiError) -> Response:
    return Response(error.body(), status_code=error.status, headers=error.response_headers())


def _framework_error(request: Request, error: HTTPException) -> Response:
    method = asked_method(request.scope)
    if isinstance(error, NotFoundException):
        told = ApiError(f"Unknown request URL: {method} {request.url.path}.", code="not_found")
    elif isinstance(error, MethodNotAllowedException):
        told = ApiError(f"The method {method} is not allowed here.", code="method_not_allowed")
        told.headers["allow"] = allowed_methods(error)
    elif error.status_code == 413:
        told = ApiError("The request body is too large.", code="payload_too_large")
    elif error.status_code < 500:
        told = ApiError("The request is malformed.")
    else:
        return _our_bug(request, error)
    return _api_error(request, told)


def _no_database(request: Request, error: SQLAlchemyError) -> Response:
    """Logged by its kind alone: its message has the statement's values."""
    told = as_api_error(error)
    if told.status >= 500:
        _log.error("%s %s: the database failed: %s", request.method, request.scope["path"], type(error).__name__)
    return _api_error(request, told)


def _our_bug(request: Request, error: Exception) -> Response:
    _log.error("%s %s failed", request.method, request.scope["path"], exc_info=error)
    return _api_error(request, as_api_error(error))
