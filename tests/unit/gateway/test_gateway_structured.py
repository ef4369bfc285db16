"""Structured output and tools through a whole gateway and the tiny engine, whose words are random: grammar rules."""

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import jsonschema
import pytest
from gateway_harness import House, running_house

from gateway.errors import ApiError
from gateway.text.grammar import Form
from gateway.text.grammar_check import MAX_VERDICTS, GrammarCheck

SCHEMA = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "minimum": 1, "maximum": 99},
        "on": {"type": "boolean"},
        "kind": {"enum": ["red", "green"]},
    },
    "required": ["n", "on", "kind"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "paint", "parameters": SCHEMA, "strict": True}},
    {"type": "function", "function": {"name": "stop"}},
]
MESSAGES = [{"role": "user", "content": "go"}]


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """A context with room for tools, which take a token a letter here."""
    with running_house(tmp_path_factory.mktemp("house"), context_tokens=2048) as house:
        yield house


@pytest.fixture(scope="module")
def key(house: House) -> str:
    return house.new_tenant("unlimited")


def json_schema(schema: dict, strict: bool = True) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": strict}}


def chat(http: httpx.Client, **change) -> httpx.Response:
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 60, "seed": 5} | change
    return http.post("/chat/completions", json=body)


def chunks_of(answer: httpx.Response) -> list[dict]:
    events = [event.removeprefix("data: ") for event in answer.text.split("\n\n") if event]
    assert events.pop() == "[DONE]"
    chunks = [json.loads(event) for event in events]
    for chunk in chunks:
        chunk.pop("obfuscation", None)
    return chunks


# ── answers ──────────────────────────────────────────────────────────────────────────────────────


def test_every_choice_is_json_of_the_schema_and_stops_at_its_end(house: House, key: str):
    with house.http(key) as http:
        answer = chat(http, response_format=json_schema(SCHEMA), n=4, temperature=1.5).json()

    texts = [choice["message"]["content"] for choice in answer["choices"]]
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert len(set(texts)) > 1
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"stop"}


def test_a_streamed_answer_is_the_same_text_as_a_whole_one(house: House, key: str):
    with house.http(key) as http:
        whole = chat(http, response_format=json_schema(SCHEMA)).json()["choices"][0]["message"]["content"]
        chunks = chunks_of(chat(http, response_format=json_schema(SCHEMA), stream=True))

    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == whole


def test_completions_take_a_response_format_too(house: House, key: str):
    body = {"model": "tiny", "prompt": ["go", "on"], "max_tokens": 60, "response_format": json_schema(SCHEMA)}
    with house.http(key) as http:
        answer = http.post("/completions", json=body).json()

    for choice in answer["choices"]:
        jsonschema.validate(json.loads(choice["text"]), SCHEMA)
        assert choice["finish_reason"] == "stop"


def test_max_tokens_cuts_an_answer_with_length(house: House, key: str):
    with house.http(key) as http:
        choice = chat(http, response_format=json_schema(SCHEMA), max_tokens=4).json()["choices"][0]

    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"].startswith('{"n"')


def test_a_stop_string_min_tokens_and_log_probabilities_go_on_to_work(house: House, key: str):
    with house.http(key) as http:
        choice = chat(
            http, response_format=json_schema(SCHEMA), stop='"on"', min_tokens=3, logprobs=True, top_logprobs=2
        ).json()["choices"][0]

    assert (choice["finish_reason"], '"on"' in choice["message"]["content"]) == ("stop", False)
    tokens = choice["logprobs"]["content"]
    assert bytes(byte for token in tokens for byte in token["bytes"]).decode() == choice["message"]["content"]


# ── tools ────────────────────────────────────────────────────────────────────────────────────────


def check_call(call: dict) -> None:
    assert call["type"] == "function"
    assert call["id"].startswith("call_")
    arguments = json.loads(call["function"]["arguments"])
    if call["function"]["name"] == "paint":
        jsonschema.validate(arguments, SCHEMA)
    else:
        assert (call["function"]["name"], arguments) == ("stop", {})


