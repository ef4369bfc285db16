"""The request path over HTTP: a real gateway, a real engine, real stores."""

import concurrent.futures
import gzip
import json
import socket
import threading
import uuid

import httpx
import pytest
from gateway_harness import House, eventually

from gateway.text.tokenizer import ModelTokenizer
from tests import plain

PROMPT = [5, 6, 7, 8, 9, 10]
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "temperature": 0}


def complete(http: httpx.Client, **change) -> httpx.Response:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True} | change
    return http.post("/completions", json=body)


def chat(http: httpx.Client, **change) -> httpx.Response:
    return http.post("/chat/completions", json=CHAT | {"ignore_eos": True} | change)


def events(answer: httpx.Response) -> list:
    parts = [part.removeprefix("data: ") for part in answer.text.split("\n\n") if part]
    return [part if part == "[DONE]" else json.loads(part) for part in parts]


# ── answers ──────────────────────────────────────────────────────────────────────────────────────


def test_a_streamed_answer_joined_is_the_whole_one(house: House, key: str):
    with house.http(key) as http:
        whole = chat(http).json()
        *chunks, done = events(chat(http, stream=True))

    assert done == "[DONE]"
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == whole["choices"][0]["message"]["content"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == whole["choices"][0]["finish_reason"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert not any("usage" in chunk for chunk in chunks)


def test_the_answer_carries_openais_fields_and_our_headers(house: House, key: str):
    with house.http(key) as http:
        answer = http.post("/chat/completions", json=CHAT, headers={"x-request-id": "my label"})

    body = answer.json()
    request_id = answer.headers["x-request-id"]
    assert uuid.UUID(request_id).version == 7
    assert body["id"] == f"chatcmpl-{request_id}"
    assert (body["object"], body["model"], body["service_tier"]) == ("chat.completion", "tiny", "default")
    assert answer.headers["x-client-request-id"] == "my label"
    assert int(answer.headers["openai-processing-ms"]) >= 0
    assert "server" not in answer.headers


@pytest.mark.parametrize("label", ["x" * 129, "tab\tinside"])
def test_an_unfit_label_is_ignored(house: House, key: str, label: str):
    with house.http(key) as http:
        answer = http.get("/models", headers={"x-request-id": label})

    assert answer.status_code == 200
    assert "x-client-request-id" not in answer.headers


def test_prompts_times_n_choices_are_indexed_prompt_first(house: House, key: str):
    prompts = [[5, 6, 7], [8, 9, 10, 11]]
    with house.http(key) as http:
        answer = complete(http, prompt=prompts, n=2).json()
        alone = [complete(http, prompt=prompt).json()["choices"][0]["text"] for prompt in prompts]

    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in answer["choices"]] == [alone[0], alone[0], alone[1], alone[1]]
    assert answer["usage"]["prompt_tokens"] == 7
    assert answer["usage"]["completion_tokens"] == 32


def first_new_letter(choice: dict) -> tuple[int, str]:
    """Position and text of a token that is plain ASCII and stands nowhere before in the choice's text."""
    text = ""
    for position, token in enumerate(choice["logprobs"]["tokens"]):
        if position > 2 and len(token) == 1 and "!" <= token <= "~" and token not in text:
            return position, token
        text += token
    raise AssertionError("no such token")


def test_a_stop_string_ends_the_answer_and_the_count_at_its_last_token(house: House, key: str):
    with house.http(key) as http:
        whole = complete(http, max_tokens=30, logprobs=0).json()["choices"][0]
        at, stop = first_new_letter(whole)
        answers = [complete(http, max_tokens=30, stop=[stop], stream=stream) for stream in (False, True)]

    body = answers[0].json()
    assert body["choices"][0]["text"] == whole["text"].split(stop)[0]
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == at + 1
    chunks = events(answers[1])[:-1]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == body["choices"][0]["text"]


def test_echo_gives_the_prompt_and_its_scores(house: House, key: str):
    with house.http(key) as http:
        for max_tokens in (0, 1):
            choice = complete(http, echo=True, logprobs=1, max_tokens=max_tokens).json()["choices"][0]
            arrays = choice["logprobs"]
            assert {len(array) for array in arrays.values()} == {len(PROMPT) + max_tokens}
            assert arrays["token_logprobs"][0] is None
            assert all(value <= 0 for value in arrays["token_logprobs"][1:])
        streamed = events(complete(http, echo=True, max_tokens=1, stream=True))[:-1]
        whole = complete(http, echo=True, max_tokens=1).json()["choices"][0]["text"]

    assert "".join(chunk["choices"][0]["text"] for chunk in streamed) == whole


def test_ignoring_a_callers_seed_is_impossible(house: House, key: str):
    with house.http(key) as http:
        texts = [
            complete(http, temperature=1.5, seed=seed, max_tokens=20).json()["choices"][0]["text"]
            for seed in (1, 1, 2, -1)
        ]

    assert texts[0] == texts[1]
    assert len(set(texts)) == 3


@pytest.mark.parametrize(
    ("tier", "used"), [(None, "default"), ("auto", "default"), ("flex", "flex"), ("priority", "priority")]
)
def test_the_answer_reports_the_tier_that_was_used(house: House, key: str, tier, used: str):
    with house.http(key) as http:
        answer = complete(http, service_tier=tier)

    assert answer.json()["service_tier"] == used


def test_a_tier_above_the_tenants_class_is_400_and_its_own_class_is_lowered(house: House):
    key = house.new_tenant("batch-only", max_class="batch")
    with house.http(key) as http:
        refused, lowered = complete(http, service_tier="priority"), complete(http)

    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "service_tier")
    assert lowered.json()["service_tier"] == "flex"


