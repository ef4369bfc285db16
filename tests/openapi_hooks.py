"""What schemathesis can't know of a running server: names that exist. It draws any text where the document says text;
of these, most become the served model or the uploaded adapter, so that requests come further than to a 404. What is
no such text (a number, an empty name) stays as wrong as it was drawn."""

import os

import schemathesis

MODEL, ADAPTER, REQUEST_ID = "tiny", "mine", os.environ["KNOWN_REQUEST_ID"]


def _often(text: object) -> bool:
    return isinstance(text, str) and 1 <= len(text) <= 256 and sum(map(ord, text)) % 4 != 1


@schemathesis.hook
def before_call(context, case, kwargs):
    _put_known(case.body, {"model": MODEL, "base_model": MODEL})
    if case.operation.method.upper() != "DELETE":
        _put_known(case.path_parameters, {"name": ADAPTER, "model_id": MODEL, "request_id": REQUEST_ID})


def _put_known(drawn, known: dict[str, str]) -> None:
    if isinstance(drawn, dict):
        drawn |= {name: value for name, value in known.items() if _often(drawn.get(name))}
