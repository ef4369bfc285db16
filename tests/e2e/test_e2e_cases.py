"""Acceptance cases over HTTP on the tiny model: streams, lengths, limits (cases 15, 16, 18, 19, 23)."""

import concurrent.futures
import json
import random

import httpx
import pytest

from tests.served import Served, eventually, serving

PROMPT = [5, 6, 7, 8, 9, 10]


def complete(http: httpx.Client, **change) -> httpx.Response:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 16, "temperature": 0, "ignore_eos": True} | change
    return http.post("/completions", json=body)


def events(response: httpx.Response) -> list[dict | str]:
    """The data of each SSE event; '[DONE]' stays text."""
    data = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line.startswith("data: ")]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


# ── case 15 ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("options", [None, {"include_usage": False}])
def test_without_include_usage_no_chunk_is_empty_and_none_carries_usage(tiny: Served, options):
    with tiny.http() as http:
        chunks = events(complete(http, stream=True, **({"stream_options": options} if options else {})))

    assert chunks.pop() == "[DONE]"
    assert all(chunk["choices"] for chunk in chunks)
    assert all(chunk.get("usage") is None for chunk in chunks)


def test_include_usage_sends_one_last_chunk_with_the_usage_of_the_whole_call(tiny: Served):
    with tiny.http() as http:
        whole = complete(http).json()
        *chunks, usage, done = events(complete(http, stream=True, stream_options={"include_usage": True}))

    assert done == "[DONE]"
    assert usage["choices"] == []
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [usage["usage"][name] for name in counts] == [whole["usage"][name] for name in counts]
    assert all("usage" in chunk and chunk["usage"] is None and chunk["choices"] for chunk in chunks)


def test_stream_options_without_stream_is_400(tiny: Served):
    with tiny.http() as http:
        assert complete(http, stream_options={"include_usage": True}).status_code == 400


def test_billing_counts_the_same_whatever_the_stream_said(tiny: Served):
    def output_tokens(**change) -> int:
        with tiny.http() as http:
            answer = complete(http, **change)
            path = f"/requests/{answer.headers['x-request-id']}"
            receipt = eventually(lambda: (found := http.get(path)).status_code == 200 and found.json())
        return receipt["tokens"]["output"]

    usage = [None, {"include_usage": False}, {"include_usage": True}]

    assert output_tokens() == 16
    assert [output_tokens(stream=True, stream_options=options) for options in usage] == [16, 16, 16]


# ── case 16 ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("seed", range(6))
def test_joined_deltas_equal_the_whole_text_however_bytes_split(tiny: Served, seed: int):
    """The random model's byte-level output cuts characters anywhere, and ends inside them."""
    change = {"temperature": 1.5, "seed": seed, "max_tokens": 60}
    with tiny.http() as http:
        whole = complete(http, **change).json()["choices"][0]["text"]
        chunks = events(complete(http, stream=True, **change))[:-1]

    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole


def test_echoed_emoji_split_over_tokens_comes_back_whole(tiny: Served):
    text = "a👩‍👩‍👧‍👦🇩🇪北b"
    with tiny.http() as http:
        whole = complete(http, prompt=text, echo=True, max_tokens=0).json()["choices"][0]["text"]
        chunks = events(complete(http, prompt=text, echo=True, max_tokens=1, stream=True))[:-1]

    assert whole == text
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks).startswith(text)


def test_logprobs_bytes_joined_are_the_texts_bytes(tiny: Served):
    body = {
        "model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 40, "temperature": 1.5,
        "seed": 3, "logprobs": True, "ignore_eos": True,
    }  # fmt: skip
    with tiny.http() as http:
        choice = http.post("/chat/completions", json=body).json()["choices"][0]

    joined = b"".join(bytes(entry["bytes"]) for entry in choice["logprobs"]["content"] if entry["bytes"])
    assert joined.decode(errors="replace") == choice["message"]["content"]


# ── case 18 ──────────────────────────────────────────────────────────────────────────────────────


def prompt_of(length: int) -> list[int]:
    return [5 + i % 90 for i in range(length)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("length", "max_tokens"), [(140, None), (140, 1), (100, 40), (128, None), (128, 1)])
def test_what_cannot_fit_the_context_is_400_before_any_stream(tiny: Served, length, max_tokens, stream: bool):
    with tiny.http() as http:
        answer = complete(http, prompt=prompt_of(length), max_tokens=max_tokens, stream=stream)

    assert answer.status_code == 400
    assert answer.headers["content-type"].startswith("application/json")
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_without_max_tokens_a_chat_runs_to_the_contexts_end(tiny: Served):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x" * 60}], "ignore_eos": True}
    with tiny.http() as http:
        answer = http.post("/chat/completions", json=body).json()

    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == 128


def test_a_prompt_of_127_tokens_gives_one_token(tiny: Served):
    with tiny.http() as http:
        answer = complete(http, prompt=prompt_of(127), max_tokens=1).json()

    assert answer["usage"]["completion_tokens"] == 1
    assert answer["choices"][0]["finish_reason"] == "length"


