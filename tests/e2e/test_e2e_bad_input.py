"""Whatever a client sends, it gets the right 4xx, never a 500, and its neighbours notice nothing."""

import concurrent.futures
import json

import pytest

from tests.exactness import assert_same
from tests.served import Served

GOOD = {"model": "tiny", "prompt": [5, 6, 7, 8], "max_tokens": 8, "temperature": 0, "logprobs": 1, "ignore_eos": True}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}

BAD_FIELDS = {
    "a string for max_tokens": ("/completions", {"max_tokens": "many"}, "max_tokens"),
    "a negative max_tokens": ("/completions", {"max_tokens": -1}, "max_tokens"),
    "a temperature over two": ("/completions", {"temperature": 2.5}, "temperature"),
    "a temperature that is no number": ("/completions", {"temperature": "hot"}, "temperature"),
    "a top_p of zero point nothing": ("/completions", {"top_p": -0.1}, "top_p"),
    "n of zero": ("/completions", {"n": 0}, "n"),
    "n over the bound": ("/completions", {"n": 129}, "n"),
    "five stop strings": ("/completions", {"stop": ["a", "b", "c", "d", "e"]}, "stop"),
    "a stop string of 257 bytes": ("/completions", {"stop": "x" * 257}, "stop"),
    "a model that is a number": ("/completions", {"model": 7}, "model"),
    "stream that is a string": ("/completions", {"stream": "yes"}, "stream"),
    "six completion logprobs": ("/completions", {"logprobs": 6}, "logprobs"),
    "a bias for an id past the vocabulary": ("/completions", {"logit_bias": {"999999": 5}}, "logit_bias"),
    "a bias for a negative id": ("/completions", {"logit_bias": {"-1": 1}}, "logit_bias"),
    "a bias for a word": ("/completions", {"logit_bias": {"abc": 1}}, "logit_bias"),
    "a bias over one hundred": ("/completions", {"logit_bias": {"5": 101}}, "logit_bias"),
    "a prompt id past the vocabulary": ("/completions", {"prompt": [100000]}, "prompt"),
    "the first prompt id past the vocabulary": ("/completions", {"prompt": [300]}, "prompt"),
    "the first nested one past the vocabulary": ("/completions", {"prompt": [[5], [300]]}, "prompt"),
    "the first stop token past the vocabulary": ("/completions", {"stop_token_ids": [300]}, "stop_token_ids"),
    "a bias for the first id past the vocabulary": ("/completions", {"logit_bias": {"300": 1}}, "logit_bias"),
    "a negative prompt id": ("/completions", {"prompt": [-1]}, "prompt"),
    "a nested negative prompt id": ("/completions", {"prompt": [[-1]]}, "prompt"),
    "a boolean prompt id": ("/completions", {"prompt": [True]}, "prompt"),
    "a fractional prompt id": ("/completions", {"prompt": [1.5]}, "prompt"),
    "a stop token past the vocabulary": ("/completions", {"stop_token_ids": [100000]}, "stop_token_ids"),
    "stream_options without stream": ("/completions", {"stream_options": {"include_usage": True}}, "stream_options"),
    "no messages": ("/chat/completions", {"messages": []}, "messages"),
    "messages that are a string": ("/chat/completions", {"messages": "hello"}, "messages"),
    "an image part": (
        "/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
        "messages",
    ),
    "top_logprobs of 21": ("/chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    "top_logprobs without logprobs": ("/chat/completions", {"top_logprobs": 2}, "top_logprobs"),
}


@pytest.mark.parametrize("name", BAD_FIELDS)
def test_a_wrong_value_of_a_known_field_is_400_and_names_it(tiny: Served, name: str):
    path, change, param = BAD_FIELDS[name]
    base = GOOD if path == "/completions" else CHAT
    with tiny.http() as http:
        answer = http.post(path, json=base | change)

    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"].split(".")[0].split("[")[0] == param
    assert set(error) == {"message", "type", "param", "code"}


BAD_BODIES = {
    "broken JSON": b'{"model": "tiny", "prompt": ',
    "no JSON at all": b"hello",
    "an empty body": b"",
    "an array": b"[1, 2, 3]",
    "100,000 levels deep": b'{"model": "tiny", "prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "100,000 levels deep in an unknown field": b'{"model": "tiny", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "bad UTF-8": b'{"model": "tiny", "prompt": "\xff\xfe"}',
    "a lone surrogate": rb'{"model": "tiny", "prompt": "\ud800", "max_tokens": 1}',
}


@pytest.mark.parametrize("path", ["/completions", "/chat/completions"])
@pytest.mark.parametrize("name", BAD_BODIES)
def test_a_body_that_is_no_request_is_400(tiny: Served, path: str, name: str):
    with tiny.http() as http:
        answer = http.post(path, content=BAD_BODIES[name], headers={"content-type": "application/json"})

    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_a_body_of_20_mb_is_413(tiny: Served):
    with tiny.http() as http:
        answer = http.post("/completions", content=json.dumps(GOOD | {"user": "x" * (20 << 20)}).encode())

    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "payload_too_large"


def test_the_last_id_of_the_vocabulary_may_be_used_everywhere(tiny: Served):
    last = {"prompt": [299], "stop_token_ids": [299], "logit_bias": {"299": 1}}
    with tiny.http() as http:
        answer = http.post("/completions", json=GOOD | last)

    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("change", [{"logit_bias": {}}, {"logit_bias": None}, {"stop": None}, {"stream_options": None}])
def test_empty_and_null_are_as_if_absent(tiny: Served, change: dict):
    with tiny.http() as http:
        assert http.post("/completions", json=GOOD | change).status_code == 200


def test_unknown_top_level_fields_are_ignored(tiny: Served):
    extras = {
        "ignore_eos": True, "min_tokens": 1, "foo": 1, "store": True, "metadata": {}, "parallel_tool_calls": True,
        "user": "u", "stream_options": {"include_usage": True, "continuous_usage_stats": True}, "stream": True,
    }  # fmt: skip
    with tiny.http() as http:
        assert http.post("/chat/completions", json=CHAT | extras).status_code == 200


def test_message_shapes_that_people_send_are_accepted(tiny: Served):
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    histories = [
        [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "result"},
        ],
        [{"role": "user", "content": "x"}, {"role": "assistant", "content": ""}, {"role": "user", "content": "y"}],
        [{"role": "user", "content": "x"}, {"role": "assistant", "content": "z", "tool_calls": []}],
        [{"role": "assistant", "content": "only me"}],
        [{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]}],
    ]
    with tiny.http() as http:
        for messages in histories:
            answer = http.post("/chat/completions", json=CHAT | {"messages": messages})
            assert answer.status_code == 200, (messages, answer.text)


def test_text_parts_of_any_role_equal_the_one_string_form(tiny: Served):
    def tokens(content) -> int:
        with tiny.http() as http:
            body = CHAT | {"messages": [{"role": "system", "content": content}, {"role": "user", "content": content}]}
            return http.post("/chat/completions", json=body).json()["usage"]["prompt_tokens"]

    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]

    assert tokens(parts) == tokens("one two")


