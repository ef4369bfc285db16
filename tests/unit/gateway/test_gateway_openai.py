"""What a stock client can tell from OpenAI's answers: framing, padding, silences, ranking, headers."""

import contextlib
import json
import statistics
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from gateway_harness import House, eventually, rows, stopped

from tenants.tables import LedgerEntry

PROMPT = [5, 6, 7, 8, 9, 10]


def complete(http: httpx.Client, **change) -> httpx.Response:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True} | change
    return http.post("/completions", json=body)


def chat(http: httpx.Client, **change) -> httpx.Response:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 24, "ignore_eos": True}
    return http.post("/chat/completions", json=body | {"temperature": 1.2, "seed": 1} | change)


def data(answer: httpx.Response) -> list[str]:
    """The chunks' JSON as sent, without [DONE]."""
    events = [event.removeprefix("data: ") for event in answer.text.split("\n\n") if event]
    assert events.pop() == "[DONE]"
    return events


def client(house: House, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=house.url + "/v1", api_key=key, max_retries=0, timeout=60)


# ── padding ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("send", [chat, complete])
def test_by_default_the_size_of_a_chunk_does_not_tell_its_token(house: House, key: str, send):
    with house.http(key) as http:
        padded = data(send(http, stream=True, max_tokens=24, stream_options={"include_usage": True}))
        plain = data(send(http, stream=True, max_tokens=24, stream_options={"include_obfuscation": False}))

    chunks = [json.loads(chunk) for chunk in padded]
    assert all(isinstance(chunk.pop("obfuscation"), str) for chunk in chunks)
    assert len({len(chunk.encode()) for chunk in plain}) > 2
    texts = [
        chunk for chunk in padded if json.loads(chunk)["choices"] and "role" not in chunk and '"stop"' not in chunk
    ]
    assert len({len(chunk.encode()) for chunk in texts if '"finish_reason":null' in chunk}) == 1
    assert not any("obfuscation" in chunk for chunk in plain)
    assert [chunk["choices"] for chunk in chunks if chunk["choices"]] == [json.loads(each)["choices"] for each in plain]


def test_the_padding_is_different_each_time(house: House, key: str):
    with house.http(key) as http:
        letters = [json.loads(chunk)["obfuscation"] for _ in range(2) for chunk in data(complete(http, stream=True))]

    long = [text for text in letters if len(text) > 8]
    assert len(set(long)) == len(long) > 4


# ── silences ─────────────────────────────────────────────────────────────────────────────────────


def test_a_long_silence_is_broken_by_comments_that_clients_pass_over(house: House, key: str, monkeypatch):
    monkeypatch.setattr("gateway.sse.KEEP_ALIVE_S", 0.05)
    engine, body = house.parts.catalog.models["tiny"].engines[0], {"model": "tiny", "prompt": PROMPT, "max_tokens": 4}

    with (
        ThreadPoolExecutor(1) as pool,
        client(house, key) as stock,
        house.http(key) as http,
        contextlib.ExitStack() as silence,
    ):
        silence.enter_context(stopped(house.engine_pid))
        chunks = pool.submit(lambda: list(stock.completions.create(**body, stream=True)))
        eventually(lambda: engine.load == 1)
        raw = ""
        with http.stream("POST", "/completions", json=body | {"stream": True}) as answer:
            for piece in answer.iter_text():
                raw += piece
                if raw.count(": keep-alive\n\n") >= 2:  # and as many of the other's
                    silence.close()
        assert chunks.result()

    assert raw.startswith(": keep-alive\n\n: keep-alive\n\n")
    assert raw.endswith("data: [DONE]\n\n")


# ── best_of ──────────────────────────────────────────────────────────────────────────────────────


def test_the_best_of_several_choices_are_given_back_and_all_are_billed(house: House):
    key = house.new_tenant("best-of")
    sampled = {"temperature": 1.5, "seed": 11, "max_tokens": 6, "prompt": [[5, 6, 7], [8, 9]]}
    with house.http(key) as http:
        every = complete(http, n=6, logprobs=0, **sampled).json()["choices"]
        answer = complete(http, n=2, best_of=6, **sampled)
    choices, usage = answer.json()["choices"], answer.json()["usage"]

    def mean(choice: dict) -> float:
        return statistics.mean(choice["logprobs"]["token_logprobs"])

    expected = [c["text"] for own in (every[:6], every[6:]) for c in sorted(own, key=mean, reverse=True)[:2]]
    assert [choice["text"] for choice in choices] == expected
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert all(choice["logprobs"] is None for choice in choices)
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (5, 72)
    billed = eventually(
        lambda: [row for row in rows(house, key, LedgerEntry) if answer.headers["x-request-id"] == row.request_id]
    )
    assert [row.quantity for row in billed if row.meter == "output_tokens"] == [72]


