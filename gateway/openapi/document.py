"""The OpenAPI document of the public API: the table of its operations, written out with the wire's own structs.

Bodies and answers are the msgspec structs that read and write them, refusals the rows of ``errors.TABLE``, so that
there is no second description to go stale; a test holds the table against the application's routes.
"""

import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from gateway.errors import TABLE
from gateway.openapi.operation import Operation
from gateway.openapi.operations import OPERATIONS
from gateway.resources import ErrorBody

VERSION = "3.1.0"
PATH = "/v1/openapi.json"
_REF = "#/components/schemas/{name}"
_KEY = "api_key"
_EVENTS = """Server-sent events: `data:` and a chunk, at last `data: [DONE]`; a stream that breaks ends with an error
instead. Comment lines keep the connection alive."""
NAME_HEADERS = {
    "x-request-id": "Ours: it names the receipt of the request.",
    "openai-processing-ms": "Until the head was sent.",
}
RETRY_HEADERS = {
    "Retry-After": "Seconds after which another try may help.",
    "retry-after-ms": "The same in milliseconds.",
    "x-should-retry": "`false`: waiting does not help.",
}


@functools.cache
def document() -> bytes:
    """As JSON; the same for every caller."""
    schemas = _Schemas(OPERATIONS)
    paths: dict[str, Any] = defaultdict(dict)
    for operation in OPERATIONS:
        paths[operation.path][operation.method.lower()] = _operation(operation, schemas)
    return msgspec.json.encode(
        {
            "openapi": VERSION,
            "info": {"title": "Tenora", "version": "1", "description": "An OpenAI-compatible inference API."},
            "paths": dict(paths),
            "components": {
                "schemas": schemas.components,
                "headers": _header_components(),
                "securitySchemes": {_KEY: {"type": "http", "scheme": "bearer", "description": "A tenant's key."}},
            },
            "security": [{_KEY: []}],
        }
    )


class _Schemas:
    """Every struct of the table as a JSON schema, named once."""

    def __init__(self, operations: Iterable[Operation]) -> None:
        kinds = list(dict.fromkeys([ErrorBody, *(kind for each in operations for kind in _structs(each))]))
        schemas, self.components = msgspec.json.schema_components(kinds, ref_template=_REF)
        self._of = dict(zip(kinds, schemas, strict=True))

    def of(self, kind: Any) -> Any:
        return self._of[kind]

    def any_of(self, kinds: tuple[Any, ...]) -> Any:
        return self.of(kinds[0]) if len(kinds) == 1 else {"anyOf": [self.of(kind) for kind in kinds]}


def _structs(operation: Operation) -> Iterator[Any]:
    yield from operation.answers
    yield from filter(None, (operation.body, operation.chunk))


def _operation(operation: Operation, schemas: _Schemas) -> dict[str, Any]:
    told: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.summary,
        "responses": dict(_responses(operation, schemas)),
    }
    if operation.parameters:
        told["parameters"] = [parameter.told() for parameter in operation.parameters]
    content = operation.content or (operation.body and {"application/json": {"schema": schemas.of(operation.body)}})
    if content:
        told["requestBody"] = {"required": True, "content": content}
    if not operation.needs_key:
        told["security"] = []
    return told


def _responses(operation: Operation, schemas: _Schemas) -> Iterator[tuple[str, Any]]:
    yield str(operation.status), _answer(operation, schemas)
    codes: dict[int, list[str]] = defaultdict(list)
    for code in operation.refusals:
        codes[TABLE[code].status].append(code or "null")
    for status, listed in sorted(codes.items()):
        kinds = operation.refused_as.get(status, (ErrorBody,))
        yield (
            str(status),
            {
                "description": f"Refused; `code` is one of: {', '.join(listed)}.",
                "headers": _headers(RETRY_HEADERS),
                "content": {"application/json": {"schema": schemas.any_of(kinds)}},
            },
        )


def _answer(operation: Operation, schemas: _Schemas) -> dict[str, Any]:
    schema = schemas.any_of(operation.answers) if operation.answers else {"type": "object"}
    content: dict[str, Any] = {"application/json": {"schema": schema}}
    if operation.chunk is not None:
        content["text/event-stream"] = {
            "schema": {"type": "string", "description": _EVENTS},
            "x-event-schema": {"anyOf": [schemas.of(operation.chunk), schemas.of(ErrorBody)]},
        }
    content |= {media_type: {"schema": {"type": "string"}} for media_type in operation.texts}
    return {"description": operation.summary, "headers": _headers(operation.headers), "content": content}


def _headers(more: dict[str, str]) -> dict[str, Any]:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in (*NAME_HEADERS, *more)}


def _header_components() -> dict[str, Any]:
    told = {
        name: {"required": name in NAME_HEADERS, "schema": {"type": "string"}, "description": text}
        for name, text in (NAME_HEADERS | RETRY_HEADERS).items()
    }
    for operation in OPERATIONS:
        told |= {name: {"schema": {"type": "string"}, "description": text} for name, text in operation.headers.items()}
    return told
