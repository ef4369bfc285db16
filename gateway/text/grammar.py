"""From what a caller wants of an answer's form (``response_format``, ``tools``) to a grammar in llguidance's words.

A schema is taken at its word where it is ``strict``: a keyword that no grammar can hold is the caller's error. Else
such keywords are passed over, as OpenAI does its best with them. Between tokens of JSON one blank is allowed behind
``,`` and ``:``, so that no model loses itself in white space.
"""

import json
from dataclasses import dataclass
from typing import Any

import msgspec

from gateway.errors import invalid
from gateway.schemas import ChatRequest, ResponseFormat
from gateway.text.tools import CALL_CLOSE, CALL_HEAD, CALL_MIDDLE, CALL_OPEN, MAX_CALLS, Tools, tools_of

MAX_GRAMMAR_BYTES = 64 << 10
_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class Form:
    """What an answer must be: ``grammar`` "" is anything. ``param`` is the field that asked for it."""

    grammar: str = ""
    param: str = "response_format"
    tools: Tools | None = None


def form_of_text(response_format: ResponseFormat | None) -> Form:
    """Raises ApiError 400."""
    schema = _schema(response_format)
    return Form() if schema is None else _sized(json.dumps({"grammars": [{"json_schema": schema}]}), "response_format")


def form_of_chat(request: ChatRequest) -> Form:
    """Raises ApiError 400. Where tools may be called, ``response_format`` is about answers without a call."""
    tools = tools_of(request)
    if tools is None or not tools.may_call:
        form = form_of_text(request.response_format)
        return Form(form.grammar, form.param, tools)
    return _sized(_tool_grammar(tools, _schema(request.response_format)), "tools", tools)


def _sized(grammar: str, param: str, tools: Tools | None = None) -> Form:
    if len(grammar) > MAX_GRAMMAR_BYTES:
        raise invalid(f"'{param}' may have at most {MAX_GRAMMAR_BYTES} bytes of schemas.", param)
    return Form(grammar, param, tools)


def _schema(wanted: ResponseFormat | None) -> dict[str, Any] | None:
    """The JSON schema of a response format; None where any text will do."""
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return _held({"type": "object"}, strict=True)
    if wanted.json_schema is None:
        raise invalid("Missing required parameter: 'response_format.json_schema'.", "response_format.json_schema")
    return _held(wanted.json_schema.schema, strict=bool(wanted.json_schema.strict))


def _held(schema: dict[str, Any], *, strict: bool) -> dict[str, Any]:
    """The schema with our options in place of any that came with it."""
    return schema | {"x-guidance": _OPTIONS | {"lenient": not strict}}


def _tool_grammar(tools: Tools, answer: dict[str, Any] | None) -> str:
    """Lark: calls in the form of tools.py, perhaps an answer instead. Schemas stand in it as JSON, which can't end
    early; names have letters, digits, - and _ only."""
    more = f" (more call){{0,{MAX_CALLS - 1}}}" if tools.parallel else ""
    lines = [f"start: {'' if tools.forced else 'answer | '}open call{more}", f"more: {_text(chr(10) + CALL_OPEN)}"]
    if answer is not None and not tools.forced:
        lines += [f"answer: {_json(answer)}", f"open: {_text(CALL_OPEN)}"]
    elif tools.forced:
        lines += [f"open: {_text(CALL_OPEN)}"]
    else:  # the first that is opened, behind any text
        lines += ["answer: /(?s:.*)/", f"open[lazy]: /(?s:.*){CALL_OPEN}/"]
    lines.append("call: " + " | ".join(f"call_{i}" for i in range(len(tools.callable))))
    for i, function in enumerate(tools.callable):
        head = _text(f"{CALL_HEAD}{function.name}{CALL_MIDDLE}")
        parameters = {"type": "object"} | (_NO_ARGUMENTS if function.parameters is None else function.parameters)
        if parameters["type"] != "object":
            raise invalid(f"Invalid schema for function '{function.name}': it must be of type 'object'.", "tools")
        lines.append(f"call_{i}: {head} {_json(_held(parameters, strict=bool(function.strict)))} {_text(CALL_CLOSE)}")
    return "\n".join(lines)


def _text(text: str) -> str:
    return json.dumps(text)


def _json(schema: dict[str, Any]) -> str:
    return "%json " + msgspec.json.encode(schema).decode()