def test_an_echoed_prompt_does_not_count_in_the_ranking(house: House, key: str):
    sampled = {"temperature": 1.5, "seed": 4, "max_tokens": 6, "best_of": 5, "logprobs": 1}
    with house.http(key) as http:
        plain, echoed = complete(http, **sampled).json(), complete(http, echo=True, **sampled).json()

    ((one,), (other,)) = plain["choices"], echoed["choices"]
    assert other["logprobs"]["tokens"][len(PROMPT) :] == one["logprobs"]["tokens"]


BAD_BEST_OF = {
    "fewer than n": ({"n": 3, "best_of": 2}, "best_of"),
    "streamed": ({"best_of": 2, "stream": True}, "best_of"),
    "too many with the prompts": ({"best_of": 65, "prompt": [[5], [6]]}, "best_of"),
    "too many prompts × n": ({"n": 65, "prompt": [[5], [6]]}, "n"),
    "a suffix": ({"suffix": "x"}, "suffix"),
}


@pytest.mark.parametrize("name", BAD_BEST_OF)
def test_what_cannot_be_ranked_or_filled_in_is_400_and_named(house: House, key: str, name: str):
    change, param = BAD_BEST_OF[name]
    with house.http(key) as http:
        answer = complete(http, **change)

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    "change", [{"best_of": 1, "stream": True}, {"best_of": 2, "n": 2, "stream": True}, {"suffix": ""}]
)
def test_a_best_of_that_ranks_nothing_is_as_if_absent(house: House, key: str, change: dict):
    with house.http(key) as http:
        assert complete(http, **change).status_code == 200


# ── probabilities, usage ─────────────────────────────────────────────────────────────────────────


def test_what_can_hardly_be_has_a_logprob_that_json_can_carry(house: House, key: str):
    """All of the probability lies on one token then."""
    bias = {str(i): -100 for i in range(3, 300)}
    with house.http(key) as http:
        text = complete(http, logprobs=5, logit_bias=bias, max_tokens=2).json()["choices"][0]["logprobs"]
        content = chat(http, logprobs=True, top_logprobs=20, logit_bias=bias).json()["choices"][0]["logprobs"][
            "content"
        ]

    values = [value for top in text["top_logprobs"] for value in top.values()] + text["token_logprobs"]
    values += [entry["logprob"] for token in content for entry in (token, *token["top_logprobs"])]
    assert all(-9999.0 <= value <= 0 for value in values)


def test_usage_has_the_details_that_clients_read(house: House, key: str):
    with client(house, key) as stock:
        usage = stock.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], max_tokens=2
        ).usage

    assert usage is not None
    assert usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.reasoning_tokens == 0
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens is not None


def test_the_fast_tier_is_openais_other_name_of_priority(house: House, key: str):
    with house.http(key) as http:
        assert complete(http, service_tier="fast").json()["service_tier"] == "priority"


# ── headers ──────────────────────────────────────────────────────────────────────────────────────

EVERY_RATE_HEADER = {f"x-ratelimit-{a}-{b}" for a in ("limit", "remaining", "reset") for b in ("requests", "tokens")}


def test_every_answer_of_a_limited_tenant_carries_its_limits(house: House):
    key = house.new_tenant("every-limit", requests_per_minute=3, tokens_per_minute=10_000)
    with house.http(key) as http:
        answers = [complete(http), complete(http, stream=True), chat(http), complete(http)]

    assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
    assert all(set(answer.headers) >= EVERY_RATE_HEADER for answer in answers)
    assert answers[3].headers["retry-after-ms"]


def test_a_label_may_come_under_either_name_and_is_never_the_id(house: House, key: str):
    with house.http(key) as http:
        answers = [http.get("/models", headers={name: "mine"}) for name in ("x-request-id", "X-Client-Request-Id")]

    assert [answer.headers["x-client-request-id"] for answer in answers] == ["mine"] * 2
    assert "mine" not in {answer.headers["x-request-id"] for answer in answers}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nowhere", 404), ("POST", "/nowhere", 404), ("DELETE", "/completions", 405), ("HEAD", "/nowhere", 404)],
)
def test_what_is_not_there_is_answered_in_openais_shape_with_an_id(house: House, key: str, method, path, status):
    with house.http(key) as http:
        answer = http.request(method, path)

    assert answer.status_code == status
    assert answer.headers["x-request-id"]
    assert answer.headers["x-should-retry"] == "false"
    assert ("allow" in answer.headers) == (status == 405)
    if method != "HEAD":
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


# ── models ───────────────────────────────────────────────────────────────────────────────────────


def test_a_stock_client_lists_and_retrieves_models(house: House, key: str):
    with client(house, key) as stock:
        listed = stock.models.list().data
        one = stock.models.retrieve("tiny")
        with pytest.raises(openai.NotFoundError) as caught:
            stock.models.retrieve("nobody@3")

    assert [model.id for model in listed] == ["tiny"]
    assert one == listed[0]
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
