"""Adapters over HTTP: taken whole or not at all, and nothing left behind (cases 4, 5, 8, 11)."""

import asyncio
import json
import struct
from pathlib import Path

import httpx
import pytest
from gateway_harness import House

from gateway.adapters.check import Job, check
from gateway.errors import ApiError
from tests.tiny import tiny_adapter, write_peft_dir

FILES = ("adapter_config.json", "adapter_model.safetensors")


def contents(path: Path) -> dict[str, bytes]:
    return {name: (path / name).read_bytes() for name in FILES}


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> dict[str, bytes]:
    return contents(write_peft_dir(tmp_path_factory.mktemp("good"), tiny_adapter(1, rank=4)))


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> dict[str, bytes]:
    return contents(write_peft_dir(tmp_path_factory.mktemp("other"), tiny_adapter(2, rank=8, modules=("q_proj",))))


def upload(http: httpx.Client, files: dict[str, bytes], **fields: str) -> httpx.Response:
    return http.post("/adapters", data={"name": "a", "base_model": "tiny"} | fields, files=files)


def text_of(http: httpx.Client, model: str) -> str:
    body = {"model": model, "prompt": [5, 6, 7], "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    answer = http.post("/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    return answer.json()["choices"][0]["text"]


def staged(house: House) -> list[str]:
    return [path.name for path in (house.settings.blobs / "staging").iterdir()]


def blobs_of(house: House, key: str) -> list[Path]:
    folder = house.settings.blobs / "tenants" / house.tenants[key]
    return sorted(folder.iterdir()) if folder.exists() else []


def test_an_upload_can_be_used_as_soon_as_it_is_answered(house: House, good: dict[str, bytes]):
    key = house.new_tenant("uploads")
    with house.http(key) as http:
        base = text_of(http, "tiny")
        answer = upload(http, good)
        shown = http.get("/adapters/a").json()
        listed = http.get("/adapters").json()["data"]
        models = [model["id"] for model in http.get("/models").json()["data"]]
        tuned = text_of(http, "a")
        retrieved = http.get("/models/a@1").json()

    assert answer.status_code == 201
    body = answer.json()
    assert (body["object"], body["name"], body["version"], body["status"]) == ("adapter", "a", 1, "ready")
    assert (body["num_pairs_bound"], body["lora_rank"], body["base_model"]) == (14, 4, "tiny")
    assert shown == body | {"versions": [body | {"residency": [{"replica": "engine-0", "tiers": []}]}]}
    assert listed == [body]
    assert models == ["tiny", "a"]
    assert retrieved["parent"] == "tiny"
    assert tuned != base
    assert [path.name for path in blobs_of(house, key)] == [body["sha256"]]
    assert staged(house) == []


def test_names_move_and_versions_stay(house: House, good: dict[str, bytes], other: dict[str, bytes]):
    key = house.new_tenant("versions")
    with house.http(key) as http:
        upload(http, good)
        first = text_of(http, "a")
        assert upload(http, other, expected_version="1").json()["version"] == 2
        second = text_of(http, "a")
        old = text_of(http, "a@1")
        conflict = upload(http, good, expected_version="1")
        rolled = http.post("/adapters/a/rollback", json={"version": 1})
        back = text_of(http, "a")
        nowhere = http.post("/adapters/a/rollback", json={"version": 9})

    assert first == old == back != second
    assert (conflict.status_code, conflict.json()["error"]["code"]) == (409, "version_conflict")
    assert conflict.headers["x-should-retry"] == "false"
    assert (rolled.status_code, rolled.json()["version"]) == (200, 1)
    assert nowhere.status_code == 404


def test_deletion_takes_name_versions_and_bytes(house: House, good: dict[str, bytes]):
    key = house.new_tenant("deletes")
    with house.http(key) as http:
        upload(http, good)
        upload(http, good, name="twin")
        text_of(http, "a")
        first = http.delete("/adapters/a")
        shared = len(blobs_of(house, key))
        gone = http.post("/completions", json={"model": "a", "prompt": "x"})
        still = text_of(http, "twin")
        http.delete("/adapters/twin")
        again = http.delete("/adapters/a")

    assert (first.status_code, first.json()) == (200, {"id": "a", "object": "adapter", "deleted": True})
    assert (gone.status_code, again.status_code) == (404, 404)
    assert shared == 1
    assert still
    assert blobs_of(house, key) == []


def test_another_tenants_adapter_is_as_absent_as_none(house: House, good: dict[str, bytes]):
    owner, stranger = house.new_tenant("owner"), house.new_tenant("nosy")
    with house.http(owner) as http:
        assert upload(http, good, name="mine").status_code == 201
    with house.http(stranger) as http:
        for method, path in (("GET", "/adapters/{}"), ("DELETE", "/adapters/{}"), ("GET", "/models/{}")):
            foreign, absent = (http.request(method, path.format(name)) for name in ("mine", "none"))
            assert foreign.status_code == absent.status_code == 404
            assert foreign.text.replace("mine", "X") == absent.text.replace("none", "X")
        names = ("mine", "none", "mine@1", "mine@0", "mine@x", "@", "../mine")
        answers = [http.post("/completions", json={"model": name, "prompt": "x"}) for name in names]
    texts = {answer.text.replace(f"`{name}`", "X") for answer, name in zip(answers, names, strict=True)}

    assert {answer.status_code for answer in answers} == {404}
    assert len(texts) == 1


@pytest.mark.parametrize("name", ["", "../b", "a/b", "a%2fb", ".hidden", "x" * 65, "ü", "a b", "a@1", "tiny"])
def test_a_name_that_is_none_is_refused_and_leaves_nothing(house: House, key: str, good: dict[str, bytes], name: str):
    before = blobs_of(house, key)
    with house.http(key) as http:
        answer = upload(http, good, name=name)

    assert answer.status_code == (409 if name == "tiny" else 400)
    assert answer.json()["error"]["param"] == "name"
    assert staged(house) == []
    assert blobs_of(house, key) == before


def broken_header() -> bytes:
    return struct.pack("<Q", 1 << 40) + b"{}"


HOSTILE = {
    "a header longer than the file": {"adapter_model.safetensors": broken_header()},
    "a pickle instead of safetensors": {"adapter_model.safetensors": b"\x80\x04cos\nsystem\n."},
    "a config that is no JSON": {"adapter_config.json": b"{"},
    "a config that is too deep": {"adapter_config.json": b"[" * 200_000},
    "an unsupported kind": {"adapter_config.json": b'{"peft_type": "IA3"}'},
    "a pickle beside it": {"adapter_model.bin": b"\x80\x04."},
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_upload_is_422_with_its_reasons_and_leaves_nothing(house: House, key: str, good, what: str):
    before = blobs_of(house, key)
    with house.http(key) as http:
        answer = upload(http, good | HOSTILE[what], name="hostile")
        shown = http.get("/adapters/hostile")
        text_of(http, "tiny")

    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "invalid_adapter")
    assert answer.json()["error"]["reasons"]
    assert shown.status_code == 404
    assert staged(house) == []
    assert blobs_of(house, key) == before


def test_a_rank_over_the_limit_names_rank_and_limit(house: House, key: str, tmp_path: Path):
    with house.http(key) as http:
        answer = upload(http, contents(write_peft_dir(tmp_path, tiny_adapter(3, rank=64))))

    assert answer.status_code == 422
    assert "64" in answer.json()["error"]["message"]
    assert "16" in answer.json()["error"]["message"]


MALFORMED = {
    "no base model": ({"base_model": ""}, 400, "base_model"),
    "an unknown base model": ({"base_model": "nope"}, 404, "base_model"),
    "an expected version that is a word": ({"expected_version": "one"}, 400, "expected_version"),
    "a field of 2 KiB": ({"name": "x" * 2048}, 413, "name"),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_a_malformed_form_is_refused_by_the_field(house: House, key: str, good: dict[str, bytes], what: str):
    fields, status, param = MALFORMED[what]
    with house.http(key) as http:
        answer = upload(http, good, **fields)

    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
    assert staged(house) == []


def test_a_missing_file_is_named(house: House, key: str, good: dict[str, bytes]):
    with house.http(key) as http:
        for name in FILES:
            answer = upload(http, {name: good[name]})
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] in set(FILES) - {name}


def test_a_body_that_is_no_form_is_415_and_a_torn_one_400(house: House, key: str):
    with house.http(key) as http:
        plain = http.post("/adapters", json={"name": "a"})
        torn = http.post(
            "/adapters",
            content=b'--b\r\nContent-Disposition: form-data; name="name"\r\n\r\na',
            headers={"content-type": "multipart/form-data; boundary=b"},
        )

    assert (plain.status_code, plain.json()["error"]["code"]) == (415, "unsupported_media_type")
    assert torn.status_code == 400
    assert staged(house) == []


def test_an_upload_over_the_tenants_bound_is_413(house: House, good: dict[str, bytes]):
    key = house.new_tenant("small-uploads", max_adapter_bytes=1000)
    with house.http(key) as http:
        little_over = upload(http, good)
        far_over = upload(http, good | {"adapter_model.safetensors": bytes(8 << 20)})

    assert (little_over.status_code, far_over.status_code) == (413, 413)
    assert staged(house) == []


def test_a_tenants_own_limits_on_what_it_keeps_are_409(house: House, good: dict[str, bytes]):
    key = house.new_tenant("one-adapter", max_adapters=1)
    with house.http(key) as http:
        assert upload(http, good).status_code == 201
        answer = upload(http, good, name="second")

    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "limit_reached")
    assert "max_adapters" in answer.json()["error"]["message"]
    assert len(blobs_of(house, key)) == 1


def test_a_check_that_takes_too_long_is_ended_and_is_a_refusal(tmp_path: Path):
    job = Job(json.dumps({}).encode(), str(tmp_path / "w"), str(tmp_path / "o"), {}, 1, 1, [], 1, 1)
    with pytest.raises(ApiError) as caught:
        asyncio.run(check(job, deadline_s=0.001))

    assert (caught.value.status, caught.value.code) == (422, "invalid_adapter")
