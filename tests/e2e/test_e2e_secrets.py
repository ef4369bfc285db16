"""Secrets planted all over a served installation, at log level debug and through every kind of failure; then looked for
in what it writes and says: logs of all processes, spans, metrics, files, and answers to others."""

import json
import re
import secrets
import struct
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from tests import plain
from tests.otlp import Collector
from tests.served import Served, eventually
from tests.tiny import tiny_adapter, write_peft_dir

SAFE = {"credentials.json", "secrets.json"}  # 0600: keys and peppers are kept there by design


def _plant() -> str:
    return "planted" + secrets.token_hex(12)


@dataclass
class Planted:
    """What must not be found. ``elsewhere``: what may lie in the blobs and the engines' copies of them."""

    prompt: str = field(default_factory=_plant)
    completion: str = field(default_factory=_plant)
    idempotency_key: str = field(default_factory=_plant)
    salt: str = field(default_factory=_plant)
    user: str = field(default_factory=_plant)
    broken: str = field(default_factory=_plant)
    wrong_key: str = field(default_factory=lambda: "tn_live_" + _plant())
    other_auth: str = field(default_factory=_plant)
    tool: str = field(default_factory=_plant)
    query: str = field(default_factory=_plant)
    part: str = field(default_factory=_plant)
    config: str = field(default_factory=_plant)
    api_key: str = ""
    operator_key: str = ""
    installation: list[str] = field(default_factory=list)
    weights: bytes = b""

    def found_in(self, content: bytes, *, may_have_weights: bool = False) -> list[str]:
        """The names of those that stand in ``content``."""
        texts = {name: value for name, value in vars(self).items() if isinstance(value, str)}
        texts |= {f"installation {number}": text for number, text in enumerate(self.installation)}
        found = [name for name, text in texts.items() if text.encode() in content]
        return found + (["weights"] if self.weights in content and not may_have_weights else [])


@dataclass
class Scene:
    served: Served
    collector: Collector
    planted: Planted
    others: list[str]


@pytest.fixture(scope="module")
def scene(observed, tmp_path_factory) -> Scene:
    planted = Planted()
    _live(observed.served, planted, tmp_path_factory.mktemp("secrets"))
    return Scene(observed.served, observed.collector, planted, _ask_as_another(observed.served))


def _live(served: Served, planted: Planted, folder: Path) -> None:
    planted.api_key, planted.operator_key = served.new_tenant("holder"), served.credentials["operator_key"]
    planted.installation = _texts(json.loads((served.home / "secrets.json").read_text()))
    adapter = write_peft_dir(folder / "a", tiny_adapter(5, rank=4))
    planted.weights = _some_weights(adapter / "adapter_model.safetensors")
    with served.http(planted.api_key) as http:
        _succeed(http, planted, adapter)
        _fail(http, planted, adapter)
        _lose_an_engine(served, http, planted)


def _succeed(http: httpx.Client, planted: Planted, adapter: Path) -> None:
    files = {name: (adapter / name).read_bytes() for name in ("adapter_config.json", "adapter_model.safetensors")}
    assert http.post("/adapters", data={"name": "own", "base_model": "tiny"}, files=files).status_code == 201
    for model in ("tiny", "own"):
        answer = http.post("/completions", json=_body(planted) | {"model": model})
        assert answer.status_code == 200, answer.text
    forced = {
        "type": "json_schema",
        "json_schema": {"name": "n", "strict": True, "schema": {"const": planted.completion}},
    }
    once = {"idempotency-key": planted.idempotency_key}
    for _ in range(2):
        answer = http.post("/completions", json=_body(planted) | {"response_format": forced}, headers=once)
        assert planted.completion in answer.json()["choices"][0]["text"], answer.text
    with http.stream("POST", "/completions", json=_body(planted) | {"stream": True}) as stream:
        assert "[DONE]" in stream.read().decode()


def _body(planted: Planted) -> dict:
    extra = {"cache_salt": planted.salt, "user": planted.user, "metadata": {"m": planted.user}}
    return {"model": "tiny", "prompt": planted.prompt, "max_tokens": 60, "echo": True, "logprobs": 1} | extra