def test_a_required_tool_is_called_and_nothing_is_said(house: House, key: str):
    with house.http(key) as http:
        answer = chat(http, tools=TOOLS, tool_choice="required", n=4, parallel_tool_calls=False, max_tokens=120).json()

    for choice in answer["choices"]:
        assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
        (call,) = choice["message"]["tool_calls"]
        check_call(call)
    ids = [choice["message"]["tool_calls"][0]["id"] for choice in answer["choices"]]
    assert len(set(ids)) == 4


def test_a_named_tool_is_called_and_ends_with_stop(house: House, key: str):
    named = {"type": "function", "function": {"name": "stop"}}
    with house.http(key) as http:
        choice = chat(http, tools=TOOLS, tool_choice=named).json()["choices"][0]

    assert choice["finish_reason"] == "stop"
    assert [call["function"] for call in choice["message"]["tool_calls"]] == [{"name": "stop", "arguments": "{}"}]


def test_a_stream_tells_a_calls_name_once_and_then_pieces_of_its_arguments(house: House, key: str):
    named = {"type": "function", "function": {"name": "paint"}}
    options = {"tools": TOOLS, "tool_choice": named, "max_tokens": 120, "stream": True}
    with house.http(key) as http:
        chunks = chunks_of(chat(http, **options))

    first, *rest, last = [chunk["choices"][0] for chunk in chunks]
    call_id = first["delta"]["tool_calls"][0]["id"]
    begin = {"index": 0, "id": call_id, "type": "function", "function": {"name": "paint", "arguments": ""}}
    assert first["delta"] == {"role": "assistant", "content": None, "tool_calls": [begin]}
    pieces = []
    for choice in rest:
        (call,) = choice["delta"].pop("tool_calls")
        assert (choice["delta"], choice["finish_reason"]) == ({}, None)
        assert call.keys() == {"index", "function"}
        assert call["function"].keys() == {"arguments"}
        pieces.append(call["function"]["arguments"])
    assert len(pieces) > 3
    jsonschema.validate(json.loads("".join(pieces)), SCHEMA)
    assert (last["delta"], last["finish_reason"]) == ({}, "stop")


def test_several_calls_of_a_stream_have_an_index_each(house: House, key: str):
    bias = {"2": -100}  # no end before max_tokens
    options = {"tools": TOOLS[1:], "tool_choice": "required", "max_tokens": 240, "logit_bias": bias}
    with house.http(key) as http:
        chunks = chunks_of(chat(http, stream=True, **options))
        whole = chat(http, **options).json()["choices"][0]["message"]["tool_calls"]

    deltas = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", ())]
    begun = [call["index"] for call in deltas if "id" in call]
    assert begun == list(range(len(begun)))
    assert len(begun) == len(whole) > 1
    assert [call["index"] for call in deltas] == sorted(call["index"] for call in deltas)


def test_under_auto_a_model_may_just_talk_and_its_words_are_told_with_their_tokens(house: House, key: str):
    with house.http(key) as http:
        options = {"tools": TOOLS, "max_tokens": 20, "logprobs": True, "min_tokens": 20}
        whole = chat(http, **options).json()["choices"][0]
        chunks = [chunk["choices"][0] for chunk in chunks_of(chat(http, stream=True, **options))]

    assert whole["finish_reason"] == "length"
    assert "tool_calls" not in whole["message"]
    assert "".join(chunk["delta"].get("content", "") for chunk in chunks) == whole["message"]["content"]
    tokens = [token for chunk in chunks if chunk["logprobs"] for token in chunk["logprobs"]["content"]]
    assert tokens == whole["logprobs"]["content"]
    assert chunks[0]["delta"] == {"role": "assistant", "content": ""}


def test_a_call_cut_by_max_tokens_ends_with_length(house: House, key: str):
    options = {"tools": TOOLS[:1], "tool_choice": "required", "max_tokens": 45}
    with house.http(key) as http:
        choice = chat(http, **options).json()["choices"][0]

    assert choice["finish_reason"] == "length"
    assert '{"n"'.startswith(choice["message"]["tool_calls"][0]["function"]["arguments"][:4])


# ── refusals ─────────────────────────────────────────────────────────────────────────────────────


def deep(levels: int) -> dict:
    schema: dict = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


