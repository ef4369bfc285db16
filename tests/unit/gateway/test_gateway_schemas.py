"""Bounds of every field: known ones are checked and named, unknown ones ignored (cases 13, 17)."""

import json
from typing import get_args, get_type_hints

import pytest

from gateway.errors import ApiError
from gateway.schemas import ChatRequest, CompletionRequest, Part, decode

CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
TEXT = {"model": "m", "prompt": "x"}

BOUNDS = {  # field: (good values, bad values), of both routes
    "n": ([1, 128, None], [0, 129, -1, 1.5, "1", True]),
    "temperature": ([0, 2, 0.7], [-0.1, 2.1, "hot", 1e999]),
    "top_p": ([0, 1], [-0.1, 1.1]),
    "top_k": ([-1, 0, 50], [-2, 1 << 40]),
    "min_p": ([0, 1], [-0.1, 1.1]),
    "presence_penalty": ([-2, 2], [-2.1, 2.1]),
    "frequency_penalty": ([-2, 2], [-2.1, 2.1]),
    "repetition_penalty": ([0.5, 10], [0, -1, 11]),
    "seed": ([0, -(1 << 63), (1 << 63) - 1], [1 << 63, "x", 0.5]),
    "stop": (["a", ["a", "b", "c", "d"], [], None], ["", [""], ["a"] * 5, 7, ["x" * 257], {}]),
    "logit_bias": (
        [{}, None, {"5": 100, "6": -100}],
        [{"5": 101}, {"5": -101}, [], "x", {str(i): 0 for i in range(1025)}],
    ),
    "min_tokens": ([0, 5], [-1, "x"]),
    "ignore_eos": ([True, False], [1, "yes"]),
    "stop_token_ids": ([[], [1, 2]], [[True], ["a"], 3, list(range(129))]),
    "stream": ([True, False, None], ["yes", 1]),
    "stream_options": (
        [None, {}, {"include_usage": True, "continuous_usage_stats": 1}],
        [{"include_usage": "x"}, {"include_obfuscation": "x"}, []],
    ),
    "service_tier": (["auto", "default", "flex", "priority", "fast"], ["slow", 1]),
    "user": (["u"], [1, "x" * 513]),
    "cache_salt": (["s"], [1, "x" * 513]),
    "metadata": ([{}, {"k": "v"}], [{"k": 1}, {"k" * 65: "v"}, {"k": "v" * 513}, {str(i): "" for i in range(17)}]),
    "model": (["m", "x" * 256], ["", 7, None, "x" * 257]),
}
CHAT_BOUNDS = {
    "max_tokens": ([1, None], [0, -1, "x"]),
    "max_completion_tokens": ([1, None], [0, -1]),
    "logprobs": ([True, False], [1]),
    "top_logprobs": ([0, 20], [-1, 21]),
    "messages": ([[{"role": "assistant", "content": None}]], [[], "x", None, [{"content": "x"}], [{"role": "king"}]]),
}
TEXT_BOUNDS = {
    "max_tokens": ([0, 5, None], [-1, 1.5]),
    "logprobs": ([0, 5, None], [-1, 6, True]),
    "echo": ([True, False], ["x"]),
    "best_of": ([1, 128, None], [0, 129, "x"]),
    "suffix": ([None, "x"], [1]),
    "prompt": (["x", ["x", "y"], [1, 2], [[1], [2]]], [[], None, 5, [True], [1.5], {}]),
}
CASES = [
    (kind, base, field, value, good)
    for kind, base, table in (
        (ChatRequest, CHAT, BOUNDS | CHAT_BOUNDS),
        (CompletionRequest, TEXT, BOUNDS | TEXT_BOUNDS),
    )
    for field, (goods, bads) in table.items()
    for value, good in [(value, True) for value in goods] + [(value, False) for value in bads]
]


@pytest.mark.parametrize(("kind", "base", "field", "value", "good"), CASES)
def test_a_field_takes_what_is_in_its_bounds_and_names_itself_otherwise(kind, base, field, value, good):
    body = json.dumps(base | {field: value}).encode()

    if good:
        decode(body, kind)
        return
    with pytest.raises(ApiError) as caught:
        decode(body, kind)
    assert caught.value.status == 400
    assert (caught.value.param or "").split(".")[0].split("[")[0] in (field, "")
    assert caught.value.param or value == 1e999  # JSON has no infinity: that body is broken


def test_every_number_of_a_request_has_a_bound():
    """msgspec takes any number unless told; a field added without a bound fails here."""
    unbounded = []
    for kind in (ChatRequest, CompletionRequest):
        for field, hint in get_type_hints(kind, include_extras=True).items():
            plain = [part for part in get_args(hint) or (hint,) if part in (int, float)]
            if plain:
                unbounded.append(f"{kind.__name__}.{field}")

    assert unbounded == []


BROKEN = [
    b"",
    b"{",
    b"hello",
    b'{"model": "\xff"}',
    rb'{"model": "\ud800"}',
    b'{"a":' * 100_000,
    b'{"x": ' + b"[" * 100_000,
]


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
@pytest.mark.parametrize("body", BROKEN, ids=lambda body: body[:12].decode("latin-1") or "empty")
def test_a_body_that_is_no_json_is_400_invalid_json(kind, body: bytes):
    with pytest.raises(ApiError) as caught:
        decode(body, kind)

    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


@pytest.mark.parametrize("body", [b"[1]", b"7", b"null", b'"x"'])
def test_json_that_is_no_object_is_400(body: bytes):
    with pytest.raises(ApiError) as caught:
        decode(body, ChatRequest)

    assert caught.value.status == 400


def test_unknown_fields_are_ignored_at_every_level():
    extras = {"foo": 1, "store": True, "parallel_tool_calls": True, "guided_json": {}}
    part = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}
    message = {"role": "user", "content": [part], "weight": 2}

    request = decode(json.dumps(CHAT | extras | {"messages": [message]}).encode(), ChatRequest)

    assert request.messages[0].content == [Part("text", "x")]


def test_a_place_inside_the_messages_is_named_whole():
    body = json.dumps(CHAT | {"messages": [{"role": "user", "content": "x"}, {"role": "user", "content": 4}]})
    with pytest.raises(ApiError) as caught:
        decode(body.encode(), ChatRequest)

    assert caught.value.param == "messages[1].content"


def test_an_error_does_not_repeat_what_the_caller_sent_at_length():
    with pytest.raises(ApiError) as caught:
        decode(json.dumps(CHAT | {"messages": [{"role": "x" * 100_000, "content": ""}]}).encode(), ChatRequest)

    assert len(caught.value.message) < 300


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"service_tier": "gold"}, "'gold' is not one of auto, default, fast, flex, priority"),
        ({"messages": [{"role": "king"}]}, "'king' is not one of assistant, developer, system, tool, user"),
        ({"tool_choice": "any"}, "'any' is not one of auto, none, required"),
        ({"tools": [{"type": "code", "function": {"name": "f"}}]}, "'code' is not one of function"),
    ],
)
def test_who_sends_a_word_that_is_none_of_ours_is_told_which_there_are(more: dict, told: str):
    with pytest.raises(ApiError) as caught:
        decode(json.dumps(CHAT | more).encode(), ChatRequest)

    assert caught.value.message.endswith(told)