UNSUPPORTED = {
    "functions": [{"name": "f"}],
    "function_call": {"name": "f"},
    "modalities": ["audio"],
}


@pytest.mark.parametrize("field", UNSUPPORTED)
def test_what_is_not_built_is_400_and_not_ignored(house: House, key: str, field: str):
    with house.http(key) as http:
        answer = chat(http, **{field: UNSUPPORTED[field]})

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
    assert answer.json()["error"]["code"] == "unsupported_parameter"


def test_the_harmless_forms_of_what_is_not_built_are_accepted(house: House, key: str):
    with house.http(key) as http:
        answer = chat(http, tools=[], tool_choice="auto", response_format={"type": "text"}, modalities=["text"])

    assert answer.status_code == 200


# ── lengths and grants ───────────────────────────────────────────────────────────────────────────


def test_without_max_tokens_the_grant_is_extended_to_the_contexts_end(house: House):
    key = house.new_tenant("small-grants", default_output_tokens=8, tokens_per_minute=100_000)
    with house.http(key) as http:
        answer = chat(http, max_tokens=None)

    assert answer.json()["usage"]["total_tokens"] == 128
    assert answer.json()["choices"][0]["finish_reason"] == "length"


def test_a_refused_extension_ends_with_length(house: House):
    key = house.new_tenant("no-extension", default_output_tokens=10, tokens_per_minute=60)
    with house.http(key) as http:
        answer = chat(http, max_tokens=None)

    assert answer.status_code == 200
    assert answer.json()["choices"][0]["finish_reason"] == "length"
    assert answer.json()["usage"]["completion_tokens"] == 10


# ── keys, limits, store ──────────────────────────────────────────────────────────────────────────


def test_every_kind_of_bad_key_is_the_same_401(house: House, key: str):
    wrong = key[:-7] + ("a" if key[-7] != "a" else "b") + key[-6:]
    headers = [{}, {"authorization": key}, {"authorization": "Bearer"}, {"authorization": f"Bearer {wrong}"}]
    headers += [{"authorization": "Bearer " + "x" * 10_000}, {"authorization": "Bearer tn_ops_" + key[8:]}]
    answers = [plain.post(f"{house.url}/v1/completions", json={}, headers=each) for each in headers]

    assert {answer.status_code for answer in answers} == {401}
    assert len({answer.content for answer in answers}) == 1
    assert all("x-request-id" in answer.headers for answer in answers)