def test_neighbours_of_bad_requests_are_byte_identical(tiny: Served):
    def good() -> tuple:
        with tiny.http() as http:
            choice = http.post("/completions", json=GOOD | {"max_tokens": 40}).json()["choices"][0]
        return choice["text"], tuple(choice["logprobs"]["token_logprobs"])

    def bad() -> list[int]:
        with tiny.http() as http:
            statuses = [
                http.post(path, json=(GOOD if path == "/completions" else CHAT) | change).status_code
                for path, change, _ in BAD_FIELDS.values()
            ]
            return statuses + [http.post("/completions", content=body).status_code for body in BAD_BODIES.values()]

    quiet = good()
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(good) for _ in range(3)]
        statuses = pool.submit(bad).result()
        disturbed = [answer.result() for answer in answers]

    assert set(statuses) == {400}
    assert_same(disturbed, [quiet] * 3)


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH", "TRACE", "OPTIONS"])
def test_a_wrong_method_is_405_or_404_in_our_error_shape(tiny: Served, method: str):
    with tiny.http() as http:
        answer = http.request(method, "/completions")

    assert answer.status_code in (404, 405)
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_an_unknown_route_is_404_in_our_error_shape(tiny: Served):
    with tiny.http() as http:
        assert http.get("/nowhere").json()["error"]["code"] == "not_found"
