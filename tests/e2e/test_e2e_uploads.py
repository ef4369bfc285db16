"""Uploads and deletions against a whole server: memory, neighbours, the command (cases 4 and 8)."""

import concurrent.futures
import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.churn import churn
from tests.served import ROOT, Served, eventually
from tests.tiny import tiny_adapter, write_peft_dir
from tests.uploads import sound_header, stream_chunks, upload, watched

BODY = {"model": "tiny", "prompt": [5, 6, 7, 8], "max_tokens": 110, "temperature": 0, "ignore_eos": True}
LARGE_BYTES = 96 << 20


def test_a_large_upload_adds_less_than_20_mb_to_the_gateways_memory(tiny: Served, tmp_path: Path):
    """The form and the plain file; what they hold is refused in the end, when all of it has been read."""
    key = tiny.new_tenant("large-uploads")
    content = sound_header(LARGE_BYTES) + bytes(LARGE_BYTES)
    write_peft_dir(tmp_path, tiny_adapter(20))
    (tmp_path / "adapter_model.safetensors").write_bytes(content)
    with tiny.http(key) as http, watched(tiny.gateways()) as peaks:
        posted = upload(http, "a", tmp_path)
        with (tmp_path / "adapter_model.safetensors").open("rb") as file:
            put = http.put("/adapters/a/files/adapter_model.safetensors", content=file)
        http.put("/adapters/a/files/adapter_config.json", content=(tmp_path / "adapter_config.json").read_bytes())
        committed = http.post("/adapters/a/commit", json={"base_model": "tiny"})

    assert (posted.status_code, put.status_code, committed.status_code) == (422, 200, 422)
    assert put.json()["size_bytes"] == len(content)
    assert posted.json()["error"]["reasons"] == committed.json()["error"]["reasons"]
    assert peaks.growth < 20_000_000


@pytest.mark.parametrize("order", [("bad", "good"), ("good", "bad"), ("together",)])
def test_a_bad_adapter_beside_a_good_one_disturbs_neither_it_nor_a_running_stream(tiny: Served, tmp_path: Path, order):
    """Case 4."""
    key = tiny.new_tenant(f"case-4-{'-'.join(order)}")
    paths = {
        "bad": write_peft_dir(tmp_path / "bad", tiny_adapter(21, rank=64)),
        "good": write_peft_dir(tmp_path / "good", tiny_adapter(22, rank=8)),
    }

    def send(name: str) -> httpx.Response:
        with tiny.http(key) as http:
            return upload(http, name, paths[name])

    def choices() -> list[list[dict]]:
        with tiny.http(key) as http:
            return [chunk["choices"] for chunk in stream_chunks(http, BODY)]

    quiet = choices()
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        running = [pool.submit(choices)]
        names = list(paths) if order == ("together",) else order
        sent = pool.map(send, names) if order == ("together",) else map(send, names)
        answers = dict(zip(names, sent, strict=True))
        running.append(pool.submit(choices))
        streams = [stream.result(300) for stream in running]
    with tiny.http(key) as http:
        listed = {model["id"] for model in http.get("/models").json()["data"]}
        used = http.post("/completions", json=BODY | {"model": "good"})
        absent = http.post("/completions", json=BODY | {"model": "bad"})

    assert (answers["bad"].status_code, answers["bad"].json()["error"]["code"]) == (422, "invalid_adapter")
    assert all(number in answers["bad"].json()["error"]["message"] for number in ("64", "16"))
    assert answers["good"].status_code == 201
    assert listed == {"tiny", "good"}
    assert (used.status_code, absent.status_code) == (200, 404)
    assert ["".join(each[0]["text"] for each in stream) for stream in (quiet, *streams)] == [
        "".join(each[0]["text"] for each in quiet)
    ] * 3


def _text(http: httpx.Client, model: str) -> str:
    answer = http.post("/completions", json=BODY | {"model": model, "max_tokens": 16})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def test_the_command_pushes_lists_and_deletes(tiny: Served, tmp_path: Path):
    key = tiny.new_tenant("commander")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TENORA_")}
    environment |= {"TENORA_URL": tiny.url, "TENORA_API_KEY": key}
    folder = str(write_peft_dir(tmp_path / "greeter", tiny_adapter(40)))

    def tenora(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "gateway.cli", "adapter", *arguments]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)

    pushed = tenora("push", folder, "--base-model", "tiny", "--json")
    conflict = tenora("push", folder, "--base-model", "tiny", "--expected-version", "0")
    nothing = tenora("push", str(tmp_path), "--base-model", "tiny")
    listed = tenora("list", "--json")
    with tiny.http(key) as http:
        used = http.post("/completions", json=BODY | {"model": "greeter"})
    deleted = tenora("delete", "greeter")

    assert (pushed.returncode, pushed.stderr) == (0, "")
    version = json.loads(pushed.stdout)
    assert (version["name"], version["version"], version["num_pairs_bound"]) == ("greeter", 1, 14)
    assert json.loads(listed.stdout)["data"] == [version]
    assert used.status_code == 200
    assert deleted.returncode == 0
    assert [failed.returncode for failed in (conflict, nothing)] == [1, 1]
    assert all(failed.stderr.count("\n") == 1 for failed in (conflict, nothing))


def test_the_operator_sees_which_adapters_lie_where(tiny: Served, tmp_path: Path):
    key = tiny.new_tenant("seen-by-the-operator")
    with tiny.http(key) as http, tiny.ops() as ops:
        upload(http, "seen", write_peft_dir(tmp_path, tiny_adapter(41)))
        _text(http, "seen")
        own = http.get("/adapters/seen").json()["versions"][0]["residency"]
        engine = ops.get("/engines").json()["data"][0]
        http.delete("/adapters/seen")
        left = eventually(lambda: ops.get("/engines").json()["data"][0]["residency"] != engine["residency"])

    assert own == [{"replica": engine["id"], "tiers": ["device", "cpu", "disk"]}]
    assert ["device", "cpu", "disk"] in [each["tiers"] for each in engine["residency"]]
    assert all(len(each["adapter"]) == 12 for each in engine["residency"])
    assert left


def test_the_operator_sees_how_an_engines_kv_memory_is_laid_out_and_shared(tiny: Served):
    with tiny.ops() as ops:
        engine = ops.get("/engines").json()["data"][0]
        kv = ops.get(f"/engines/{engine['id']}/kv").json()
        absent = ops.get("/engines/none/kv")

    assert kv["layout"]["num_blocks"] == engine["card"]["num_blocks"] == sum(kv["blocks"].values())
    assert set(kv["blocks"]) == {"free", "used", "cached"}
    assert set(kv["blocks_in_use"]) == {"interactive", "standard", "batch"}
    assert {"fragmentation_ratio", "last_refusal"} <= kv.keys()
    assert (absent.status_code, absent.json()["error"]["code"]) == (404, "not_found")


def test_names_come_and_go_and_every_answer_is_of_the_right_version(tiny: Served, tmp_path: Path):
    """Two rounds of what ``./run prove churn`` does for fifty."""
    churn(tiny, tmp_path, "churn", rounds=2)
