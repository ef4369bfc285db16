"""``./run prove clients``: the stock clients and tools that people point at an OpenAI-compatible API, each in an
environment of its own, on `./run serve` with its real model. Each has a tenant of its own, so that what the client
counted can be held against the ledger. Skipped is only what cannot be installed.
"""

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import httpx
import pytest

from engine.weights.gguf import GgufFile
from engine.weights.gguf_tokenizer import card_from_gguf
from ops.default_model import DEFAULT_GGUF
from tests.environments import CannotInstall, Environment, node_environment, python_environment
from tests.served import DEFAULT_MODEL, Served, eventually, serving

pytestmark = pytest.mark.long
SMOKES = Path(__file__).parent / "clients"
SMOKE_TIMEOUT_S = 120
UNITS, SIZES = ("celsius", "fahrenheit"), ("small", "large")


@dataclass(frozen=True)
class Account:
    """A tenant of its own for one client: its key, and what the ledger says that it used."""

    served: Served
    key: str

    def used(self) -> tuple[int, int, int]:
        """Served requests, prompt tokens, completion tokens."""
        query = {"start_time": int(time.time()) - 3600, "bucket_width": "1h"}
        with self.served.http(self.key) as http:
            page = http.get("/organization/usage/completions", params=query).json()
        results = [result for bucket in page["data"] for result in bucket["results"]]
        names = ("num_model_requests", "input_tokens", "output_tokens")
        requests, prompt, completion = (sum(result[name] for result in results) for name in names)
        return requests, prompt, completion


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("served"), "--model", DEFAULT_MODEL, "--no-demo") as served:
        yield served


@pytest.fixture
def account(served: Served, request: pytest.FixtureRequest) -> Account:
    return Account(served, served.new_tenant(request.node.name.replace("_", "-")[:60]))


@contextmanager
def installed() -> Iterator[None]:
    try:
        yield
    except CannotInstall as error:
        pytest.skip(f"cannot be installed: {error}")


def python(name: str, *requirements: str) -> Environment:
    with installed():
        return python_environment(name, *requirements)


def node(name: str, *packages: str) -> Environment:
    with installed():
        return node_environment(name, *packages)


def smoke(environment: Environment, script: Path, account: Account, cwd: Path) -> dict:
    """Runs one of our scripts; what it told, after the ledger agreed with what the client counted."""
    variables = {"GW_BASE_URL": account.served.url, "GW_API_KEY": account.key, "GW_MODEL": DEFAULT_MODEL}
    interpreter = "python" if script.suffix == ".py" else "node"
    done = environment.run([str(environment.bin / interpreter), str(script)], cwd, variables, SMOKE_TIMEOUT_S)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    counted = (len(seen["usages"]), *(sum(column) for column in zip(*seen["usages"], strict=True)))
    eventually(lambda: account.used() == counted)
    return seen


def assert_it_talked(seen: dict) -> None:
    """The answers that every chat client gives: text, the same as a stream, an object, a call, an error's code."""
    assert "Tokyo" in seen["text"]
    assert seen["streamed"] == seen["text"]
    assert_paris(seen["city"])
    assert set(seen["arguments"]) == {"city", "unit"}
    assert seen["arguments"]["unit"] in UNITS
    assert seen["refused"] == "model_not_found"


def assert_paris(city: dict) -> None:
    assert set(city) == {"name", "country", "size"}
    assert "Paris" in city["name"]
    assert city["size"] in SIZES


@pytest.mark.parametrize("version", ["3.57.0", "2.54.0"])
def test_openai_python(version: str, account: Account, tmp_path: Path):
    environment = python(f"openai-{version}", f"openai=={version}")

    seen = smoke(environment, SMOKES / "openai_python.py", account, tmp_path)

    assert_it_talked(seen)
    assert seen["version"] == version
    assert seen["models"] == [DEFAULT_MODEL]
    first, second = seen["scores"]
    assert (len(first), len(second)) == (3, 2)
    assert (first[0], second[0]) == (None, None)
    assert all(score < 0 for score in (*first[1:], *second[1:]))


def test_openai_node(account: Account, tmp_path: Path):
    environment = node("openai-node", "openai@6.49.0")

    seen = smoke(environment, beside(environment, "openai_node.mjs"), account, tmp_path)

    assert_it_talked(seen)
    assert seen["version"] == "6.49.0"
    assert seen["models"] == [DEFAULT_MODEL]


def test_vercel_ai_sdk(account: Account, tmp_path: Path):
    environment = node("ai-sdk", "ai@6.0.326", "@ai-sdk/openai-compatible@2.0.92", "zod@4.1.12")

    assert_it_talked(smoke(environment, beside(environment, "ai_sdk_node.mjs"), account, tmp_path))