def test_a_refusal_names_the_limit_and_when_to_come_back(house: House):
    key = house.new_tenant("one-request", requests_per_minute=1)
    with house.http(key) as http:
        first, second = complete(http), complete(http)

    assert first.headers["x-ratelimit-limit-requests"] == "1"
    assert first.headers["x-ratelimit-remaining-requests"] == "0"
    assert second.status_code == 429
    assert "requests per minute" in second.json()["error"]["message"]
    assert 0 < int(second.headers["retry-after"]) <= 60
    assert "x-should-retry" not in second.headers


def test_what_was_not_used_is_given_back_at_once(house: House):
    key = house.new_tenant("gives-back", tokens_per_minute=100)
    with house.http(key) as http:
        stopped = complete(http, max_tokens=90, ignore_eos=False, stop_token_ids=list(range(3, 131)))
        used = stopped.json()["usage"]["total_tokens"]
        again = complete(http, max_tokens=100 - used - len(PROMPT))

    assert used < 90
    assert again.status_code == 200


# ── the caller leaves ────────────────────────────────────────────────────────────────────────────


def send_and_leave(house: House, key: str, body: dict, read_bytes: int) -> str:
    """Posts a completion, reads at least that many bytes of the answer, closes; returns the head."""
    data = json.dumps({"model": "tiny", "prompt": PROMPT, "temperature": 0, "ignore_eos": True} | body).encode()
    lines = ("POST /v1/completions HTTP/1.1", "host: x", f"authorization: Bearer {key}", f"content-length: {len(data)}")
    head = "\r\n".join(lines) + "\r\n\r\n"
    with socket.create_connection(("127.0.0.1", house.port), timeout=30) as connection:
        connection.sendall(head.encode() + data)
        received = b""
        while len(received) < read_bytes:
            received += connection.recv(4096)
        if not read_bytes:
            eventually(lambda: house.parts.catalog.models["tiny"].engines[0].load)
    return received.decode("utf-8", "replace")


def only_receipt(house: House, key: str) -> dict:
    from sqlmodel import select

    from tenants.tables import RequestRecord

    async def read() -> list:
        async with house.parts.database.session() as session:
            query = select(RequestRecord).where(RequestRecord.tenant_id == house.tenants[key])
            return list((await session.exec(query)).all())

    (record,) = eventually(lambda: house.on_loop(read()))
    return house.receipt(key, record.request_id)


@pytest.mark.parametrize("stream", [True, False])
def test_a_caller_who_leaves_ends_the_generation_and_pays_for_what_was_made(house: House, stream: bool):
    key = house.new_tenant(f"leaves-{stream}", concurrent_requests=1, tokens_per_minute=10_000)
    send_and_leave(house, key, {"max_tokens": 120, "n": 8, "stream": stream}, 1 if stream else 0)
    receipt = only_receipt(house, key)

    assert receipt["status"] == 499
    assert receipt["state"] == "cancelled"
    assert receipt["tokens"]["output"] < 8 * 120
    assert (receipt["price"]["picousd"] > 0) == (receipt["tokens"]["output"] > 0)
    eventually(lambda: not house.parts.catalog.models["tiny"].engines[0].load)
    with house.http(key) as http:  # its concurrency lease is free
        assert eventually(lambda: complete(http, max_tokens=1).status_code == 200)


def test_neighbours_of_a_caller_who_leaves_are_untouched(house: House, key: str):
    leaver = house.new_tenant("leaver")

    def good() -> str:
        with house.http(key) as http:
            return complete(http, max_tokens=60).json()["choices"][0]["text"]

    quiet = good()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        running = [pool.submit(good) for _ in range(2)]
        send_and_leave(house, leaver, {"max_tokens": 100, "stream": True}, 1)

    assert [future.result() for future in running] == [quiet] * 2


# ── bodies ───────────────────────────────────────────────────────────────────────────────────────


def test_a_body_over_the_bound_is_413_and_seen_by_a_client_that_sends_it_all(house: House, key: str):
    with house.http(key) as http:
        answer = http.post("/completions", content=b" " * (20 << 20))

    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "payload_too_large")


