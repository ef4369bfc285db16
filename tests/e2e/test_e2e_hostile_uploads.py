"""Uploads that mean harm (case 8): a 4xx each, no marker, and the same files before and after."""

import io
import pickle
import random
import struct
import tarfile
import zipfile
from pathlib import Path

import httpx
import pytest

from tests.adapter_calls import FILES, generate, prompt_of
from tests.served import ROOT, Served
from tests.tiny import tiny_adapter, write_peft_dir

Files = dict[str, bytes]


@pytest.fixture(scope="module")
def key(tiny: Served) -> str:
    return tiny.new_tenant("hostile")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Files:
    path = write_peft_dir(tmp_path_factory.mktemp("good"), tiny_adapter(1))
    return {name: (path / name).read_bytes() for name in FILES}


def files_of(served: Served) -> set[str]:
    """Every path of the home but the database's own, and what lies beside the home and in the working directory."""
    home = {str(path) for path in served.home.rglob("*") if not path.name.startswith(("tenora.db", "journal"))}
    around = {str(path) for folder in (served.home.parent, ROOT) for path in folder.iterdir()}
    return home | around


def post(http: httpx.Client, files: Files, name: str = "hostile") -> httpx.Response:
    return http.post("/adapters", data={"name": name, "base_model": "tiny"}, files=files)


class Marker:
    """Unpickled, it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.mkdir, (self.path,)


def zipped(*members: str, content: bytes = b"x") -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        for member in members:
            archive.writestr(member, content)
    return data.getvalue()


def tar_of(**fields) -> bytes:
    """One member that is a link, a device, or larger than it is."""
    data = io.BytesIO()
    member = tarfile.TarInfo("adapter_model.safetensors")
    for field, value in fields.items():
        setattr(member, field, value)
    data.write(member.tobuf())
    return data.getvalue() + bytes(1024)


def archives(outside: Path) -> dict[str, bytes]:
    return {
        "climbing": zipped("../../x", "../../../../x"),
        "absolute": zipped(str(outside)),
        "link": tar_of(type=tarfile.SYMTYPE, linkname="/etc/passwd"),
        "10,000 files": zipped(*(f"f{index}" for index in range(10_000))),
        "huge member": tar_of(size=1 << 40),
        "bomb": zipped("adapter_model.safetensors", content=bytes(20 << 20)),
    }


ARCHIVES = list(archives(Path("/")))
HEADERS = {
    "longer than the file": struct.pack("<Q", 1 << 40) + b"{}",
    "as long as can be": struct.pack("<Q", 2**64 - 1) + b"{}",
    "of a file of 8 bytes": struct.pack("<Q", 0),
    "deep": struct.pack("<Q", 200_000) + b"[" * 200_000,
    "random": random.Random(8).randbytes(4096),
    "nothing at all": b"",
}


@pytest.mark.parametrize(
    "as_part", ["adapter_model.safetensors", "adapter.zip", "adapter_model.bin", "../../x", "file"]
)
@pytest.mark.parametrize("kind", ARCHIVES)
def test_an_archive_is_refused_whatever_it_calls_itself(
    tiny: Served, key: str, good: Files, tmp_path: Path, kind: str, as_part: str
):
    outside = tmp_path / "outside"
    before = files_of(tiny)
    with tiny.http(key) as http:
        answer = post(http, {"adapter_config.json": good["adapter_config.json"], as_part: archives(outside)[kind]})

    assert answer.status_code in (400, 413, 422), answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert not outside.exists()
    assert files_of(tiny) == before


@pytest.mark.parametrize("as_part", ["adapter_model.safetensors", "adapter_model.bin", "adapter_config.json"])
def test_a_pickle_is_never_loaded(tiny: Served, key: str, good: Files, tmp_path: Path, as_part: str):
    marker = tmp_path / "marker"
    content = pickle.dumps(Marker(marker))
    pickle.loads(content)
    assert marker.is_dir()
    marker.rmdir()
    before = files_of(tiny)

    with tiny.http(key) as http:
        answers = [post(http, good | {as_part: content}), post(http, {as_part: content})]

    assert {answer.status_code for answer in answers} <= {400, 422}
    assert not marker.exists()
    assert files_of(tiny) == before


@pytest.mark.parametrize("kind", HEADERS)
def test_a_broken_header_is_refused_and_the_engine_answers(tiny: Served, key: str, good: Files, kind: str):
    before, engines = files_of(tiny), [engine.pid for engine in tiny.engines()]
    with tiny.http(key) as http:
        answer = post(http, good | {"adapter_model.safetensors": HEADERS[kind]})
        assert len(generate(http, "tiny", prompt_of(5))[1]) == 16

    assert answer.status_code in (400, 422), answer.text
    assert files_of(tiny) == before
    assert [engine.pid for engine in tiny.engines()] == engines


@pytest.mark.parametrize(
    "name", ["../b", "a/b", "", "x" * 300, "a%2fb", "a%2Fb", "..", ".", "a\0b", "a\\b", "con:", "é"]
)
def test_a_name_that_is_a_path_is_refused(tiny: Served, key: str, good: Files, name: str):
    before = files_of(tiny)
    with tiny.http(key) as http:
        answer = post(http, good, name)

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "name"), answer.text
    assert files_of(tiny) == before


def test_a_good_upload_is_one_file_in_its_tenants_folder_and_its_deletion_leaves_none(
    tiny: Served, key: str, good: Files
):
    before = files_of(tiny)
    with tiny.http(key) as http:
        answer = post(http, good, "good")
        added = {Path(path) for path in files_of(tiny) - before}
        assert http.delete("/adapters/good").status_code == 200

    assert answer.status_code == 201
    (blob,) = (path for path in added if path.is_file() or not path.exists())
    assert blob.name == answer.json()["sha256"]
    assert blob.parents[1].name == "tenants"
    assert added - {blob} <= {blob.parent}
    assert files_of(tiny) - before <= {str(blob.parent)}
