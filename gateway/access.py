"""What each public route asks of its caller, declared on the handler: ``opt=needs("usage")``.

``auth.py`` enforces it, and an app with a handler that declares nothing, or runs a model without a meter, is not
built: a forgotten declaration is found at the first start of a test, not by a stranger.
"""

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

from litestar import Litestar
from litestar.handlers import HTTPRouteHandler
from litestar.routes import HTTPRoute
from litestar.types import Scope

KeyScope: TypeAlias = Literal["inference", "adapters:read", "adapters:write", "usage", "webhooks"]
_OPTION = "access"


@dataclass(frozen=True, slots=True)
class Access:
    """``scope`` None: any valid key. ``metered``: the request path authenticates, admits, and books what it takes."""

    needs_key: bool
    scope: KeyScope | None = None
    metered: bool = False


def needs(scope: KeyScope, *, metered: bool = False) -> dict[str, Access]:
    """A key with this scope."""
    return {_OPTION: Access(True, scope, metered)}


def needs_any_key() -> dict[str, Access]:
    return {_OPTION: Access(True)}


def needs_no_key() -> dict[str, Access]:
    return {_OPTION: Access(False)}


def access_of(scope: Scope) -> Access:
    """What the handler declares to which this request was routed."""
    handler = cast(HTTPRouteHandler, scope["route_handler"])  # pyright: ignore[reportTypedDictNotRequiredAccess]
    return handler.opt[_OPTION]


def handlers_of(app: Litestar) -> list[tuple[str, str, HTTPRouteHandler]]:
    """The app's own route table: (method, path, handler), without the framework's OPTIONS."""
    return sorted(
        (
            (method, route.path_format, handler)
            for route in app.routes
            if isinstance(route, HTTPRoute)
            for handler in route.route_handlers
            for method in handler.http_methods
            if method != "OPTIONS"
        ),
        key=lambda entry: entry[1::-1],
    )


def undeclared(app: Litestar) -> list[str]:
    """Routes that say nothing, or that run a model and have no meter."""
    return [
        f"{method} {path} declares no {missing}"
        for method, path, handler in handlers_of(app)
        if (missing := _missing(handler.opt))
    ]


def _missing(opt: dict[str, Any]) -> str:
    access = opt.get(_OPTION)
    if not isinstance(access, Access):
        return "access"
    return "meter" if access.scope == "inference" and not access.metered else ""
