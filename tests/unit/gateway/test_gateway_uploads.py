"""Large and hostile uploads, full disks, deletions and crashes: what the disk holds is what the database says."""

import contextlib
import hashlib
import io
import json
import os
import pickle
import resource
import socket
import struct
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from gateway_harness import House, eventually

from gateway.adapters.adapters import MAX_UPLOADS_AT_ONCE
from gateway.adapters.sweep import AdapterSweep
from tenants.adapters.repository import AdapterRepository
from tenants.adapters.staged import MAX_STAGED_ADAPTERS
from tests.tiny import tiny_adapter, write_peft_dir

CONFIG, WEIGHTS = FILES = ("adapter_config.json", "adapter_model.safetensors")
PROMPT = [5, 6, 7]


def files_of(path: Path) -> dict[str, bytes]:
    return {name: (path / name).read_bytes() for name in FILES}


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> dict[str, bytes]:
    return files_of(write_peft_dir(tmp_path_factory.mktemp("good"), tiny_adapter(11, rank=4)))


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> dict[str, bytes]:
    return files_of(write_peft_dir(tmp_path_factory.mktemp("other"), tiny_adapter(12, rank=8)))


def upload(http: httpx.Client, files: dict[str, bytes], **fields: str) -> httpx.Response:
    return http.post("/adapters", data={"name": "a", "base_model": "tiny"} | fields, files=files)


def send(http: httpx.Client, files: dict[str, bytes], name: str = "a") -> list[httpx.Response]:
    return [http.put(f"/adapters/{name}/files/{file}", content=content) for file, content in files.items()]


def commit(http: httpx.Client, name: str = "a", **change) -> httpx.Response:
    return http.post(f"/adapters/{name}/commit", json={"base_model": "tiny"} | change)


def complete(http: httpx.Client, model: str, num_tokens: int = 8) -> httpx.Response:
    body = {"model": model, "prompt": PROMPT, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    return http.post("/completions", json=body)


def text_of(http: httpx.Client, model: str) -> str:
    answer = complete(http, model)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def on_disk(house: House) -> set[str]:
    """Everything below the blob store's root that is a file or a link."""
    root = house.settings.blobs
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_symlink() or not path.is_dir()}


def blob_of(house: House, key: str, sha256: str) -> Path:
    return house.settings.blobs / "tenants" / house.tenants[key] / sha256


def tiers(http: httpx.Client, name: str = "a") -> list[list[str]]:
    """Of each version, the tiers of the one engine."""
    versions = http.get(f"/adapters/{name}").json()["versions"]
    return [next(replica["tiers"] for replica in version["residency"]) for version in versions]


