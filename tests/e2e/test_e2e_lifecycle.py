"""Start, stop, start again: what stays, what ends, what is not made."""

import json
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest

from tests import plain
from tests.served import PATIENCE_S, ROOT, Served, eventually, serving, start
from tests.tiny import tiny_adapter, write_peft_dir
from tests.uploads import upload

BODY = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 16, "temperature": 0, "ignore_eos": True}
LONG = BODY | {"max_tokens": 450, "stream": True}
OPTIONS = ("--dtype", "float32", "--context", "512", "--block-size", "4", "--kv-blocks", "256")
OPTIONS += ("--adapter-slots", "2", "--demo", "--drain-seconds", "600")


@dataclass
class FirstLife:
    """What a home had before it was stopped, and how it ended."""

    credentials: dict
    request_id: str = ""
    adapters_key: str = ""
    texts: dict[str, str] = field(default_factory=dict)  # of adapters, by name
    last_lines: list[str] = field(default_factory=list)  # of a stream that ran at SIGTERM
    exit_code: int = -1


@pytest.fixture(scope="module")
def lives(tmp_path_factory, model_dir: Path) -> Iterator[tuple[FirstLife, Served]]:
    """A home's first life, and its second, which runs; between them some of its adapters' files were damaged."""
    folder = tmp_path_factory.mktemp("h")  # short: where sockets fit, they stand in the home
    first = start(folder / "h", "--model", f"tiny={model_dir}", *OPTIONS)
    life = FirstLife(first.credentials)
    with first.http() as http:
        life.request_id = http.post("/completions", json=BODY).headers["x-request-id"]
        eventually(lambda: http.get(f"/requests/{life.request_id}").status_code == 200)
    shas = _upload_three(first, life, folder)
    life.last_lines = _stop_while_it_streams(first)
    life.exit_code = first.stop()
    _damage(first.home, shas)
    with serving(folder / "h", "--model", f"tiny={model_dir}", *OPTIONS) as second:
        yield life, second


def _upload_three(served: Served, life: FirstLife, folder: Path) -> dict[str, str]:
    """Their sha256, by name."""
    life.adapters_key = served.new_tenant("restarted")
    shas = {}
    with served.http(life.adapters_key) as http:
        for name, seed in (("kept", 30), ("torn", 31), ("lost", 32)):
            shas[name] = upload(http, name, write_peft_dir(folder / name, tiny_adapter(seed))).json()["sha256"]
        life.texts = {name: _text(http, name) for name in ("kept", "torn")}
    return shas


def _text(http: httpx.Client, model: str) -> str:
    answer = http.post("/completions", json=BODY | {"model": model})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def _stop_while_it_streams(served: Served) -> list[str]:
    """The last lines of the stream."""
    lines: list[str] = []
    begun = threading.Event()

    def stream() -> None:
        with served.http() as http, http.stream("POST", "/completions", json=LONG) as response:
            for line in response.iter_lines():
                lines.append(line)
                begun.set()

    reader = threading.Thread(target=stream)
    reader.start()
    assert begun.wait(PATIENCE_S)
    served.process.send_signal(signal.SIGTERM)
    eventually(lambda: _not_ready(served))
    reader.join(300)
    return lines[-2:]


def _not_ready(served: Served) -> bool:
    try:
        return plain.get(f"{served.ops_url}/readyz").status_code == 503
    except httpx.ConnectError:
        return True


def _damage(home: Path, shas: dict[str, str]) -> None:
    """In the blob store, and in the engine's disk tier."""
    [folder] = [path for path in (home / "blobs" / "tenants").iterdir() if (path / shas["lost"]).exists()]
    (folder / shas["lost"]).write_bytes(b"not an adapter")
    [tier] = (home / "engines").glob("*/adapters")
    [torn] = tier.glob(f"*{shas['torn']}*")
    torn.write_bytes(torn.read_bytes()[:-7])
    (tier / f"nobody.{'0' * 64}.tnr").symlink_to("/nonexistent")
    (tier / "half.part").write_bytes(b"x")


