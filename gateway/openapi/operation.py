"""How an operation of the public API is told of: its table's rows, and what several rows share."""

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

Method: TypeAlias = Literal["GET", "POST", "PUT", "DELETE"]
Codes: TypeAlias = tuple[str | None, ...]


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str
    where: Literal["path", "query", "header"]
    schema: dict[str, Any]
    description: str
    required: bool = False

    def told(self) -> dict[str, Any]:
        """As OpenAPI writes it. The bare slash of a path parameter may also be sent as it is."""
        return {
            "name": self.name,
            "in": self.where,
            "required": self.required,
            "description": self.description,
            "schema": self.schema,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """``answers``: the kinds of body of ``status``; ``chunk``: an event's, where it can stream. ``content``: a body
    that is no JSON; ``texts``: media types in which the answer can be had as well. ``refusals``: codes of
    ``errors.TABLE``; ``refused_as``: bodies of a status that are no error."""

    method: Method
    path: str
    name: str
    summary: str
    refusals: Codes
    status: int = 200
    answers: tuple[Any, ...] = ()
    chunk: Any = None
    parameters: tuple[Parameter, ...] = ()
    body: Any = None
    content: dict[str, Any] | None = None
    texts: tuple[str, ...] = ()
    headers: dict[str, str] = field(default_factory=dict)
    refused_as: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    needs_key: bool = True


# ── refusals ─────────────────────────────────────────────────────────────────────────────────────

ANY: Codes = (None, "not_found", "request_timeout", "headers_too_large", "internal", "overloaded")
KEYED: Codes = (*ANY, "invalid_api_key", "insufficient_scope", "rate_limit_exceeded", "store_unavailable")
SENT: Codes = ("invalid_json", "payload_too_large", "unsupported_media_type")
BODY: Codes = (*KEYED, *SENT)

# ── parameters ───────────────────────────────────────────────────────────────────────────────────

STRING = {"type": "string"}
SECONDS = {"type": "integer", "minimum": 0, "maximum": 9_999_999_999}
LABELS = (Parameter("X-Request-ID", "header", STRING, "Your own name for the request: echoed and recorded."),)
