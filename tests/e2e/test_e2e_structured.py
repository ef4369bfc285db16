"""Structured output and tools with the stock openai client and with curl, on the real model."""

import json
import subprocess
from typing import Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from gateway.text.tools import CALL_OPEN
from tests.schemas import SCHEMAS
from tests.served import DEFAULT_MODEL, Served


class City(BaseModel):
    name: str
    country: str
    size: Literal["small", "large"]


class Weather(BaseModel):
    """The weather of a city."""

    city: str = Field(description="its name")
    unit: Literal["celsius", "fahrenheit"]


TOOLS = [
    openai.pydantic_function_tool(Weather, name="get_weather"),
    {"type": "function", "function": {"name": "get_time"}},
]
ASK = [{"role": "user", "content": "What is the weather in Paris?"}]
OPTIONS = {"model": DEFAULT_MODEL, "temperature": 0, "max_tokens": 120}
NAMED = {"type": "function", "function": {"name": "get_weather"}}


def test_parse_gives_an_object_of_the_callers_own_class(smollm: Served):
    messages = [{"role": "user", "content": "Describe Paris as JSON with name, country and size."}]

    answer = smollm.client().chat.completions.parse(messages=messages, response_format=City, **OPTIONS)

    assert isinstance(answer.choices[0].message.parsed, City)
    assert "Paris" in answer.choices[0].message.parsed.name


def test_json_object_is_an_object(smollm: Served):
    messages = [{"role": "user", "content": "A JSON object with the keys name and age, please."}]

    answer = smollm.client().chat.completions.create(
        messages=messages, response_format={"type": "json_object"}, **OPTIONS
    )

    assert answer.choices[0].finish_reason == "stop"
    assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)


@pytest.mark.parametrize("name", ["coordinates", "an order"])
def test_some_of_the_sixty_schemas_are_held(smollm: Served, name: str):
    wanted = {"type": "json_schema", "json_schema": {"name": "s", "strict": True, "schema": SCHEMAS[name]}}
    messages = [{"role": "user", "content": f"Describe {name} as short JSON."}]

    answer = smollm.client().chat.completions.create(
        messages=messages, response_format=wanted, **(OPTIONS | {"max_tokens": 256})
    )

    assert answer.choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(answer.choices[0].message.content or ""), SCHEMAS[name])


@pytest.mark.parametrize(("choice", "reason"), [("required", "tool_calls"), (NAMED, "stop")])
def test_a_tool_that_has_to_be_called_is_called_with_arguments_of_its_schema(smollm: Served, choice, reason: str):
    answer = smollm.client().chat.completions.create(
        messages=ASK, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, **OPTIONS
    )

    message = answer.choices[0].message
    assert (message.content, answer.choices[0].finish_reason) == (None, reason)
    (call,) = message.tool_calls or ()
    if call.function.name == "get_weather":
        Weather.model_validate_json(call.function.arguments)


def test_a_conversation_goes_on_with_a_tools_answer(smollm: Served):
    client = smollm.client()
    first = client.chat.completions.create(messages=ASK, tools=TOOLS, tool_choice=NAMED, **OPTIONS).choices[0].message
    (call,) = first.tool_calls or ()
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"degrees": 21, "sky": "clear"}'}

    answer = client.chat.completions.create(
        messages=[*ASK, first.to_dict(), result], tools=TOOLS, tool_choice="none", **OPTIONS
    )

    assert answer.choices[0].message.content
    assert answer.choices[0].message.tool_calls is None


def test_the_streaming_helper_of_the_client_puts_calls_together(smollm: Served):
    with smollm.client().chat.completions.stream(messages=ASK, tools=TOOLS, tool_choice=NAMED, **OPTIONS) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()

    (call,) = final.choices[0].message.tool_calls or ()
    assert Weather.model_validate_json(call.function.arguments) == call.function.parsed_arguments
    assert "tool_calls.function.arguments.delta" in kinds
    assert final.choices[0].message.content is None


def test_under_auto_the_answer_is_text_or_calls_and_never_half_of_one(smollm: Served):
    for question in ("Say hello.", "What is the weather in Paris? Use get_weather."):
        messages = [{"role": "user", "content": question}]
        choice = smollm.client().chat.completions.create(messages=messages, tools=TOOLS, **OPTIONS).choices[0]

        assert CALL_OPEN not in (choice.message.content or "")
        assert (choice.finish_reason == "tool_calls") <= bool(choice.message.tool_calls)
        assert choice.message.content or choice.message.tool_calls


def curl(served: Served, body: dict) -> bytes:
    command = [
        "curl", "-sS", f"{served.url}/chat/completions", "-H", f"Authorization: Bearer {served.api_key('acme')}",
        "-H", "Content-Type: application/json", "-d", json.dumps(body),
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, check=True, timeout=300).stdout


def test_the_bytes_of_a_streamed_call_are_openais(smollm: Served):
    body = OPTIONS | {"messages": ASK, "tools": TOOLS, "tool_choice": NAMED, "stream": True}

    data = curl(smollm, body | {"stream_options": {"include_usage": True, "include_obfuscation": False}})

    events = data.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    first, *rest, last, usage = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert '"delta":{"role":"assistant","content":null,"tool_calls":[{"index":0,"id":"call_' in events[0]
    assert '"type":"function","function":{"name":"get_weather","arguments":""}}]}' in events[0]
    assert '"delta":{"tool_calls":[{"index":0,"function":{"arguments":"' in events[1]
    assert first["choices"][0]["finish_reason"] is None
    assert all(chunk["usage"] is None for chunk in (first, *rest, last))
    assert (last["choices"][0]["delta"], last["choices"][0]["finish_reason"]) == ({}, "stop")
    assert (usage["choices"], usage["usage"]["completion_tokens"] > 0) == ([], True)


def test_a_schema_that_cannot_be_held_is_a_bad_request_with_its_reason(smollm: Served):
    wanted = {"type": "json_schema", "json_schema": {"name": "s", "strict": True, "schema": {"$ref": "http://x/y"}}}

    with pytest.raises(openai.BadRequestError) as caught:
        smollm.client().chat.completions.create(messages=ASK, response_format=wanted, **OPTIONS)

    assert (caught.value.param, caught.value.type) == ("response_format", "invalid_request_error")
    assert "http://x/y" in caught.value.message