def test_sigterm_lets_a_running_stream_finish_and_refuses_what_is_new(lives):
    life, _ = lives

    assert life.last_lines[-1] == "data: [DONE]" or life.last_lines == ["data: [DONE]", ""]
    assert life.exit_code == 0


def test_a_second_start_keeps_keys_receipts_and_secrets(lives):
    life, second = lives

    assert second.credentials == life.credentials
    with second.http() as http:
        assert http.get(f"/requests/{life.request_id}").json()["status"] == 200
        assert http.post("/completions", json=BODY).status_code == 200


def test_bad_entries_where_adapters_lie_stop_no_start_and_no_other_adapter(lives):
    """Case 4: damage is found by the request that needs what was damaged."""
    life, second = lives
    with second.http(life.adapters_key) as http:
        after = {name: _text(http, name) for name in life.texts}
        lost = http.post("/completions", json=BODY | {"model": "lost"})

    assert after == life.texts
    assert (lost.status_code, lost.json()["error"]["code"]) == (409, "adapter_corrupt")


def test_files_with_secrets_are_the_owners_alone(lives):
    _, second = lives
    for name in ("credentials.json", "secrets.json"):
        assert stat.S_IMODE((second.home / name).stat().st_mode) == 0o600
    assert stat.S_IMODE((second.home / "run").stat().st_mode) == 0o700


def test_the_cli_makes_a_tenant_and_a_key_that_works(lives):
    _, served = lives

    def cli(*words: str) -> dict:
        command = [sys.executable, "-m", "gateway.cli", *words, "--json"]
        command += ["--home", str(served.home), "--ops-url", served.ops_url]
        answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert answer.returncode == 0, answer.stderr
        return json.loads(answer.stdout)

    tenant = cli("tenant", "create", "globex")
    cli("tenant", "set", "globex", "requests_per_minute=600")
    key = cli("key", "create", "globex", "--name", "production")
    assert tenant["name"] == "globex"

    def works() -> bool:
        with served.http(key["api_key"]) as http:
            return http.post("/completions", json=BODY).status_code == 200

    eventually(works)


# ── where others can reach it ────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def reachable(tmp_path_factory, model_dir: Path) -> Iterator[Served]:
    home = tmp_path_factory.mktemp("reachable")
    with serving(home, "--model", f"tiny={model_dir}", "--host", "0.0.0.0") as served:
        yield served


def test_there_is_no_demo_when_the_host_is_not_loopback(reachable: Served):
    assert reachable.credentials.get("tenants", {}) == {}
    assert not [line for line in reachable.lines if "tn_live_" in line]
    with reachable.ops() as ops:
        assert ops.get("/tenants").json()["data"] == []


def test_no_process_outlives_a_killed_supervisor(reachable: Served):
    """The last test of this installation."""
    family = psutil.Process(reachable.process.pid).children(recursive=True)
    assert len(family) >= 3  # valkey, engine, gateway

    reachable.process.kill()
    reachable.process.wait(PATIENCE_S)
    reachable.forget()
    _, alive = psutil.wait_procs(family, timeout=PATIENCE_S)

    for process in alive:
        process.kill()
    assert not alive


@pytest.mark.parametrize(
    ("command", "word"),
    [
        (["serve", "--port", "many"], "port"),
        (["serve", "--model", "/no/such/model"], "/no/such/model"),
        (["frobnicate"], "frobnicate"),
    ],
)
def test_what_cannot_start_says_why_in_one_line(tmp_path, command, word):
    home = ["--home", str(tmp_path)] if command[0] == "serve" else []
    answer = subprocess.run(["./run", *command, *home], cwd=ROOT, capture_output=True, text=True, timeout=300)

    assert answer.returncode != 0
    assert word in answer.stderr
    assert "Traceback" not in answer.stderr