def beside(environment: Environment, script: str) -> Path:
    """A copy next to ``node_modules``, where node looks for what a script imports."""
    return Path(shutil.copy(SMOKES / script, environment.folder))


def test_litellm(account: Account, tmp_path: Path):
    environment = python("litellm", "litellm==1.110.2")

    seen = smoke(environment, SMOKES / "litellm_python.py", account, tmp_path)

    assert_it_talked(seen)
    assert "Tokyo" in seen["legacy"]


def test_langchain_openai(account: Account, tmp_path: Path):
    environment = python("langchain-openai", "langchain-openai==1.4.3", "openai==2.54.0")

    seen = smoke(environment, SMOKES / "langchain_openai_python.py", account, tmp_path)

    assert_it_talked(seen)
    assert_paris(seen["city_by_call"])


def test_instructor(account: Account, tmp_path: Path):
    environment = python("instructor", "instructor==1.17.0")

    seen = smoke(environment, SMOKES / "instructor_python.py", account, tmp_path)

    assert set(seen["cities"]) == {"TOOLS", "JSON_SCHEMA"}
    for city in seen["cities"].values():
        assert set(city) == {"name", "country", "size"}
        assert city["size"] in SIZES


# ── tools that measure and evaluate ──────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The served model's own tokenizer as a Hugging Face folder."""
    card = card_from_gguf(GgufFile(DEFAULT_GGUF).metadata)
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "tokenizer.json").write_text(card.tokenizer_json)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": card.chat_template, **card.tokens}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def run_tool(environment: Environment, command: list[str], account: Account, cwd: Path, timeout_s: float = 200) -> str:
    """Runs a tool that finds the key where it looks for it; its stdout."""
    variables = {"OPENAI_API_KEY": account.key, "GW_API_KEY": account.key, "GW_BASE_URL": account.served.url}
    done = environment.run(command, cwd, variables, timeout_s)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-4000:]
    return done.stdout


def test_inspect_ai_scores_what_the_model_says(account: Account, tmp_path: Path):
    environment = python("inspect-ai", "inspect-ai==0.3.285", "openai==3.57.0")
    command = ["inspect", "eval", "inspect_capitals.py", "--model", f"openai-api/gw/{DEFAULT_MODEL}"]
    command += ["--display", "plain", "--max-retries", "0", "--max-tokens", "32", "--temperature", "0"]
    shutil.copy(SMOKES / "inspect_capitals.py", tmp_path)

    run_tool(environment, [*command, "--log-format", "json", "--log-dir", "logs"], account, tmp_path)

    (log,) = [json.loads(path.read_text()) for path in (tmp_path / "logs").glob("*.json")]
    (score,) = log["results"]["scores"]
    (usage,) = log["stats"]["model_usage"].values()
    assert log["status"] == "success"
    assert score["metrics"]["accuracy"]["value"] == 1.0
    eventually(lambda: account.used() == (2, usage["input_tokens"], usage["output_tokens"]))


def test_lm_eval_scores_equal_our_logprobs(account: Account, tokenizer: Path, tmp_path: Path):
    environment = python("lm-eval", "lm-eval[api]==0.4.13", "transformers==5.24.0")
    where = f"model={DEFAULT_MODEL},base_url={account.served.url}/completions,num_concurrent=1,max_retries=1"
    how = f"tokenizer_backend=huggingface,tokenizer={tokenizer},tokenized_requests=True"
    command = ["lm_eval", "run", "--model", "local-completions", "--model_args", f"{where},{how}"]
    command += ["--tasks", "capitals_choice,capitals_text", "--include_path", ".", "--output_path", "out"]
    for name in ("lm_eval_choice.yaml", "lm_eval_text.yaml", "capitals.jsonl"):
        shutil.copy(SMOKES / name, tmp_path)

    run_tool(environment, [*command, "--log_samples"], account, tmp_path)

    (results,) = [json.loads(path.read_text())["results"] for path in (tmp_path / "out").rglob("results_*.json")]
    assert results["capitals_choice"]["acc,none"] == 1.0
    with account.served.http(account.key) as http:
        for score, prompt, continuation in choices_of(samples(tmp_path, "capitals_choice")):
            ours = logprobs(http, prompt + continuation)[len(logprobs(http, prompt)) :]
            assert (len(ours) > 0, score) == (True, pytest.approx(sum(ours), abs=1e-4))
        for prompt, text in answers_of(samples(tmp_path, "capitals_text")):
            body = {"model": DEFAULT_MODEL, "prompt": prompt, "max_tokens": 8, "temperature": 0, "stop": ["."]}
            assert http.post("/completions", json=body).json()["choices"][0]["text"] == text


