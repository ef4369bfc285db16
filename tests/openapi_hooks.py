"""What schemathesis can't know of a running server: names that exist. It draws any text where the document says text;
of these, half become the served model or the uploaded adapter, so that requests come further than to a 404. What is
no such text (a number, an empty name) stays as wrong as it was drawn."""

import os

import schemathesis

MODEL, ADAPTER = "tiny", "mine"


def _often(text: object) -> bool:
    return isinstance(text, str) and 1 <= len(text) <= 256 and sum(map(ord, text)) % 4 > 0


@schemathesis.hook
def map_body(context, body):
    if isinstance(body, dict):
        for name in ("model", "base_model"):
            if _often(body.get(name)):
                body[name] = MODEL
    return body


@schemathesis.hook
def map_path_parameters(context, path_parameters):
    if path_parameters and context.operation.method.upper() != "DELETE":
        for name, known in (("name", ADAPTER), ("model_id", MODEL), ("request_id", os.environ["KNOWN_REQUEST_ID"])):
            if _often(path_parameters.get(name)):
                path_parameters[name] = known
    return path_parameters