@contextlib.contextmanager
def files_bounded_to(num_bytes: int) -> Iterator[None]:
    """This process's disk, and its children's, is as good as full beyond files of that size."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# ── PUT and commit ───────────────────────────────────────────────────────────────────────────────


def test_files_that_were_put_are_published_by_a_commit_as_a_multipart_upload_is(house: House, good: dict[str, bytes]):
    key = house.new_tenant("puts")
    with house.http(key) as http:
        sent = send(http, good)
        answer = commit(http, expected_version=0)
        again = upload(http, good, name="b").json()
        text = text_of(http, "a") == text_of(http, "b")

    assert [response.status_code for response in sent] == [200, 200]
    for response, content in zip(sent, good.values(), strict=True):
        body = response.json()
        assert (body["size_bytes"], body["sha256"]) == (len(content), hashlib.sha256(content).hexdigest())
        assert body["expires_at"] > time.time()
    assert answer.status_code == 201
    own = ("id", "name", "created_at")
    assert {k: v for k, v in answer.json().items() if k not in own} == {k: v for k, v in again.items() if k not in own}
    assert text
    assert not [path for path in on_disk(house) if path.startswith(("staging", "uploads"))]


def test_a_commit_that_may_be_tried_again_keeps_its_files_and_one_that_may_not_takes_them(house: House, good, other):
    key = house.new_tenant("retries")
    with house.http(key) as http:
        send(http, good)
        assert commit(http).status_code == 201
        send(http, other)
        conflict = commit(http, expected_version=0)
        unknown = commit(http, base_model="nope")
        second = commit(http, expected_version=1)
        nothing = commit(http)
        send(http, good | {CONFIG: b"{}"})
        refused = commit(http)
        after = commit(http)

    assert (conflict.status_code, conflict.json()["error"]["code"]) == (409, "version_conflict")
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "base_model")
    assert (second.status_code, second.json()["version"]) == (201, 2)
    assert (nothing.status_code, nothing.json()["error"]["param"]) == (400, WEIGHTS)
    assert (refused.status_code, refused.json()["error"]["code"]) == (422, "invalid_adapter")
    assert after.status_code == 400
    assert not [path for path in on_disk(house) if path.startswith(("staging", "uploads"))]


def test_staged_files_are_the_tenants_own_and_bounded_in_number(house: House, good: dict[str, bytes]):
    key, stranger = house.new_tenant("stager"), house.new_tenant("staged-elsewhere")
    with house.http(key) as http, house.http(stranger) as theirs:
        for number in range(MAX_STAGED_ADAPTERS):
            assert send(http, good, f"s{number}")[0].status_code == 200
        too_many = send(http, good, "one-more")[0]
        replaced = send(http, good, "s0")
        foreign = commit(theirs, "s0")
        published = commit(http, "s0")
        room = send(http, good, "one-more")
        for name in ("s1", "s2", "s3", "one-more"):
            commit(http, name)

    assert (too_many.status_code, too_many.json()["error"]["code"]) == (409, "limit_reached")
    assert [response.status_code for response in (*replaced, *room)] == [200] * 4
    assert foreign.status_code == 400
    assert published.status_code == 201


def test_only_an_adapters_two_files_and_only_under_its_grammar_are_taken(house: House, key: str):
    before = on_disk(house)
    with house.http(key) as http:
        paths = (
            "/adapters/a/files/adapter_model.bin",
            "/adapters/.a/files/" + CONFIG,
            "/adapters/tiny/files/" + CONFIG,
        )
        answers = [http.put(path, content=b"{}") for path in paths]
        escapes = [
            http.put(f"/adapters/{name}/files/{CONFIG}", content=b"{}") for name in ("..%2fb", "a%2fb", "%2e%2e")
        ]
        large = http.put(f"/adapters/a/files/{CONFIG}", content=bytes(2 << 20))

    assert [answer.status_code for answer in answers] == [404, 400, 409]
    assert all(400 <= answer.status_code < 500 for answer in escapes)
    assert (large.status_code, large.json()["error"]["code"]) == (413, "payload_too_large")
    assert on_disk(house) == before


# ── before the rest is read ──────────────────────────────────────────────────────────────────────


def half_sent(house: House, key: str, first_bytes: bytes, length: int = 100_000_000) -> socket.socket:
    """A PUT of weights that says it is long and then waits."""
    stream = socket.create_connection(("127.0.0.1", house.port), timeout=60)
    head = f"PUT /v1/adapters/half/files/{WEIGHTS} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
    stream.sendall(head.encode() + f"content-length: {length}\r\n\r\n".encode() + first_bytes)
    return stream


def with_length(header: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header


BAD_BEGINNINGS = {
    "no JSON": with_length(b"x" * 100),
    "a header as long as the file": struct.pack("<Q", 99_999_999) + b"{",
    "a path as a name": with_length(b'{"../x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'),
    "tensors beyond the file": with_length(b'{"x":{"dtype":"F32","shape":[1000000000],"data_offsets":[0,4000000000]}}'),
}


@pytest.mark.parametrize("what", BAD_BEGINNINGS)
def test_a_bad_header_is_refused_before_the_rest_has_come(house: House, key: str, what: str):
    before = on_disk(house)
    with half_sent(house, key, BAD_BEGINNINGS[what] + bytes(2 << 20)) as stream:
        answer = b""
        while not answer.endswith(b"}}"):
            answer += stream.recv(65536)

    assert answer.startswith(b"HTTP/1.1 422")
    assert b"safetensors: " in answer
    eventually(lambda: on_disk(house) == before)


def test_a_tenants_uploads_at_one_time_are_bounded_and_others_are_not_kept_waiting(house: House, good):
    key, bystander = house.new_tenant("eager"), house.new_tenant("bystander")
    with contextlib.ExitStack() as stack, house.http(key) as http, house.http(bystander) as theirs:
        slow = [stack.enter_context(half_sent(house, key, b"x" * 100)) for _ in range(MAX_UPLOADS_AT_ONCE)]
        eventually(lambda: http.put(f"/adapters/a/files/{CONFIG}", content=b"").status_code == 429)  # all have come
        refused = upload(http, good)
        served = upload(theirs, good)
        for stream in slow:
            stream.close()
        later = eventually(lambda: (found := upload(http, good)).status_code == 201 and found)

    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert int(refused.headers["retry-after"]) >= 1
    assert (served.status_code, later.json()["version"]) == (201, 1)
    eventually(lambda: not [path for path in on_disk(house) if path.startswith("staging")])


# ── hostile files (case 8) ───────────────────────────────────────────────────────────────────────


class _Marker:
    """What a pickle of it does when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def an_archive() -> bytes:
    """Members outside, absolute, a link out, many small ones, and one whose declared size no disk has."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name in ("../../x", "/tmp/x", *(f"t/{number}" for number in range(2_000))):
            archive.addfile(tarfile.TarInfo(name), io.BytesIO())
        link = tarfile.TarInfo("adapter_config.json")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    huge = tarfile.TarInfo(WEIGHTS)
    huge.size = 1 << 40
    return file.getvalue() + huge.tobuf()


def test_pickles_and_archives_are_refused_in_every_place_and_leave_no_trace(house: House, key: str, good, tmp_path):
    marker = tmp_path / "marker"
    hostile = {"pickle": pickle.dumps(_Marker(marker)), "archive": an_archive()}
    folder = house.settings.home
    before = on_disk(house), sorted(os.listdir(folder)), sorted(os.listdir(folder.parent))
    with house.http(key) as http:
        answers = [upload(http, good | {place: content}) for place in FILES for content in hostile.values()]
        for extra in ("adapter_model.bin", "adapter.tar", "../../x", "/tmp/x"):
            answers += [upload(http, good | {extra: content}) for content in hostile.values()]
        many = http.post("/adapters", data={"name": "a"}, files=[("file", (f"f{n}", b"")) for n in range(10_000)])
        for content in hostile.values():
            answers += [*send(http, {WEIGHTS: content, CONFIG: content[:1000]}), commit(http)]
        served = complete(http, "tiny")

    refused = [answer for answer in answers if answer.request.method == "POST"]
    assert {answer.status_code for answer in refused} == {422}
    assert all(answer.json()["error"]["reasons"] for answer in refused)
    assert many.status_code in (400, 422)
    assert served.status_code == 200
    assert not marker.exists()
    assert (on_disk(house), sorted(os.listdir(folder)), sorted(os.listdir(folder.parent))) == before


# ── a full disk ──────────────────────────────────────────────────────────────────────────────────


def test_a_full_blob_store_is_507_for_uploads_and_inference_goes_on(house: House, good: dict[str, bytes], tmp_path):
    key = house.new_tenant("full-disk")
    large = write_peft_dir(tmp_path, tiny_adapter(13, rank=16))
    limit = (large / WEIGHTS).stat().st_size - 4096  # the canonical file is over it, and so is what comes
    size = (8 << 20) + limit
    header = b'{"x":{"dtype":"F32","shape":[%d],"data_offsets":[0,%d]}}' % (size // 4, size // 4 * 4)
    sound = struct.pack("<Q", len(header)) + header + bytes(size // 4 * 4)
    with house.http(key) as http:
        assert upload(http, good).status_code == 201
        before = on_disk(house)
        with files_bounded_to(8 << 20):
            put = http.put(f"/adapters/b/files/{WEIGHTS}", content=sound)
            posted = upload(http, good | {WEIGHTS: sound}, name="b")
            served = complete(http, "a")
        left = on_disk(house)
        later = upload(http, files_of(large), name="b")

    assert [(answer.status_code, answer.json()["error"]["code"]) for answer in (put, posted)] == [
        (507, "storage_full")
    ] * 2
    assert served.status_code == 200
    assert left == before
    assert later.status_code == 201


# ── damage ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("damage", ["changed", "shorter", "gone"])
def test_a_damaged_adapter_is_409_until_it_is_uploaded_again_and_others_are_served(house: House, good, other, damage):
    key = house.new_tenant(f"damaged-{damage}")
    with house.http(key) as http:
        blob = blob_of(house, key, upload(http, good).json()["sha256"])
        upload(http, other, name="b")
        content = blob.read_bytes()
        if damage == "gone":
            blob.unlink()
        else:
            blob.write_bytes(content[:-100] if damage == "shorter" else content[:-1] + bytes([content[-1] ^ 1]))
        answer = complete(http, "a")
        served = [complete(http, model).status_code for model in ("b", "tiny")]
        repaired = upload(http, good)
        text = text_of(http, "a")

    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "adapter_corrupt")
    assert answer.headers["x-should-retry"] == "false"
    assert served == [200, 200]
    assert (repaired.json()["version"], blob.read_bytes() == content, bool(text)) == (2, True, True)


# ── residency, deletion, and what is whose ───────────────────────────────────────────────────────


def engine_files(house: House) -> int:
    return len(list((house.engine.folder / "adapters").iterdir()))


def test_residency_is_shown_by_version_and_replica_and_ends_with_the_deletion(house: House, good, other):
    key = house.new_tenant("resident")
    with house.http(key) as http:
        upload(http, good)
        upload(http, other)
        unused = tiers(http)
        text_of(http, "a@1")
        used, shown = tiers(http), http.get("/adapters/a").json()["versions"][0]["residency"]
        files, blobs = engine_files(house), len(list(blob_of(house, key, "x").parent.iterdir()))
        current = http.delete("/adapters/a@2")
        absent = [http.delete(f"/adapters/{name}").status_code for name in ("a@9", "a@x", "a@", "b@1")]
        first = http.delete("/adapters/a@1")
        again = http.delete("/adapters/a@1")
        gone = complete(http, "a@1")
        left = tiers(http)
        text_of(http, "a")

    assert (unused, used, left) == ([[], []], [["device", "cpu", "disk"], []], [[]])
    assert [replica["replica"] for replica in shown] == ["engine-0"]
    assert (current.status_code, current.json()["error"]["code"]) == (409, "version_conflict")
    assert absent == [404] * 4
    assert (first.status_code, first.json()) == (200, {"id": "a@1", "object": "adapter", "deleted": True})
    assert (again.status_code, gone.status_code) == (404, 404)
    assert (blobs, len(list(blob_of(house, key, "x").parent.iterdir()))) == (2, 1)
    eventually(lambda: engine_files(house) == files)  # one version's file for the other's


def test_equal_bytes_of_two_tenants_share_no_file_no_tier_no_bill_and_no_deletion(house: House, good):
    keys = [house.new_tenant("twin-one"), house.new_tenant("twin-two")]
    with house.http(keys[0]) as one, house.http(keys[1]) as two:
        files = engine_files(house)
        shas = {upload(http, good).json()["sha256"] for http in (one, two)}
        first = complete(one, "a")
        before = tiers(two)
        second = complete(two, "a")
        copies = engine_files(house) - files
        bills = [
            house.receipt(key, answer.headers["x-request-id"])
            for key, answer in zip(keys, (first, second), strict=True)
        ]
        one.delete("/adapters/a")
        after, third = tiers(two), complete(two, "a")

    assert len(shas) == 1
    assert first.json()["choices"][0]["text"] == second.json()["choices"][0]["text"]
    assert (before, copies) == ([[]], 2)
    assert [answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in (first, second)] == [0, 0]
    assert bills[0]["price"] == bills[1]["price"] != 0
    assert after == [["device", "cpu", "disk"]]
    assert third.status_code == 200
    assert [blob_of(house, key, *shas).exists() for key in keys] == [False, True]


def test_a_running_stream_of_a_deleted_adapter_ends_as_it_would_have_and_new_requests_are_404(house: House, good):
    key = house.new_tenant("drains")
    with house.http(key) as http:
        upload(http, good)
        whole = complete(http, "a", 120).json()["choices"][0]["text"]
        body = {"model": "a", "prompt": PROMPT, "max_tokens": 120, "temperature": 0, "ignore_eos": True, "stream": True}
        with http.stream("POST", "/completions", json=body) as stream, house.http(key) as aside:
            lines = stream.iter_lines()
            seen = [next(lines)]
            deleted = aside.delete("/adapters/a")
            gone = complete(aside, "a")
            seen += list(lines)
        eventually(lambda: residents(house).isdisjoint({adapter_key(house, key, good)}))

    assert (deleted.status_code, gone.status_code) == (200, 404)
    assert "data: [DONE]" in seen
    assert text_in(seen) == whole


def text_in(lines: list[str]) -> str:
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return "".join(choice["text"] for event in events for choice in event["choices"])


def residents(house: House) -> set[str]:
    async def ask() -> set[str]:
        return set(await house.parts.catalog.models["tiny"].engines[0].residency(timeout_s=20))

    return house.on_loop(ask())


def adapter_key(house: House, key: str, files: dict[str, bytes]) -> str:
    """Of the version that these files make, uploaded once more under another name."""
    with house.http(key) as http:
        sha256 = upload(http, files, name="twin").json()["sha256"]
    return house.parts.targets.key_of(house.tenants[key], sha256)


# ── after a crash ────────────────────────────────────────────────────────────────────────────────


def age(path: Path, seconds: float = 7200) -> None:
    os.utime(path, (time.time() - seconds,) * 2, follow_symlinks=False)


def test_what_a_crash_left_is_collected_and_what_is_in_use_or_young_is_not(house: House, good: dict[str, bytes]):
    key = house.new_tenant("crashed")
    with house.http(key) as http:
        live = blob_of(house, key, upload(http, good).json()["sha256"])
        send(http, {CONFIG: b"{}"}, "forgotten")
    orphan, young = live.with_name("ab" * 32), live.with_name("cd" * 32)
    stranger = house.settings.blobs / "tenants" / ("ten_" + "0" * 24) / ("ef" * 32)
    staged = house.settings.blobs / "staging" / "half"
    claimed = house.settings.blobs / "staging" / "claimed"
    waiting = house.settings.blobs / "uploads" / house.tenants[key] / "forgotten"
    stranger.parent.mkdir()
    claimed.mkdir()
    for path in (orphan, young, stranger, staged, claimed / "file"):
        path.write_bytes(b"x")
    for path in (live, orphan, stranger, staged, claimed, waiting):
        age(path)

    house.on_loop(AdapterSweep(house.parts.adapters, house.parts.uploads).sweep())

    there = [path.exists() for path in (live, young, orphan, stranger, staged, claimed, waiting)]
    assert there == [True, True, False, False, False, False, False]
    young.unlink()


def test_an_engine_that_missed_a_deletion_is_told_by_the_sweep(house: House, good: dict[str, bytes]):
    key = house.new_tenant("missed")

    async def delete_elsewhere() -> None:
        async with house.parts.database.transaction() as session:
            await AdapterRepository(session).delete(house.tenants[key], "a")

    with house.http(key) as http:
        version = upload(http, good).json()
        text_of(http, "a")
    adapter = house.parts.targets.key_of(house.tenants[key], version["sha256"])
    assert adapter in residents(house)
    house.on_loop(delete_elsewhere())

    house.on_loop(AdapterSweep(house.parts.adapters, house.parts.uploads).sweep())

    eventually(lambda: adapter not in residents(house))
