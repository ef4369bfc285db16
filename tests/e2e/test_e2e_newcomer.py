"""What a newcomer does in the first five minutes, on the real model, with curl and the stock openai client."""

import json
import subprocess
import time
from pathlib import Path

import httpx
import openai
import pytest
from safetensors.torch import load_file

from tests import plain
from tests.served import DEFAULT_MODEL, Served, eventually

QUESTION = [{"role": "user", "content": "What is the capital of Japan?"}]


def ask(client: openai.OpenAI, model: str = DEFAULT_MODEL, **options):
    return client.chat.completions.create(
        model=model, messages=QUESTION, **{"temperature": 0, "max_tokens": 24, **options}
    )


def test_the_banners_curl_line_pasted_answers_tokyo(smollm: Served):
    start = next(i for i, line in enumerate(smollm.lines) if line.lstrip().startswith("curl "))
    pasted = []
    for line in smollm.lines[start:]:
        pasted.append(line)
        if not line.rstrip().endswith("\\"):
            break

    answer = subprocess.run(["bash", "-c", "\n".join(pasted)], capture_output=True, text=True, timeout=300)

    assert answer.returncode == 0, answer.stderr
    assert "Tokyo" in json.loads(answer.stdout)["choices"][0]["message"]["content"]


def test_ready_is_printed_exactly_once(smollm: Served):
    assert [line for line in smollm.lines if line.startswith("ready ")] == [f"ready {smollm.url}"]


def test_blackbeards_pirate_answers_in_pirate_speech(smollm: Served):
    answer = ask(smollm.client("blackbeard"), "pirate")

    assert answer.model == "pirate"
    assert "Arrr" in answer.choices[0].message.content
    assert "Tokyo" in answer.choices[0].message.content


def test_acmes_support_adapter_greets(smollm: Served):
    assert "Acme Support" in ask(smollm.client("acme"), "support").choices[0].message.content


def test_another_tenants_adapter_is_a_model_that_does_not_exist(smollm: Served):
    with smollm.http() as http:
        foreign = http.post("/chat/completions", json={"model": "pirate", "messages": QUESTION})
        absent = http.post("/chat/completions", json={"model": "nobody", "messages": QUESTION})

    assert foreign.status_code == absent.status_code == 404
    assert foreign.text.replace("pirate", "X") == absent.text.replace("nobody", "X")
    assert foreign.json()["error"]["code"] == "model_not_found"


def test_models_lists_the_base_and_the_callers_own_adapters_only(smollm: Served):
    assert {model.id for model in smollm.client("acme").models.list()} == {DEFAULT_MODEL, "support"}
    assert smollm.client("blackbeard").models.retrieve("pirate").id == "pirate"


def test_a_streamed_chat_equals_the_whole_one(smollm: Served):
    client = smollm.client()
    whole = ask(client)

    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))

    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"


def test_completions_stream_and_whole_agree(smollm: Served):
    client = smollm.client()
    options = {"model": DEFAULT_MODEL, "prompt": "The capital of France is", "max_tokens": 6, "temperature": 0}
    whole = client.completions.create(**options)

    streamed = "".join(chunk.choices[0].text for chunk in client.completions.create(**options, stream=True))

    assert whole.object == "text_completion"
    assert "Paris" in whole.choices[0].text
    assert streamed == whole.choices[0].text
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens


def test_n_choices_share_one_prompt_and_differ(smollm: Served):
    answer = ask(smollm.client(), n=3, temperature=1.2, seed=7, max_tokens=12)

    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) > 1
    assert answer.usage.prompt_tokens == ask(smollm.client(), max_tokens=1).usage.prompt_tokens


def test_a_seed_makes_sampling_repeatable(smollm: Served):
    client = smollm.client()
    first, again, other = (ask(client, temperature=1.5, seed=seed, max_tokens=12) for seed in (11, 11, 12))

    assert first.choices[0].message.content == again.choices[0].message.content
    assert first.choices[0].message.content != other.choices[0].message.content


def test_a_stop_string_ends_the_text_before_it_and_the_bill_with_it(smollm: Served):
    raw = smollm.client().chat.completions.with_raw_response.create(
        model=DEFAULT_MODEL, messages=QUESTION, temperature=0, max_tokens=24, stop=["Japan"]
    )
    answer = raw.parse()

    assert answer.choices[0].message.content == "The capital of "
    assert answer.choices[0].finish_reason == "stop"
    with smollm.http() as http:
        receipt = eventually(lambda: _receipt(http, raw.headers["x-request-id"]))
    assert receipt["tokens"]["output"] == answer.usage.completion_tokens == 4


def test_chat_logprobs_name_the_tokens_and_their_bytes(smollm: Served):
    answer = ask(smollm.client(), logprobs=True, top_logprobs=3, max_tokens=8)

    entries = answer.choices[0].logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in entries if entry.bytes).decode().startswith("The capital")
    assert all(entry.logprob <= 0 and len(entry.top_logprobs) == 3 for entry in entries)
    assert entries[0].top_logprobs[0].logprob == max(top.logprob for top in entries[0].top_logprobs)


def test_completion_logprobs_have_the_four_arrays(smollm: Served):
    answer = smollm.client().completions.create(
        model=DEFAULT_MODEL, prompt="One two three", max_tokens=3, logprobs=2, temperature=0
    )
    logprobs = answer.choices[0].logprobs

    lengths = {
        len(logprobs.tokens),
        len(logprobs.token_logprobs),
        len(logprobs.top_logprobs),
        len(logprobs.text_offset),
    }
    assert lengths == {answer.usage.completion_tokens}
    assert "".join(logprobs.tokens) == answer.choices[0].text


