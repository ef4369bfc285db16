"""The one table from what went wrong to what the caller sees: status, type, code, headers.

Everything that refuses or ends a request raises ``ApiError`` with a code of ``TABLE``; nothing else builds an
error body. Bodies are OpenAI's: ``{"error": {"message", "type", "param", "code"}}``.
"""

from dataclasses import dataclass, field
from typing import Any

import msgspec

INVALID = "invalid_request_error"
SERVER = "server_error"


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of failure. ``retry_ms``: what Retry-After says unless the error knows better; None = waiting does
    not help, so stock clients are told not to try again."""

    status: int
    type: str
    retry_ms: int | None = None


TABLE: dict[str | None, Row] = {
    None: Row(400, INVALID),
    "invalid_json": Row(400, INVALID),
    "context_length_exceeded": Row(400, INVALID),
    "unsupported_parameter": Row(400, INVALID),
    "invalid_api_key": Row(401, "authentication_error"),
    "spend_limit_exceeded": Row(402, "insufficient_quota"),
    "credit_balance_exhausted": Row(402, "insufficient_quota"),
    "insufficient_scope": Row(403, "permission_error"),
    "model_not_found": Row(404, INVALID),
    "not_found": Row(404, INVALID),
    "method_not_allowed": Row(405, INVALID),
    "request_timeout": Row(408, INVALID, retry_ms=1000),
    "version_conflict": Row(409, "conflict_error"),
    "name_taken": Row(409, "conflict_error"),
    "adapter_corrupt": Row(409, "conflict_error"),
    "adapter_unavailable": Row(409, "conflict_error"),
    "limit_reached": Row(409, "conflict_error"),
    "last_administrator": Row(409, "conflict_error"),
    "period_open": Row(409, "conflict_error"),
    "unsound_invoice": Row(409, "conflict_error"),
    "idempotency_in_flight": Row(409, "conflict_error", retry_ms=1000),
    "payload_too_large": Row(413, INVALID),
    "unsupported_media_type": Row(415, INVALID),
    "invalid_adapter": Row(422, INVALID),
    "invalid_rate_card": Row(422, INVALID),
    "idempotency_mismatch": Row(422, INVALID),
    "rate_limit_exceeded": Row(429, "rate_limit_error"),
    "headers_too_large": Row(431, INVALID),
    "internal": Row(500, SERVER, retry_ms=1000),  # nothing was charged: another try is safe
    "engine_lost": Row(503, SERVER, retry_ms=1000),
    "overloaded": Row(503, SERVER, retry_ms=1000),
    "draining": Row(503, SERVER, retry_ms=1000),
    "store_unavailable": Row(503, SERVER, retry_ms=1000),
    "billing_unavailable": Row(503, SERVER, retry_ms=2000),
    "storage_full": Row(507, SERVER),
}

# what an engine says of a request that it refuses or ends → our code
ENGINE_CODES: dict[str, str | None] = {
    "busy": "overloaded",
    "draining": "draining",
    "too_long": "context_length_exceeded",
    "invalid": None,
    "invalid_grammar": None,
    "adapter_corrupt": "adapter_corrupt",
    "adapter_delayed": "overloaded",
    "adapter_unavailable": "adapter_unavailable",
    "invalid_adapter": "invalid_adapter",
}


@dataclass(slots=True)
class ApiError(Exception):
    """A failure that the caller is told of. Raises KeyError for a code without a row: our bug."""

    message: str
    code: str | None = None
    param: str | None = None
    retry_ms: int | None = None
    reasons: tuple[str, ...] = ()
    headers: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        Exception.__init__(self, self.message)
        assert self.code in TABLE, self.code

    @property
    def status(self) -> int:
        return TABLE[self.code].status

    def body(self) -> dict[str, Any]:
        """The error object as OpenAI shapes it; ``reasons`` only where there are several."""
        error: dict[str, Any] = {
            "message": self.message,
            "type": TABLE[self.code].type,
            "param": self.param,
            "code": self.code,
        }
        if self.reasons:
            error["reasons"] = list(self.reasons)
        return {"error": error}

    def response_headers(self) -> dict[str, str]:
        """Retry-After when waiting helps, ``x-should-retry: false`` when it does not."""
        wait_ms = TABLE[self.code].retry_ms if self.retry_ms is None else self.retry_ms
        if wait_ms is None:
            return self.headers | {"x-should-retry": "false"}
        seconds = max(1, -(-wait_ms // 1000))
        return self.headers | {"retry-after": str(seconds), "retry-after-ms": str(max(1, wait_ms))}


def sse_error(error: ApiError) -> bytes:
    """The event that ends a broken stream; no [DONE] follows it."""
    return b"data: " + msgspec.json.encode(error.body()) + b"\n\n"


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400 that names the field."""
    return ApiError(message, code=code, param=param)


def invalid_key() -> ApiError:
    """401: the same for absent, malformed, unknown, revoked, expired and suspended."""
    return ApiError("Incorrect API key provided, or none at all.", code="invalid_api_key")


def model_not_found(model: str) -> ApiError:
    """404: the same for a name that nobody has and for another tenant's."""
    return ApiError(
        f"The model `{model}` does not exist or you do not have access to it.", code="model_not_found", param="model"
    )


def as_api_error(error: Exception) -> ApiError:
    """Any failure as its caller sees it: a database that is away is worth another try, our own bug tells nothing."""
    from sqlalchemy.exc import SQLAlchemyError  # not for the adapter worker, which imports this module too

    if isinstance(error, ApiError):
        return error
    if _is_null_character(error):
        return invalid("No text of a request may hold the character NUL.")
    if isinstance(error, SQLAlchemyError):
        return ApiError("The database does not answer; try again.", code="store_unavailable")
    return ApiError("The server had an error while answering.", code="internal")


def _is_null_character(error: Exception) -> bool:
    """PostgreSQL's word for one in a text: all else that we send it is UTF-8."""
    return getattr(getattr(error, "orig", None), "sqlstate", None) == "22021"


def from_engine(code: str, message: str) -> ApiError:
    """What the engine said, as the caller sees it. An unknown code is ours to answer for: 500, without details."""
    if code not in ENGINE_CODES:
        return ApiError("The engine could not finish this request.", code="internal")
    return ApiError(message or code, code=ENGINE_CODES[code])