def samples(folder: Path, task: str) -> list[dict]:
    (path,) = folder.rglob(f"samples_{task}_*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def choices_of(logged: list[dict]) -> Iterator[tuple[float, str, str]]:
    """Each choice that lm-eval scored: log probability, context, continuation."""
    for sample in logged:
        for ((score, _),), arguments in zip(sample["resps"], sample["arguments"].values(), strict=True):
            yield float(score), arguments["arg_0"], arguments["arg_1"]


def answers_of(logged: list[dict]) -> Iterator[tuple[str, str]]:
    for sample in logged:
        yield sample["arguments"]["gen_args_0"]["arg_0"], sample["resps"][0][0]


def logprobs(http: httpx.Client, prompt: str) -> list[float]:
    """Of the tokens of a text, as we say them for the text itself (not for token ids)."""
    body = {"model": DEFAULT_MODEL, "prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 0}
    return http.post("/completions", json=body).json()["choices"][0]["logprobs"]["token_logprobs"]


def test_evalscope_perf(account: Account, tokenizer: Path, tmp_path: Path):
    environment = python("evalscope", "evalscope[perf]==1.14.1")
    (tmp_path / "lines.txt").write_text("What is the capital of Japan?\nWhat is the capital of France?\n" * 2)
    command = ["evalscope", "perf", "--url", f"{account.served.url}/chat/completions", "--model", DEFAULT_MODEL]
    command += ["--api", "openai", "--api-key", account.key, "--dataset", "line_by_line"]
    command += ["--dataset-path", "lines.txt", "--parallel", "2", "--number", "4", "--max-tokens", "8", "--stream"]
    command += ["--no-test-connection", "--tokenizer-path", str(tokenizer), "--outputs-dir", "out"]

    run_tool(environment, command, account, tmp_path)

    (summary,) = [json.loads(path.read_text()) for path in (tmp_path / "out").rglob("benchmark_summary.json")]
    assert (summary["Total Requests"], summary["Success Requests"], summary["Failed Requests"]) == (4, 4, 0)
    prompt, completion = (4 * summary[name] for name in ("Avg Input Tokens", "Avg Output Tokens"))
    assert 4 <= completion <= 4 * 8
    eventually(lambda: account.used() == (4, pytest.approx(prompt), pytest.approx(completion)))


def test_guidellm(account: Account, tokenizer: Path, tmp_path: Path):
    environment = python("guidellm", "guidellm==0.8.1", f"torch=={metadata.version('torch')}")
    url = account.served.url.removesuffix("/v1")
    command = [
        "guidellm",
        "run",
        "--backend",
        f"kind=openai_http,target={url},model={DEFAULT_MODEL},api_key={account.key}",
    ]
    command += ["--tokenizer", f"kind=huggingface_auto,model={tokenizer}"]
    command += ["--data", "kind=synthetic_text,prompt_tokens=16,output_tokens=8"]
    command += ["--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=8"]

    run_tool(environment, [*command, "--output", "kind=json,path=o.json", "--disable-progress"], account, tmp_path)

    (benchmark,) = json.loads((tmp_path / "o.json").read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert (len(requests["successful"]), requests["errored"], requests["incomplete"]) == (8, [], [])
    assert all(each["output"] and each["output_tokens"] == 8 for each in requests["successful"])
    prompt = sum(each["prompt_tokens"] for each in requests["successful"])
    eventually(lambda: account.used() == (8, prompt, 64))


def test_aiperf(account: Account, tokenizer: Path, tmp_path: Path):
    environment = python("aiperf", "aiperf==0.13.0")
    url = account.served.url.removesuffix("/v1")
    command = ["aiperf", "profile", "--model", DEFAULT_MODEL, "--url", url, "--endpoint-type", "chat", "--streaming"]
    command += ["--tokenizer", str(tokenizer), "--request-count", "8", "--concurrency", "2", "--api-key", account.key]
    command += ["--synthetic-input-tokens-mean", "16", "--output-tokens-mean", "8", "--ui", "none"]

    run_tool(environment, [*command, "--output-artifact-dir", "out"], account, tmp_path)

    summary = json.loads((tmp_path / "out" / "profile_export_aiperf.json").read_text())
    counted = [
        summary[name]["avg"] for name in ("request_count", "total_usage_prompt_tokens", "total_usage_completion_tokens")
    ]
    assert counted[0] == 8
    without_text = summary["usage_completion_tokens"]["avg"] - summary["output_token_count"]["avg"]
    assert 0 <= without_text <= 1  # it counts the tokens of the text; the one that ends an answer is not among them
    eventually(lambda: list(account.used()) == counted)
