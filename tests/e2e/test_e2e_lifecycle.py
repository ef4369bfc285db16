"""Start, stop, start again: what stays, what ends, what is not made."""

import json
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from tests.served import ROOT, Served, eventually, start

BODY = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0}


def tiny(home, model_dir, *options: str) -> Served:
    return start(home, "--model", f"tiny={model_dir}", "--context", "512", "--demo", *options)


def test_a_second_start_keeps_keys_receipts_and_secrets(tmp_path, model_dir):
    served = tiny(tmp_path / "home", model_dir)
    before = served.credentials
    with served.http() as http:
        request_id = http.post("/completions", json=BODY).headers["x-request-id"]
        eventually(lambda: http.get(f"/requests/{request_id}").status_code == 200)
    assert served.stop() == 0

    again = tiny(tmp_path / "home", model_dir)
    try:
        assert again.credentials == before
        with again.http() as http:
            assert http.get(f"/requests/{request_id}").json()["status"] == 200
            assert http.post("/completions", json=BODY).status_code == 200
    finally:
        assert again.stop() == 0


def test_files_with_secrets_are_the_owners_alone(tmp_path_factory, model_dir):
    served = tiny(tmp_path_factory.mktemp("h"), model_dir)  # short: where sockets fit, they stand in the home
    try:
        for name in ("credentials.json", "secrets.json"):
            assert stat.S_IMODE((served.home / name).stat().st_mode) == 0o600
        assert stat.S_IMODE((served.home / "run").stat().st_mode) == 0o700
    finally:
        assert served.stop() == 0


def test_sigterm_lets_a_running_stream_finish_and_refuses_what_is_new(tmp_path, model_dir):
    served = tiny(tmp_path / "home", model_dir)
    lines: list[str] = []
    begun = threading.Event()

    def stream() -> None:
        body = BODY | {"max_tokens": 450, "stream": True, "ignore_eos": True}
        with served.http() as http, http.stream("POST", "/completions", json=body) as response:
            for line in response.iter_lines():
                lines.append(line)
                begun.set()

    reader = threading.Thread(target=stream)
    reader.start()
    assert begun.wait(30)
    served.process.send_signal(signal.SIGTERM)
    eventually(lambda: _not_ready(served))
    reader.join(60)

    assert lines[-2:] == ["data: [DONE]", ""] or lines[-1] == "data: [DONE]"
    assert served.stop() == 0


def _not_ready(served: Served) -> bool:
    try:
        return httpx.get(f"{served.ops_url}/readyz").status_code == 503
    except httpx.ConnectError:
        return True


def test_there_is_no_demo_when_the_host_is_not_loopback(tmp_path, model_dir):
    served = start(tmp_path / "home", "--model", f"tiny={model_dir}", "--host", "0.0.0.0")
    try:
        assert served.credentials.get("tenants", {}) == {}
        assert not [line for line in served.lines if "tn_live_" in line]
        with served.ops() as ops:
            assert ops.get("/tenants").json()["data"] == []
    finally:
        assert served.stop() == 0


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
    answer = subprocess.run(["./run", *command, *home], cwd=ROOT, capture_output=True, text=True, timeout=60)

    assert answer.returncode != 0
    assert word in answer.stderr
    assert "Traceback" not in answer.stderr


def test_the_cli_makes_a_tenant_and_a_key_that_works(tmp_path, model_dir):
    served = tiny(tmp_path / "home", model_dir)

    def cli(*words: str) -> dict:
        tenora = str(Path(sys.executable).with_name("tenora"))
        command = [tenora, *words, "--json", "--home", str(served.home), "--ops-url", served.ops_url]
        answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert answer.returncode == 0, answer.stderr
        return json.loads(answer.stdout)

    try:
        tenant = cli("tenant", "create", "globex")
        cli("tenant", "set", "globex", "requests_per_minute=600")
        key = cli("key", "create", "globex", "--name", "production")
        assert tenant["name"] == "globex"

        def works() -> bool:
            with served.http(key["api_key"]) as http:
                return http.post("/completions", json=BODY).status_code == 200

        eventually(works)
    finally:
        assert served.stop() == 0