def _fail(http: httpx.Client, planted: Planted, adapter: Path) -> None:
    chat = {"model": "tiny", "messages": [{"role": "user", "content": planted.prompt}]}
    weights = (adapter / "adapter_model.safetensors").read_bytes()
    broken_files = {
        "adapter_config.json": json.dumps({"peft_type": planted.config}),
        "adapter_model.safetensors": weights,
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": planted.tool}, "strict": True}}
    statuses = [
        http.post("/completions", content=f'{{"model": "tiny", "prompt": "{planted.broken}'),
        http.post("/completions", json=_body(planted) | {"temperature": planted.broken}),
        http.post("/completions", json=_body(planted) | {"model": planted.broken}),
        http.post("/chat/completions", json=chat | {"tools": [tool]}),
        http.post("/chat/completions", json=chat | {"max_tokens": 100_000}),
        http.get("/organization/costs", params={"start_time": planted.query}),
        http.get(f"/requests/{planted.query}"),
        http.post("/adapters", files={planted.part: b"x"}),
        http.post("/adapters", data={"name": "bad", "base_model": "tiny"}, files=broken_files),
        http.put("/adapters/bad/files/adapter_model.safetensors", content=planted.weights * 2),
        http.post("/adapters/bad/commit", json={"base_model": "tiny"}),
        http.get("/models", headers={"authorization": f"Bearer {planted.wrong_key}"}),
        http.get("/models", headers={"authorization": f"Basic {planted.other_auth}"}),
        http.request("TRACE", "/completions", headers={"authorization": f"Bearer {planted.wrong_key}"}),
    ]
    assert {answer.status_code // 100 for answer in statuses} <= {2, 4}
    assert sum(answer.status_code >= 400 for answer in statuses) >= 12


def _lose_an_engine(served: Served, http: httpx.Client, planted: Planted) -> None:
    before = served.engines()[0].pid
    body = _body(planted) | {
        "max_tokens": 100,
        "n": 8,
        "stream": True,
        "ignore_eos": True,
        "echo": False,
        "prompt": [5],
    }
    with http.stream("POST", "/completions", json=body | {"user": planted.prompt}) as stream:
        lines = stream.iter_lines()
        next(lines)
        served.engines()[0].kill()
        assert "error" in "".join(lines)
    eventually(lambda: [each.pid for each in served.engines()] not in ([], [before]))
    eventually(lambda: http.post("/completions", json=_body(planted)).status_code == 200)


def _ask_as_another(served: Served) -> list[str]:
    """What somebody else is told, of everything that there is and isn't."""
    with served.http(served.new_tenant("curious")) as http:
        answers = [
            *(http.get(path) for path in ("/models", "/adapters", "/adapters/own", "/models/own", "/openapi.json")),
            http.get("/organization/costs", params={"start_time": 0}),
            http.post("/completions", json={"model": "own", "prompt": "x"}),
            http.post("/completions", json={"model": "tiny", "prompt": [5], "max_tokens": 8}),
            http.delete("/adapters/own"),
        ]
    return [f"{answer.headers}\n{answer.text}" for answer in answers]


def _texts(value: object) -> list[str]:
    if isinstance(value, dict):
        return [text for each in value.values() for text in _texts(each)]
    if isinstance(value, list):
        return [text for each in value for text in _texts(each)]
    return [value] if isinstance(value, str) and len(value) >= 16 else []


def _some_weights(path: Path) -> bytes:
    """48 bytes out of the middle of a tensor."""
    content = path.read_bytes()
    (header,) = struct.unpack_from("<Q", content)
    return content[8 + header + 64 :][:48]


def test_the_logs_of_all_processes_have_none(scene: Scene):
    log = scene.served.log.read_bytes()

    assert re.search(rb" DEBUG ", log), "the level is debug"
    assert scene.planted.found_in(log) == []
    assert scene.planted.found_in("\n".join(scene.served.lines).encode()) == []


def test_spans_have_none(scene: Scene):
    eventually(lambda: len(scene.collector.spans) >= 10)

    assert scene.planted.found_in(b"\n".join(span.SerializeToString() for span in scene.collector.spans)) == []


def test_metrics_have_none(scene: Scene):
    text = plain.get(f"{scene.served.ops_url}/metrics", timeout=10).content

    assert b"tenora_requests_total" in text
    assert scene.planted.found_in(text) == []


def test_answers_to_others_have_none(scene: Scene):
    assert scene.planted.found_in("\n".join(scene.others).encode()) == []


def test_the_database_and_every_file_of_the_home_have_none(scene: Scene):
    home, searched, found = scene.served.home, 0, {}
    for path in home.rglob("*"):
        if not path.is_file() or path.name in SAFE:
            continue
        searched += 1
        of_adapters = bool({"blobs", "engines"} & set(path.relative_to(home).parts))
        if secrets_found := scene.planted.found_in(path.read_bytes(), may_have_weights=of_adapters):
            found[str(path.relative_to(home))] = secrets_found

    assert searched >= 3
    assert found == {}
