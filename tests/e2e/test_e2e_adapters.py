"""Adapters over HTTP on the tiny model, held against merged weights by the oracle (cases 9, 10, 11, 12, 14)."""

import concurrent.futures
import random
from pathlib import Path

import httpx
import pytest

from tests import adapter_calls, oracle
from tests.adapter_calls import prompt_of, upload
from tests.exactness import assert_same
from tests.served import Served
from tests.tiny import hf_config, merged, tiny_adapter, tiny_config, tiny_tokenizer, tiny_weights, write_peft_dir

CONFIG = hf_config(tiny_config())
WEIGHTS = tiny_weights()
ADAPTERS = {
    "A": tiny_adapter(1, rank=4),
    "B": tiny_adapter(2, rank=8, modules=("q_proj", "v_proj")),
    "C": tiny_adapter(3, rank=2, modules=("down_proj",), layers=(1,)),
}


@pytest.fixture(scope="module")
def key(tiny: Served, tmp_path_factory) -> str:
    """A tenant with the adapters A, B and C."""
    key = tiny.new_tenant("adapters")
    with tiny.http(key) as http:
        for name, adapter in ADAPTERS.items():
            answer = upload(http, name, write_peft_dir(tmp_path_factory.mktemp(name), adapter))
            assert answer.status_code == 201, answer.text
            assert answer.json()["num_pairs_bound"] == len(adapter)
    return key


def generate(tiny: Served, key: str, model: str, prompt: list[int], num_tokens: int = 16, **change) -> tuple:
    with tiny.http(key) as http:
        return adapter_calls.generate(http, model, prompt, num_tokens, **change)


@pytest.mark.parametrize("model", ["tiny", "A", "B", "C"])
@pytest.mark.parametrize("length", [1, 17, 33])
def test_output_equals_the_merged_weights(tiny: Served, key: str, model: str, length: int):
    prompt = prompt_of(length)
    weights = merged(WEIGHTS, ADAPTERS[model]) if model in ADAPTERS else WEIGHTS
    _, expected = oracle.greedy(CONFIG, weights, prompt, 16)

    _, _, logprobs = generate(tiny, key, model, prompt)

    assert logprobs == pytest.approx(expected, abs=1e-4)


def test_a_mixed_batch_in_any_order_equals_its_solo_runs(tiny: Served, key: str):
    """Case 9; also with five and eight at once, which batch sizes would pad."""
    requests = list(zip(["tiny", "A", "tiny", "B", "A", "tiny"], (1, 2, 5, 16, 17, 33), strict=True))
    solo = {request: generate(tiny, key, request[0], prompt_of(request[1])) for request in requests}
    rng = random.Random(9)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for num in [6] * 20 + [5, 8]:
            order = [rng.choice(requests) for _ in range(num)] if num != 6 else rng.sample(requests, 6)
            answers = list(pool.map(lambda request: generate(tiny, key, request[0], prompt_of(request[1])), order))
            assert_same(answers, [solo[request] for request in order])


def test_three_adapters_and_base_share_two_slots(tiny: Served, key: str):
    """Case 10: base takes no slot, the third adapter waits and then runs, all equal their solo runs."""
    requests = [(model, prompt_of(9, seed)) for model in ("A", "B", "C", "tiny") for seed in (1, 2)]
    solo = [generate(tiny, key, *request, num_tokens=40) for request in requests]

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda request: generate(tiny, key, *request, num_tokens=40), requests))

    assert_same(together, solo)
    assert len(tiny.engines()) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_every_chunk_names_the_requested_model(tiny: Served, key: str, stream: bool):
    body = {"model": "A", "prompt": [5, 6], "max_tokens": 3, "stream": stream}
    with tiny.http(key) as http:
        text = http.post("/completions", json=body).text

    assert text.count('"model":"A"') == max(1, text.count("data: {"))


def test_unknown_and_foreign_models_are_the_same_404(tiny: Served, key: str):
    """Case 11."""
    with tiny.http(tiny.new_tenant("stranger")) as http:
        answers = [http.post("/completions", json={"model": name, "prompt": "x"}) for name in ("nope", "A", "A@1")]
        listed = {model["id"] for model in http.get("/models").json()["data"]}
        shown = [http.get(f"/adapters/{name}") for name in ("A", "Q")]

    assert {answer.status_code for answer in answers} == {404}
    texts = {answer.text.replace(name, "X") for answer, name in zip(answers, ("nope", "A", "A@1"), strict=True)}
    assert len({text.replace("`A`", "X") for text in texts}) == 1
    assert answers[0].json()["error"]["code"] == "model_not_found"
    assert listed == {"tiny"}
    assert shown[0].status_code == 404
    assert shown[0].text.replace("A", "X") == shown[1].text.replace("Q", "X").replace("A", "X")


def test_an_upload_named_like_a_served_model_is_409(tiny: Served, key: str, tmp_path: Path):
    path = write_peft_dir(tmp_path, ADAPTERS["B"])
    with tiny.http(key) as http:
        taken = upload(http, "tiny", path)
        conflict = upload(http, "B", path, expected_version="0")

    assert (taken.status_code, taken.json()["error"]["code"]) == (409, "name_taken")
    assert (conflict.status_code, conflict.json()["error"]["code"]) == (409, "version_conflict")


