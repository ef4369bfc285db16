"""Upload → use → replace under the same name → delete, again and again, with two slots and streams that never rest."""

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from tests import oracle
from tests.exactness import assert_same
from tests.served import Served, eventually
from tests.tiny import Adapter, hf_config, merged, tiny_adapter, tiny_config, tiny_weights, write_peft_dir
from tests.uploads import FILES, pss_bytes, stream_chunks, upload

CONFIG, BASE = hf_config(tiny_config()), tiny_weights()
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13]
NUM_CHECKED = 8  # tokens held against the merged weights
NUM_TOKENS = 60
DELETE_S = 5.0


def body(model: str, num_tokens: int = NUM_TOKENS) -> dict:
    """Greedy, to the end, with the log-probability of each token."""
    options = {"max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    return {"model": model, "prompt": PROMPT, **options}


def logprobs_of(http: httpx.Client, model: str, num_tokens: int = NUM_TOKENS) -> list[float]:
    answer = http.post("/completions", json=body(model, num_tokens))
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["logprobs"]["token_logprobs"]


def expected(adapter: Adapter | None) -> list[float]:
    weights = BASE if adapter is None else merged(BASE, adapter)
    return oracle.greedy(CONFIG, weights, PROMPT, NUM_CHECKED)[1]


def assert_is(logprobs: list[float], adapter: Adapter | None) -> None:
    assert logprobs[:NUM_CHECKED] == pytest.approx(expected(adapter), abs=1e-4)


@dataclass(frozen=True)
class Standing:
    """What must be at the end as it was at the start."""

    slots: dict[str, float]
    resident: dict[str, float]
    blobs: set[str]
    staged: int

    @classmethod
    def of(cls, served: Served) -> "Standing":
        samples = served.metrics()

        def by(name: str, label: str) -> dict[str, float]:
            return {dict(labels)[label]: value for (found, labels), value in samples.items() if found == name}

        blobs = served.home / "blobs"
        return cls(
            by("tenora_adapter_slots", "state"),
            by("tenora_adapters_resident", "tier"),
            {str(path.relative_to(blobs)) for path in (blobs / "tenants").rglob("*") if path.is_file()},
            len(list((blobs / "staging").iterdir())),
        )


@dataclass
class Churn:
    """``deletes_s``: how long each deletion took to answer."""

    served: Served
    key: str
    folder: Path
    deletes_s: list[float] = field(default_factory=list)
    num_background: int = 0

    def round(self, number: int) -> None:
        """One life of the name ``x``; v1 streams while v2 takes its place, and v2 while the name is deleted."""
        old, new = tiny_adapter(1000 + 2 * number, rank=4), tiny_adapter(1001 + 2 * number, rank=8)
        paths = [write_peft_dir(self.folder / f"{number}-{i}", each) for i, each in enumerate((old, new))]
        with self.served.http(self.key) as http, ThreadPoolExecutor(2) as pool:
            assert upload(http, "x", paths[0], expected_version="0").status_code == 201
            alone = logprobs_of(http, "x")
            assert_is(alone, old)
            for file in FILES:
                assert http.put(f"/adapters/x/files/{file}", content=(paths[1] / file).read_bytes()).status_code == 200
            running = self._started(pool, "x")
            replaced = http.post("/adapters/x/commit", json={"base_model": "tiny"})
            assert (replaced.status_code, replaced.json()["version"]) == (201, 2 * number + 2)
            assert_is(logprobs_of(http, "x", NUM_CHECKED), new)
            assert_same(running.result(300), alone)  # a stream of v1 is v1 to its end
            whole = logprobs_of(http, "x")
            running = self._started(pool, "x")
            began = time.monotonic()
            assert http.delete("/adapters/x").status_code == 200
            self.deletes_s.append(time.monotonic() - began)
            assert http.post("/completions", json=body("x")).status_code == 404
            assert_same(running.result(300), whole)  # a deletion lets what runs finish

    def _started(self, pool: ThreadPoolExecutor, model: str):
        """A stream of which the first chunk has come: a future of all its log-probabilities."""
        begun = threading.Event()
        future = pool.submit(self._stream, model, begun)
        assert begun.wait(60)
        return future

    def _stream(self, model: str, begun: threading.Event | None = None) -> list[float]:
        logprobs: list[float] = []
        with self.served.http(self.key) as http:
            for chunk in stream_chunks(http, body(model)):
                logprobs += chunk["choices"][0]["logprobs"]["token_logprobs"]
                if begun is not None:
                    begun.set()
        return logprobs

    @contextlib.contextmanager
    def background(self, *models: str) -> Iterator[None]:
        """Streams of these models, one after the other, each equal to its solo run."""
        solo = {model: self._stream(model) for model in models}
        over = threading.Event()

        def keep_streaming(model: str) -> None:
            while not over.is_set():
                assert_same(self._stream(model), solo[model])
                self.num_background += 1

        with ThreadPoolExecutor(len(models)) as pool:
            streams = [pool.submit(keep_streaming, model) for model in models]
            try:
                yield
            finally:
                over.set()
            for stream in streams:
                stream.result(300)


def churn(served: Served, folder: Path, tenant: str, rounds: int) -> tuple[Churn, list[int]]:
    """Runs it and checks all but the memory: (what was measured, bytes of all our processes before and after each
    quarter of the rounds)."""
    key = served.new_tenant(tenant)
    run = Churn(served, key, folder)
    constant = tiny_adapter(999, rank=4)
    with served.http(key) as http:
        assert upload(http, "constant", write_peft_dir(folder / "constant", constant)).status_code == 201
        assert_is(logprobs_of(http, "constant"), constant)
        assert_is(logprobs_of(http, "tiny"), None)
    run.round(0)  # what is made once, is made
    with served.http(key) as http:
        assert_is(logprobs_of(http, "constant"), constant)
    before = eventually(lambda: _at_rest(served))
    memory = [_memory(served)]
    with run.background("tiny", "constant"):
        for number in range(1, rounds + 1):
            run.round(number)
            if number % max(1, rounds // 4) == 0:
                memory.append(_memory(served))
    eventually(lambda: Standing.of(served) == before)
    assert max(run.deletes_s) < DELETE_S
    assert run.num_background >= 2
    return run, memory


def _at_rest(served: Served) -> Standing | None:
    standing = Standing.of(served)
    return standing if not standing.slots["pinned"] and not standing.staged else None


def _memory(served: Served) -> int:
    return sum(map(pss_bytes, [*served.gateways(), *served.engines()]))