HOSTILE = {
    "nested deeply": deep(150),
    "a number of a hundred million remainders": {"type": "integer", "multipleOf": 99_999_999},
    "intersected patterns": {"allOf": [{"type": "string", "pattern": f"^(.*{c}){{30}}"} for c in "abcdefghij"]},
    "a tower of brackets": {"type": "string", "pattern": "(" * 20_000 + "a" + ")" * 20_000},
    "a product of alternatives": {
        "allOf": [
            {"anyOf": [{"properties": {f"p{i}": {}, f"q{j}": {"type": "null"}}} for j in range(12)]} for i in range(12)
        ]
    },
    "a reference to itself": {"$ref": "#"},
    "a remote reference": {"$ref": "https://example.com/schema.json"},
    "a file": {"$ref": "file:///etc/passwd"},
    "more bytes than allowed": {"enum": [f"v{i:06}" for i in range(10_000)]},
    "what no grammar holds": {"type": "array", "uniqueItems": True},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_schema_is_400_before_long_and_the_next_request_is_served(house: House, key: str, name: str):
    with house.http(key) as http:
        warm = chat(http, response_format={"type": "json_object"}, max_tokens=2)
        refused = chat(http, response_format=json_schema(HOSTILE[name]))
        after = chat(http, response_format={"type": "json_object"}, max_tokens=2)

    error = refused.json()["error"]
    assert (refused.status_code, error["type"], error["param"]) == (400, "invalid_request_error", "response_format")
    assert len(error["message"]) < 500
    assert (warm.status_code, after.status_code) == (200, 200)


def test_a_hostile_tool_is_400_and_names_the_tools(house: House, key: str):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"$ref": "http://x"}}}}}
    with house.http(key) as http:
        answer = chat(http, tools=[tool])

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")


def test_a_hard_schema_of_one_tenant_does_not_keep_another_from_its_own(house: House, key: str):
    other = house.new_tenant("patient")
    hard = [json_schema(schema | {"title": str(i)}) for i in range(3) for schema in (HOSTILE["intersected patterns"],)]
    with house.http(key) as mine, house.http(other) as theirs, ThreadPoolExecutor(3) as pool:
        refused = [pool.submit(chat, mine, response_format=each) for each in hard]
        answer = chat(theirs, response_format=json_schema(SCHEMA))
        assert [each.result().status_code for each in refused] == [400] * 3

    assert answer.status_code == 200


# ── the check ────────────────────────────────────────────────────────────────────────────────────


def test_a_tenants_verdicts_are_remembered_and_nobody_elses_push_them_out(house: House):
    async def main() -> list[int]:
        text, check, asked = house.parts.catalog.models["tiny"].text(), GrammarCheck(), []

        async def count(tenant: str, number: int) -> None:
            await check.check(tenant, text, Form(f'start: "{number}"', "tools"))
            (worker,) = check._workers.values()
            if not asked:
                plain = worker.ask

                async def counted(grammar: str, deadline_s: float) -> str:
                    asked.append(grammar)
                    return await plain(grammar, deadline_s)

                worker.ask = counted
                asked.append("")

        try:
            for number in range(MAX_VERDICTS):
                await count("a", number)
            for number in range(MAX_VERDICTS + 5):
                await count("b", number)
            before = len(asked)
            for number in range(MAX_VERDICTS):
                await count("a", number)
            again = len(asked)
            await count("b", 0)  # the first of more than are kept
            return [again - before, len(asked) - again]
        finally:
            await check.close()

    assert house.on_loop(main()) == [0, 1]


def test_a_check_that_runs_out_of_time_is_a_refusal_and_the_worker_is_made_anew(house: House):
    async def main() -> str:
        text, check = house.parts.catalog.models["tiny"].text(), GrammarCheck(deadline_s=60.0)
        hard = Form(json.dumps({"grammars": [{"json_schema": HOSTILE["a number of a hundred million remainders"]}]}))
        try:
            await check.check("a", text, Form('start: "x"'))
            reason, check._deadline_s = "", 0.3
            try:
                await check.check("a", text, hard)
            except ApiError as error:
                reason = error.message
            check._deadline_s = 60.0
            await check.check("a", text, Form('start: "y"'))
            await asyncio.gather(*(check.check("ab"[i % 2], text, Form(f'start: "{i}"')) for i in range(12)))
            assert check._turns == {}
            return reason
        finally:
            await check.close()

    assert "not compiled within" in house.on_loop(main()) or "memory" in house.on_loop(main())