def test_same_name_new_weights_is_the_next_version_with_a_cold_cache(tiny: Served, tmp_path: Path):
    """Case 5: the cache key holds the version's content, not its name."""
    key = tiny.new_tenant("versions")
    prompt = prompt_of(20)

    def cached(http: httpx.Client) -> tuple[int, float]:
        body = {"model": "x", "prompt": prompt, "max_tokens": 1, "temperature": 0, "logprobs": 0}
        answer = http.post("/completions", json=body).json()
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"], answer["choices"][0]["logprobs"][
            "token_logprobs"
        ][0]

    with tiny.http(key) as http:
        assert upload(http, "x", write_peft_dir(tmp_path / "1", ADAPTERS["A"])).json()["version"] == 1
        first, again = cached(http), cached(http)
        assert upload(http, "x", write_peft_dir(tmp_path / "2", ADAPTERS["B"])).json()["version"] == 2
        new, new_again = cached(http), cached(http)
        old = http.post("/completions", json={"model": "x@1", "prompt": prompt, "max_tokens": 1, "temperature": 0})

    assert (first[0], new[0]) == (0, 0)
    assert again[0] > 0 < new_again[0]
    assert_same([again[1], new_again[1]], [first[1], new[1]])
    assert first[1] != pytest.approx(new[1], abs=1e-3)
    for value, name in ((first[1], "A"), (new[1], "B")):
        assert [value] == pytest.approx(oracle.greedy(CONFIG, merged(WEIGHTS, ADAPTERS[name]), prompt, 1)[1], abs=1e-4)
    assert old.status_code == 200


def test_the_prefix_cache_is_the_tenants_own(tiny: Served):
    prompt = prompt_of(24, seed=77)
    keys = tiny.new_tenant("cache-one"), tiny.new_tenant("cache-two")

    def cached(key: str) -> int:
        with tiny.http(key) as http:
            answer = http.post("/completions", json={"model": "tiny", "prompt": prompt, "max_tokens": 1}).json()
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert [cached(keys[0]), cached(keys[0]), cached(keys[1]), cached(keys[1])] == [0, 20, 0, 20]


@pytest.mark.parametrize("model", ["tiny", "A"])
@pytest.mark.parametrize("num_prompt", [1, 40])
@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("as_text", [False, True], ids=["ids", "text"])
def test_echo_scores_the_prompt_as_the_reference_does(tiny: Served, key: str, model, num_prompt, max_tokens, as_text):
    """Case 14, cold and after the same prompt is in the prefix cache."""
    text = "".join(chr(ord("A") + seed % 26) for seed in prompt_of(num_prompt, seed=5))
    prompt = tiny_tokenizer().encode(text).ids if as_text else prompt_of(num_prompt, seed=5)
    assert len(prompt) == num_prompt
    weights = merged(WEIGHTS, ADAPTERS[model]) if model in ADAPTERS else WEIGHTS
    expected = oracle.prompt_logprobs(CONFIG, weights, prompt)
    given = text if as_text else prompt
    body = {"model": model, "prompt": given, "max_tokens": max_tokens, "echo": True, "logprobs": 1, "temperature": 0}

    with tiny.http(key) as http:
        http.post("/completions", json={"model": model, "prompt": given, "max_tokens": 1})
        answers = [http.post("/completions", json=body) for _ in range(2)]

    assert [answer.status_code for answer in answers] == [200, 200]
    for answer in answers:
        logprobs = answer.json()["choices"][0]["logprobs"]
        lengths = {len(logprobs[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
        assert lengths == {num_prompt + max_tokens}
        assert logprobs["token_logprobs"][0] is None
        assert logprobs["token_logprobs"][1:num_prompt] == pytest.approx(expected, abs=1e-4)
        chosen = zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
        assert all(top[token] == logprob for token, logprob, top in list(chosen)[1:])
        assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
        assert answer.json()["usage"]["completion_tokens"] == max_tokens


def test_a_deleted_adapter_is_gone_for_new_requests(tiny: Served, tmp_path: Path):
    key = tiny.new_tenant("deletes")
    with tiny.http(key) as http:
        assert upload(http, "gone", write_peft_dir(tmp_path, ADAPTERS["C"])).status_code == 201
        assert http.post("/completions", json={"model": "gone", "prompt": "x", "max_tokens": 1}).status_code == 200
        deleted = http.delete("/adapters/gone")
        after = http.post("/completions", json={"model": "gone", "prompt": "x", "max_tokens": 1})

    assert (deleted.status_code, deleted.json()["deleted"]) == (200, True)
    assert after.status_code == 404


def test_a_rank_over_the_limit_is_422_and_disturbs_nobody(tiny: Served, tmp_path: Path):
    key = tiny.new_tenant("ranks")
    quiet = generate(tiny, key, "tiny", prompt_of(8), num_tokens=60)
    with tiny.http(key) as http, concurrent.futures.ThreadPoolExecutor(1) as pool:
        running = pool.submit(generate, tiny, key, "tiny", prompt_of(8), 60)
        bad = upload(http, "bad", write_peft_dir(tmp_path / "bad", tiny_adapter(9, rank=64)))
        good = upload(http, "good", write_peft_dir(tmp_path / "good", tiny_adapter(9, rank=8)))
        listed = {model["id"] for model in http.get("/models").json()["data"]}

    assert (bad.status_code, bad.json()["error"]["code"]) == (422, "invalid_adapter")
    assert "64" in bad.json()["error"]["message"]
    assert "16" in bad.json()["error"]["message"]
    assert good.status_code == 201
    assert listed == {"tiny", "good"}
    assert_same(running.result(), quiet)