def test_ids_outside_the_vocabulary_are_400_before_the_engine(house: House, key: str):
    bad = [("prompt", [300]), ("prompt", [[5], [-1]]), ("logit_bias", {"300": 1}), ("logit_bias", {"-1": 1})]
    bad += [("logit_bias", {"abc": 1}), ("logit_bias", {"²": 1}), ("stop_token_ids", [300]), ("stop_token_ids", [-1])]
    bad += [("prompt", []), ("prompt", [[]]), ("prompt", ""), ("prompt", ["a", [1]]), ("prompt", [1, "a"])]
    with house.http(key) as http:
        answers = [complete(http, **{field: value}) for field, value in bad]

    assert [answer.status_code for answer in answers] == [400] * len(bad)
    assert [answer.json()["error"]["param"] for answer in answers] == [field for field, _ in bad]


def test_a_text_that_cannot_fit_is_refused_without_being_encoded(house: House, key: str):
    with house.http(key) as http:
        answer = complete(http, prompt="x" * 3_000_000)

    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize(
    ("asked", "beside"),
    [
        ({"prompt": ["hi", "you"]}, False),
        ({"prompt": ["x" * 200] * 128}, True),
        ({"messages": [{"role": "user", "content": "hi"}]}, False),
        ({"messages": [{"role": "user", "content": "hi"}, *[{"role": "user", "content": ""}] * 200]}, True),
    ],
    ids=["short texts", "long texts", "a short chat", "a long chat"],
)
def test_much_text_is_encoded_beside_the_event_loop(
    house: House, key: str, monkeypatch: pytest.MonkeyPatch, asked: dict, beside: bool
):
    encode, threads = ModelTokenizer.encode, set()

    def watched(self: ModelTokenizer, text: str) -> list[int]:
        threads.add(threading.current_thread())
        return encode(self, text)

    monkeypatch.setattr(ModelTokenizer, "encode", watched)
    path = "/chat/completions" if "messages" in asked else "/completions"
    with house.http(key) as http:
        assert http.post(path, json={"model": "tiny", "max_tokens": 1} | asked).status_code in (200, 400)

    assert threads
    assert (house.on_loop(_this_thread()) not in threads) == beside


async def _this_thread() -> threading.Thread:
    return threading.current_thread()


@pytest.mark.parametrize(("method", "path"), [("GET", "/completions"), ("OPTIONS", "/models"), ("TRACE", "/models")])
def test_a_wrong_method_is_405_in_our_shape(house: House, key: str, method: str, path: str):
    with house.http(key) as http:
        answer = http.request(method, path)

    assert (answer.status_code, answer.json()["error"]["code"]) == (405, "method_not_allowed")


# ── receipts, usage, metrics ─────────────────────────────────────────────────────────────────────


def test_a_receipt_is_the_callers_alone_and_its_phases_sum(house: House, key: str):
    with house.http(key) as http:
        answer = complete(http, stream=True)
    request_id = answer.headers["x-request-id"]
    receipt = house.receipt(key, request_id)
    stranger = house.new_tenant("receipt-stranger")
    with house.http(stranger) as http:
        foreign, absent = http.get(f"/requests/{request_id}"), http.get(f"/requests/{'0' * 36}")

    phases = receipt["phases"]
    assert sum(phases[name] for name in ("queue", "prefill", "decode", "network", "post")) == phases["total"]
    assert 0 < receipt["time_to_first_token"] < phases["total"]
    assert (receipt["tokens"]["input"], receipt["tokens"]["output"]) == (6, 8)
    assert (foreign.status_code, absent.status_code) == (404, 404)
    assert foreign.text.replace(request_id, "X") == absent.text.replace("0" * 36, "X")


