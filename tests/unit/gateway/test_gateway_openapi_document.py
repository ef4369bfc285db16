"""The served OpenAPI document against the application that serves it."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest
from gateway_harness import House

from gateway.access import Access, handlers_of
from gateway.app import public_app
from gateway.errors import TABLE, ApiError
from gateway.openapi.document import document
from gateway.openapi.operations import OPERATIONS

DOCUMENT = json.loads(document())
NOT_HERE = {  # the ops port's, and of methods that no route has
    *("last_administrator", "invalid_rate_card", "period_open", "unsound_invoice"),
    "method_not_allowed",
}


def each_operation() -> Iterator[tuple[tuple[str, str], dict[str, Any]]]:
    for path, methods in DOCUMENT["paths"].items():
        for method, operation in methods.items():
            yield (method.upper(), path), operation


def access_of_routes(house: House) -> dict[tuple[str, str], Access]:
    return {(method, path): handler.opt["access"] for method, path, handler in handlers_of(public_app(house.parts))}


def test_the_document_has_every_route_and_no_other(house: House):
    assert {route for route, _ in each_operation()} == set(access_of_routes(house))


def test_what_the_document_says_of_keys_is_what_the_routes_ask_for(house: House):
    routes = access_of_routes(house)

    assert {route: operation.get("security") != [] for route, operation in each_operation()} == {
        route: access.needs_key for route, access in routes.items()
    }
    assert all("403" in operation["responses"] for route, operation in each_operation() if routes[route].scope)


def test_every_parameter_of_a_path_is_described():
    for (_, path), operation in each_operation():
        named = {each["name"] for each in operation.get("parameters", []) if each["in"] == "path"}
        assert {part[1:-1] for part in path.split("/") if part.startswith("{")} == named


def test_an_operation_that_can_answer_in_other_formats_says_so_with_their_media_types():
    types = {"json": "application/json", "csv": "text/csv", "html": "text/html"}
    told = {}
    for (_, path), operation in each_operation():
        for parameter in operation.get("parameters", []):
            if parameter["name"] == "format":
                told[path] = (
                    set(operation["responses"]["200"]["content"]),
                    {types[name] for name in parameter["schema"]["enum"]},
                )

    assert {"/v1/organization/slo", "/v1/organization/invoices/{invoice_id}"} <= set(told)
    assert all(answered == asked for answered, asked in told.values())


def test_every_way_to_fail_is_told_by_some_operation():
    told = {code for operation in OPERATIONS for code in operation.refusals}

    assert set(TABLE) - told == NOT_HERE


@pytest.mark.parametrize("code", TABLE)
def test_error_bodies_are_as_the_document_has_them(code: str | None):
    schema = {"$ref": "#/components/schemas/ErrorBody", "components": DOCUMENT["components"]}
    for reasons in ((), ("one", "two")):
        jsonschema.validate(ApiError("no", code, reasons=reasons).body(), schema)


def test_every_reference_leads_somewhere():
    def refs(node: Any) -> Iterator[str]:
        if isinstance(node, dict):
            yield from [node["$ref"]] if isinstance(node.get("$ref"), str) else []
            for value in node.values():
                yield from refs(value)
        elif isinstance(node, list):
            for value in node:
                yield from refs(value)

    for reference in set(refs(DOCUMENT)):
        _, _, kind, name = reference.split("/")
        assert name in DOCUMENT["components"][kind], reference


def test_anybody_may_read_it(house: House):
    with house.http() as http:
        answer = http.get("/openapi.json")

    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == DOCUMENT


@pytest.mark.parametrize("method", ["OPTIONS", "TRACE", "PATCH", "PROPFIND"])
def test_a_method_that_a_route_has_not_is_405_with_those_that_it_has(house: House, method: str):
    with house.http() as http:
        answer = http.request(method, "/adapters")
        nowhere = http.request(method, "/nowhere")

    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD, POST")
    assert nowhere.status_code == 404
    assert answer.json()["error"]["code"] == "method_not_allowed"
    assert f"{method} /v1/nowhere" in nowhere.json()["error"]["message"]


def test_head_is_answered_as_get_is_without_its_body(house: House, key: str):
    with house.http(key) as http, house.http() as stranger:
        asked, got = http.head("/models"), http.get("/models")
        refused, nothing_to_get = stranger.head("/models"), http.head("/completions")

    assert (asked.status_code, asked.content) == (200, b"")
    assert asked.headers["content-length"] == got.headers["content-length"]
    assert refused.status_code == 401
    assert (nothing_to_get.status_code, nothing_to_get.headers["allow"]) == (405, "POST")


def test_an_empty_file_is_refused_when_it_is_put(house: House, key: str):
    with house.http(key) as http:
        answer: httpx.Response = http.put("/adapters/a/files/adapter_config.json")

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "adapter_config.json")
