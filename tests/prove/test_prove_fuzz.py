"""``./run prove fuzz [--seed N --rounds N]``: 20,000 mutated adapter files and configs, a twentieth of them over HTTP.

Each is refused with reasons or bound right and equal to a merged reference; nothing is written elsewhere, nothing is
left behind, memory stays bounded, and what serves goes on serving. A failure names (seed, index).
"""

import concurrent.futures
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import torch

from tests import oracle
from tests.adapter_calls import generate
from tests.adapter_fuzz import MAX_DELTA, Fuzz, kind_of, nothing_written_outside
from tests.adapter_mutants import Mutant, mutant
from tests.adapter_reference import expected_deltas, num_pairs
from tests.served import Served, serving
from tests.tiny import hf_config, tiny_config, tiny_weights, weight_name, write_hf_dir

pytestmark = pytest.mark.long

ROUNDS = 20_000
HTTP_SHARE = 20
PROMPT = [5, 77, 131, 9, 250]
MAX_GROWTH_BYTES = 64 << 20


@pytest.fixture(scope="module")
def num_mutants(rounds: int | None) -> int:
    return rounds or ROUNDS


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("fuzz")
    model = write_hf_dir(folder / "model")
    options = ("--model", f"tiny={model}", "--dtype", "float32", "--gateways", "2", "--max-adapter-rank", "16")
    with serving(folder / "home", *options, "--block-size", "4", "--kv-blocks", "256", "--context", "128") as served:
        yield served


def test_each_mutant_is_refused_with_reasons_or_equals_its_merged_reference(
    tmp_path: Path, seed: int, num_mutants: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    torch.set_num_threads(1)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    fuzz, process, warm_bytes = Fuzz(tmp_path), psutil.Process(), 0

    with nothing_written_outside(fuzz.root):
        for index in range(num_mutants):
            try:
                fuzz.run(mutant(seed, index))
            except Exception as error:
                raise AssertionError(f"mutant(seed={seed}, index={index}): {mutant(seed, index).steps}") from error
            if index == num_mutants // 10:
                warm_bytes = process.memory_info().rss

    with capsys.disabled():
        print(f"\nin process, seed {seed}: {fuzz.tally.table()}")
    assert fuzz.tally.num_past_gate >= 0.2 * num_mutants
    assert fuzz.tally.num_accepted >= 0.02 * num_mutants
    assert fuzz.tally.num_forwards >= 0.02 * num_mutants
    assert process.memory_info().rss - warm_bytes < MAX_GROWTH_BYTES
    assert sorted(path.name for path in tmp_path.iterdir()) == ["blobs", "elsewhere"]
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_twentieth_of_them_over_http_leaves_a_serving_house_as_it_was(
    tiny: Served, seed: int, num_mutants: int, capsys: pytest.CaptureFixture
):
    key, num = tiny.new_tenant("fuzz"), max(1, num_mutants // HTTP_SHARE)
    with tiny.http(key) as http:
        send(http, 0, mutant(seed, 0))
        base = generate(http, "tiny", PROMPT)
        files, children, memory = files_of(tiny), tiny.children(""), memory_of(tiny)
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda index: send(http, index, mutant(seed, num_mutants + index)), range(num)))
        assert generate(http, "tiny", PROMPT) == base

    counts = Counter(kind for kinds in answers for kind in kinds)
    with capsys.disabled():
        print(f"\nover HTTP, {num} mutants: {counts['accepted']} accepted and equal to merged weights; refused:")
        print("\n".join(f"{count:7} {kind}" for kind, count in counts.most_common() if kind != "accepted"))
    assert counts["accepted"] >= 0.02 * num
    assert files_of(tiny) == files
    assert {child.pid for child in tiny.children("")} == {child.pid for child in children}
    assert memory_of(tiny) - memory < len(children) * MAX_GROWTH_BYTES


def send(http: httpx.Client, index: int, given: Mutant) -> set[str]:
    """Uploads, uses and deletes one; what became of it."""
    name = f"m{index}"
    files = {"adapter_config.json": given.config, "adapter_model.safetensors": given.weights}
    answer = http.post("/adapters", data={"name": name, "base_model": "tiny"}, files=files)
    if answer.status_code != 201:
        assert answer.status_code in (400, 413, 422), (given.steps, answer.text)
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert error["message"]
        assert http.get(f"/adapters/{name}").status_code == 404
        if answer.status_code == 422:
            assert error["reasons"]
        return {kind_of(reason) for reason in error.get("reasons", [f"{answer.status_code} {error['param']}"])}
    assert answer.json()["num_pairs_bound"] == num_pairs(given.weights)
    check_use(http, name, given)
    assert http.delete(f"/adapters/{name}").status_code == 200
    return {"accepted"}


def check_use(http: httpx.Client, name: str, given: Mutant) -> None:
    """Greedy log-probabilities are those of merged weights; where numbers are too large for fp32, it only answers."""
    found = generate(http, name, PROMPT, 8)[2]
    deltas = expected_deltas(given.config, given.weights)
    if max(float(delta.abs().max()) for delta in deltas.values()) < MAX_DELTA:
        weights = {weight: values.double() for weight, values in tiny_weights().items()}
        for place, delta in deltas.items():
            weights[weight_name(*place)] = weights[weight_name(*place)] + delta
        expected = oracle.greedy(hf_config(tiny_config()), weights, PROMPT, 8)[1]
        assert found == pytest.approx(expected, abs=2e-3), given.steps


def files_of(served: Served) -> set[str]:
    paths = (path for path in served.home.rglob("*") if not path.name.startswith(("tenora.db", "journal")))
    return {str(path) for path in paths} - {str(folder) for folder in (served.home / "blobs" / "tenants").iterdir()}


def memory_of(served: Served) -> int:
    return sum(child.memory_info().rss for child in served.children(""))