def test_a_refusal_costs_nothing(tiny: Served):
    key = tiny.new_tenant("refused", tokens_per_minute=1000, requests_per_minute=100)
    with tiny.http(key) as http:
        before = complete(http, max_tokens=1).headers["x-ratelimit-remaining-tokens"]
        assert complete(http, prompt=prompt_of(140)).status_code == 400
        after = complete(http, max_tokens=1).headers["x-ratelimit-remaining-tokens"]

    assert int(before) - int(after) <= len(PROMPT) + 1


# ── case 19 ──────────────────────────────────────────────────────────────────────────────────────


def a_generation_that_ends_after(http: httpx.Client, num_tokens: int, prompt: list[int]) -> dict:
    """Sampling options under which token number ``num_tokens`` is the first of its kind: a stop token."""
    for seed in range(200):
        options = {"prompt": prompt, "temperature": 1.5, "seed": seed, "max_tokens": 60, "logprobs": 0}
        tokens = complete(http, **options).json()["choices"][0]["logprobs"]["tokens"]
        ids = [ord(token) if len(token) == 1 and token.isascii() else None for token in tokens]
        wanted = tokens[num_tokens - 1]
        if ids[num_tokens - 1] is not None and wanted not in tokens[: num_tokens - 1]:
            return options | {"stop": wanted}
    raise AssertionError("no such seed")


def test_token_limit_under_concurrency_over_two_gateways(tiny: Served):
    rng = random.Random(19)
    prompt = [rng.randrange(5, 95) for _ in range(20)]
    with tiny.http() as http:
        options = a_generation_that_ends_after(http, 10, prompt)
    key = tiny.new_tenant("case-19", tokens_per_minute=100)

    def call(_) -> httpx.Response:
        with tiny.http(key) as http:
            return complete(http, **options)

    with concurrent.futures.ThreadPoolExecutor(5) as pool:
        answers = list(pool.map(call, range(5)))

    admitted = [answer for answer in answers if answer.status_code == 200]
    refused = [answer for answer in answers if answer.status_code == 429]
    assert (len(admitted), len(refused)) == (1, 4)
    assert admitted[0].json()["usage"]["completion_tokens"] == 10
    for answer in refused:
        assert answer.json()["error"]["code"] == "rate_limit_exceeded"
        assert 0 < int(answer.headers["retry-after"]) <= 60
        assert answer.headers["x-ratelimit-limit-tokens"] == "100"
        assert int(answer.headers["x-ratelimit-remaining-tokens"]) < 80

    with tiny.http(key) as http:  # 30 of 100 are used: 70 fit at once
        assert complete(http, prompt=prompt, max_tokens=50).status_code == 200


def test_a_request_larger_than_the_limit_itself_is_not_worth_retrying(tiny: Served):
    key = tiny.new_tenant("too-large", tokens_per_minute=50)
    with tiny.http(key) as http:
        answer = complete(http, max_tokens=100)

    assert answer.status_code == 429
    assert answer.headers["x-should-retry"] == "false"
    assert "retry-after" not in answer.headers


def test_concurrency_is_a_lease_that_ends_with_the_request(tiny: Served):
    key = tiny.new_tenant("one-at-a-time", concurrent_requests=1)

    def call(_) -> int:
        with tiny.http(key) as http:
            return complete(http, max_tokens=100).status_code

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        statuses = list(pool.map(call, range(4)))

    assert 200 in statuses
    assert set(statuses) <= {200, 429}
    assert call(0) == 200


# ── case 23 ──────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def cramped(tmp_path_factory, model_dir):
    options = ("--block-size", "4", "--kv-blocks", "16", "--context", "128", "--demo")
    with serving(tmp_path_factory.mktemp("cramped"), "--model", f"tiny={model_dir}", *options) as served:
        yield served


def test_a_prompt_that_can_never_fit_is_refused_and_blocks_nobody(cramped: Served):
    def call(change: dict) -> httpx.Response:
        with cramped.http() as http:
            return complete(http, **change)

    queue = [{"prompt": prompt_of(100), "max_tokens": 8}, *[{"prompt": prompt_of(8), "max_tokens": 8}] * 3]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        never, *others = pool.map(call, queue)

    assert never.status_code in (400, 422)
    assert never.json()["error"]["message"]
    assert [answer.status_code for answer in others] == [200] * 3


def test_a_pool_smaller_than_the_context_bounds_what_is_promised(cramped: Served):
    """The documented choice: an engine never promises more context than its pool holds, 64 tokens here."""
    with cramped.http() as http:
        refused = complete(http, prompt=prompt_of(40), max_tokens=60)
        full = complete(http, prompt=prompt_of(40), max_tokens=24)
        after = complete(http, prompt=prompt_of(8), max_tokens=8)

    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert full.json()["choices"][0]["finish_reason"] == "length"
    assert full.json()["usage"]["total_tokens"] == 64
    assert after.json()["usage"]["completion_tokens"] == 8