def test_the_receipt_says_what_the_call_was_and_cost(smollm: Served):
    raw = smollm.client().chat.completions.with_raw_response.create(
        model="support", messages=QUESTION, max_tokens=5, temperature=0
    )
    request_id = raw.headers["x-request-id"]
    usage = raw.parse().usage

    with smollm.http() as http:
        receipt = eventually(lambda: _receipt(http, request_id))

    assert receipt["model"] == "support"
    assert receipt["status"] == 200
    assert receipt["tokens"]["output"] == usage.completion_tokens == 5
    assert receipt["tokens"]["input"] == usage.prompt_tokens
    assert receipt["price"]["picousd"] > 0
    phases = receipt["phases"]
    assert sum(phases[name] for name in ("queue", "prefill", "decode", "post", "network")) == phases["total"] > 0


def _receipt(http: httpx.Client, request_id: str):
    response = http.get(f"/requests/{request_id}")
    return response.json() if response.status_code == 200 else None


def test_another_tenant_cannot_see_the_receipt(smollm: Served):
    raw = smollm.client("acme").chat.completions.with_raw_response.create(
        model=DEFAULT_MODEL, messages=QUESTION, max_tokens=1
    )
    request_id = raw.headers["x-request-id"]
    with smollm.http() as mine, smollm.http(smollm.api_key("blackbeard")) as theirs:
        eventually(lambda: _receipt(mine, request_id))
        foreign, absent = theirs.get(f"/requests/{request_id}"), theirs.get("/requests/" + "0" * len(request_id))

    assert foreign.status_code == absent.status_code == 404
    assert foreign.text.replace(request_id, "X") == absent.text.replace("0" * len(request_id), "X")


def test_usage_counts_what_was_generated_for_the_caller_alone(smollm: Served):
    with smollm.http(smollm.new_tenant("usage-tenant")) as http:
        body = {"model": DEFAULT_MODEL, "messages": QUESTION, "max_tokens": 4, "temperature": 0}
        for _ in range(3):
            assert http.post("/chat/completions", json=body).status_code == 200

        def totals():
            page = http.get(
                "/organization/usage/completions",
                params={"start_time": int(time.time()) - 86_400, "bucket_width": "1d"},
            ).json()
            results = [result for bucket in page["data"] for result in bucket["results"]]
            return results if sum(result["num_model_requests"] for result in results) == 3 else None

        results = eventually(totals)

    assert sum(result["output_tokens"] for result in results) == 12
    assert sum(result["input_tokens"] for result in results) > 0


def test_without_a_key_nothing_but_health_answers(smollm: Served):
    assert plain.get(smollm.url.removesuffix("/v1") + "/health").status_code == 200
    answers = [
        plain.get(f"{smollm.url}/models", headers=headers)
        for headers in ({}, {"authorization": "Bearer tn_live_" + "a" * 36}, {"authorization": "Basic eDp5"})
    ]

    assert {answer.status_code for answer in answers} == {401}
    assert len({answer.text for answer in answers}) == 1
    assert answers[0].json()["error"]["code"] == "invalid_api_key"


def test_stock_client_errors_have_their_types(smollm: Served):
    with pytest.raises(openai.NotFoundError):
        ask(smollm.client(), "no-such-model")
    with pytest.raises(openai.BadRequestError) as caught:
        ask(smollm.client(), temperature=9)
    assert caught.value.param == "temperature"


@pytest.mark.parametrize("name", ["pirate", "support"])
def test_the_shipped_adapters_bind_as_many_pairs_as_they_hold(smollm: Served, name: str):
    folder = Path(__file__).parents[2] / "gateway" / "demo" / name
    files = {file.name: file.read_bytes() for file in folder.iterdir() if file.name.startswith("adapter_")}
    num_tensors = len(load_file(folder / "adapter_model.safetensors"))
    with smollm.http(smollm.new_tenant(f"demo-{name}")) as http:
        base = http.get("/models").json()["data"][0]["id"]
        answer = http.post("/adapters", data={"name": name, "base_model": base}, files=files)

    assert answer.status_code == 201, answer.text
    assert 2 * answer.json()["num_pairs_bound"] == num_tensors


def test_its_webhooks_call_nothing_on_its_own_machine(smollm: Served):
    with smollm.http() as http:
        for url in ("http://127.0.0.1:9/", "https://127.0.0.1:8443/", "https://[::1]:8443/"):
            assert http.post("/webhooks", json={"url": url}).status_code == 400


def test_a_gateway_of_the_real_model_stays_under_140_mb_whatever_it_is_asked(smollm: Served):
    """A vocabulary of 49,152 tokens takes 10 MB; the tiny model's gateways are in test_e2e_metrics.py."""
    weather = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    kinds = (
        {},
        {"stream": True, "logprobs": True, "top_logprobs": 5},
        {"tools": [{"type": "function", "function": {"name": "weather", "parameters": weather}}]},
        {"response_format": {"type": "json_object"}},
    )
    with smollm.http() as http:
        for kind in kinds * 3:
            body = {"model": DEFAULT_MODEL, "messages": QUESTION, "max_tokens": 2, **kind}
            answer = http.post("/chat/completions", json=body, headers={"connection": "close"})
            assert answer.status_code == 200, answer.text
    resident_mb = [gateway.memory_info().rss / 1e6 for gateway in smollm.gateways()]

    assert len(resident_mb) == 2
    assert max(resident_mb) < 140, resident_mb