def test_usage_pages_follow_each_other(house: House):
    key = house.new_tenant("pages")
    with house.http(key) as http:
        for _ in range(2):
            house.receipt(key, complete(http).headers["x-request-id"])
        query = {"start_time": 0, "bucket_width": "1d", "group_by": "model"}
        whole = http.get("/organization/usage/completions", params=query).json()
        pages, page = [], None
        while True:
            found = http.get(
                "/organization/usage/completions", params=query | {"limit": 1} | ({"page": page} if page else {})
            ).json()
            pages += found["data"]
            page = found["next_page"]
            if not page:
                break

    (result,) = [result for bucket in whole["data"] for result in bucket["results"]]
    assert (result["num_model_requests"], result["output_tokens"], result["model"]) == (2, 16, "tiny")
    assert [bucket["results"] for bucket in pages if bucket["results"]] == [[result]]


@pytest.mark.parametrize(
    "query",
    [
        {},
        {"start_time": "x"},
        {"start_time": 5, "end_time": 5},
        {"start_time": 0, "bucket_width": "2d"},
        {"start_time": 0, "group_by": "tenant"},
        {"start_time": 0, "limit": 0},
        {"start_time": 0, "limit": 32},
        {"start_time": 0, "bucket_width": "1m", "limit": 1441},
        {"start_time": 0, "batch": "some"},
        {"start_time": 0, "models": ",".join("m" * 1001)},
        {"start_time": 0, "page": "x"},
    ],
)
def test_a_bad_usage_query_is_400(house: House, key: str, query: dict):
    with house.http(key) as http:
        answer = http.get("/organization/usage/completions", params=query)

    assert answer.status_code == 400
    assert answer.json()["error"]["param"]


def test_each_request_is_counted_once_by_how_it_ended(house: House, key: str):
    def good() -> float:
        return house.metric("tenora_requests_total", **{"model": "tiny", "class": "standard", "outcome": "200"})

    def bad() -> float:
        return house.metric("tenora_requests_total", **{"model": "", "class": "", "outcome": "400"})

    before = good(), bad()
    refused = house.metric("tenora_admission_refusals_total", reason="invalid_request")
    with house.http(key) as http:
        complete(http)
        complete(http, stream=True)
        complete(http, temperature=9)

    eventually(lambda: (good(), bad()) == (before[0] + 2, before[1] + 1))
    assert house.metric("tenora_admission_refusals_total", reason="invalid_request") == refused + 1
    for name in (
        "tenora_request_seconds_count",
        "tenora_time_to_first_token_seconds_count",
        "tenora_time_per_output_token_seconds_count",
    ):
        assert house.metric(name, **{"model": "tiny", "class": "standard", "route": "base"}) > 0


def test_a_refused_request_is_logged_and_counted_as_its_tenants(house: House, key: str, caplog):
    tenant = house.tenants[key]
    before = house.metric("tenora_tenant_requests_total", tenant=tenant, outcome="400")
    with caplog.at_level("INFO"), house.http(key) as http:
        request_id = chat(http, messages=[]).headers["x-request-id"]
        (line,) = eventually(lambda: [r.getMessage() for r in caplog.records if request_id in r.getMessage()])

    assert f"status=400 code=invalid_request tenant={tenant} key=" in line
    assert house.metric("tenora_tenant_requests_total", tenant=tenant, outcome="400") == before + 1


def test_a_compressed_body_is_refused_with_what_to_do(house: House, key: str):
    body = gzip.compress(json.dumps({"model": "tiny", "prompt": "x"}).encode())
    with house.http(key) as http:
        compressed = http.post("/completions", content=body, headers={"content-encoding": "gzip"})
        as_it_is = http.post("/completions", content=gzip.decompress(body), headers={"content-encoding": "identity"})

    assert (compressed.status_code, compressed.json()["error"]["code"]) == (415, "unsupported_media_type")
    assert as_it_is.status_code == 200


def test_the_log_has_one_line_a_request_and_no_prompt_answer_or_key(house: House, key: str, caplog):
    with caplog.at_level("INFO"), house.http(key) as http:
        answer = chat(http, messages=[{"role": "user", "content": "a secret prompt"}])
        request_id = answer.headers["x-request-id"]
        lines = eventually(lambda: [text for text in (r.getMessage() for r in caplog.records) if request_id in text])

    assert len(lines) == 1
    assert "status=200" in lines[0]
    text = "\n".join(record.getMessage() for record in caplog.records)
    assert "secret" not in text
    assert key not in text
