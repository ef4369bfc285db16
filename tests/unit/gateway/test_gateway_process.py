"""``python -m gateway.main`` as its parent sees it."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import psutil
import pytest
from gateway_harness import ROOT, House, eventually, stopped

from gateway.serve import scrape
from gateway.settings import Settings
from tests import plain

BODY = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 100, "n": 32, "ignore_eos": True, "stream": True}


@contextlib.contextmanager
def gateway_process(settings: Settings, index: int) -> Iterator[tuple[subprocess.Popen, str]]:
    """A further gateway beside the house's own, on the same stores and engine; it is ready."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        process = subprocess.Popen(
            [sys.executable, "-m", "gateway.main", "--listen-fd", str(listener.fileno()), "--index", str(index)],
            cwd=ROOT, stdout=subprocess.PIPE, text=True, pass_fds=(listener.fileno(),),
            env={**os.environ, **settings.to_env()},
        )  # fmt: skip
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == f"gateway ready {index}\n"
            yield process, f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


@pytest.fixture
def settings(house: House) -> Settings:
    house.settings.run_dir.mkdir(exist_ok=True, mode=0o700)
    return replace(house.settings, drain_seconds=20.0)


def test_it_serves_counts_and_stays_small(house: House, key: str, settings: Settings):
    with gateway_process(settings, 7) as (process, url):
        headers = {"authorization": f"Bearer {key}"}
        body = BODY | {"stream": False, "max_tokens": 2}
        answers = [plain.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60) for _ in range(3)]
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(settings.scrape_path(7)))
            snapshot = b"".join(iter(lambda: connection.recv(65536), b""))
        memory = psutil.Process(process.pid).memory_info().rss

    assert [answer.status_code for answer in answers] == [200] * 3
    families = {family.name: family for family in scrape._decoder.decode(snapshot).families}
    assert sum(sample[2] for sample in families["tenora_requests"].samples) == 3
    assert memory < 120 << 20


def test_sigterm_lets_a_running_stream_finish_and_ends_with_0(house: House, key: str, settings: Settings):
    with gateway_process(settings, 8) as (process, url):
        headers = {"authorization": f"Bearer {key}"}
        text, late = "", []
        with plain.stream("POST", f"{url}/v1/completions", json=BODY, headers=headers) as answer:
            for piece in answer.iter_text():
                if not text:
                    with stopped(house.engine_pid):  # so that it runs for as long as we look
                        process.send_signal(signal.SIGTERM)
                        eventually(lambda: plain.get(f"{url}/health").status_code == 503)
                        late.append(plain.post(f"{url}/v1/completions", json=BODY, headers=headers))
                text += piece
        status = process.wait(60)

    assert text.endswith("data: [DONE]\n\n")
    assert (late[0].status_code, late[0].json()["error"]["code"]) == (503, "draining")
    assert status == 0


def test_it_ends_with_its_parent_also_where_hangups_are_ignored(settings: Settings):
    """The parent is a shell of our own that is killed while the gateway runs; it ignores SIGHUP, as nohup has it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        number = listener.fileno()
        command = f"trap '' HUP; {sys.executable} -m gateway.main --listen-fd {number} --index 9 & echo $!; wait"
        shell = subprocess.Popen(
            ["bash", "-c", command], cwd=ROOT, stdout=subprocess.PIPE, text=True, pass_fds=(number,),
            env={**os.environ, **settings.to_env()},
        )  # fmt: skip
        assert shell.stdout is not None
        gateway = psutil.Process(int(shell.stdout.readline()))
        assert shell.stdout.readline() == "gateway ready 9\n"
        shell.kill()
        shell.wait()
        gone, alive = psutil.wait_procs([gateway], timeout=60)
        shell.stdout.close()

    assert (len(gone), alive) == (1, [])


def test_a_gateway_that_cannot_start_says_why_and_ends_with_1(settings: Settings):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        broken = replace(settings, database_url="sqlite+aiosqlite:////nowhere/at/all.db")
        process = subprocess.run(
            [sys.executable, "-m", "gateway.main", "--listen-fd", str(listener.fileno()), "--index", "3"],
            cwd=ROOT, capture_output=True, text=True, timeout=300, pass_fds=(listener.fileno(),),
            env={**os.environ, **broken.to_env()},
        )  # fmt: skip

    assert process.returncode == 1
    assert "gateway 3 ends" in process.stderr
