"""``python -m engine`` as a process: it serves, drains on SIGTERM, keeps its journal, and outlives no parent."""

import asyncio
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from live_engine import PATIENCE_S, collect, first_delta, live_client, live_gateway, socket_of, submit, until
from tiny import tiny_config, write_hf_dir

from engine import wire
from engine.client import EngineLost

MODEL = tiny_config(context_tokens=4096)
LONG = 4000  # tokens, for what is to end before they are made


def command(folder: Path, model: Path) -> list[str]:
    options = {"--socket": socket_of(folder), "--model": f"tiny={model}", "--dir": folder / "engine"}
    flat = [str(part) for pair in options.items() for part in pair]
    sizes = ["--threads", "1", "--kv-blocks", "256", "--adapter-memory", "100000", "--adapter-disk", "100000"]
    return [sys.executable, "-m", "engine", *flat, *sizes, "--engine-id", "e7"]


@contextmanager
def engine_process(folder: Path):
    model = folder / "model"
    if not model.exists():
        write_hf_dir(model, config=MODEL)
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(command(folder, model), stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line == "engine ready e7\n", (folder / "log").read_text()
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_process_serves_drains_on_sigterm_and_leaves_nothing_running(tmp_path):
    async def main(process):
        async with live_gateway(tmp_path, want_tokenizer=True) as (client, ledger):
            welcome = client.welcome
            assert (welcome.engine_id, welcome.card.model, welcome.card.num_blocks) == ("e7", "tiny", 256)
            assert welcome.tokenizer.tokenizer_json.startswith("{")
            stream = client.submit(submit("r1", max_tokens=100))
            await first_delta(stream)
            process.send_signal(signal.SIGTERM)
            _, finished = await collect(stream)
            assert finished.usage.output_tokens == 100
            stream.close(wire.Close("r1", 200))
            assert (await ledger.next())[1].outcome == 200
            assert await asyncio.to_thread(process.wait, PATIENCE_S) == 0

    with engine_process(tmp_path) as process:
        asyncio.run(main(process))
        assert not psutil.pid_exists(process.pid)
        assert not socket_of(tmp_path).exists()
    log = (tmp_path / "log").read_text()
    assert "draining 1 requests" in log
    assert "Traceback" not in log


def test_a_killed_process_has_its_closed_requests_in_the_journal_of_the_next(tmp_path):
    async def run_and_kill(process):
        async with live_gateway(tmp_path, acks=False) as (client, ledger):
            stream = client.submit(submit("r1"))
            await collect(stream)
            stream.close(wire.Close("r1", 200))
            await ledger.next()
            running = client.submit(submit("r2", max_tokens=LONG))
            await first_delta(running)
            process.kill()
            with pytest.raises(EngineLost):
                await collect(running)

    async def next_life():
        async with live_gateway(tmp_path) as (client, ledger):
            record, usage = await ledger.next()
            assert (record.number, usage.request_id, usage.outcome) == (1, "r1", 200)
            tokens, _ = await collect(client.submit(submit("r2")))
            assert len(tokens) == 8

    with engine_process(tmp_path) as process:
        asyncio.run(run_and_kill(process))
    with engine_process(tmp_path):
        asyncio.run(next_life())


ORPHANING = """
import signal, subprocess, sys
signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup has it: what is ignored is inherited
child = subprocess.Popen(sys.argv[1:])
print(child.pid, flush=True)
child.wait()
"""


def test_a_process_ends_when_its_parent_is_killed_also_where_hangups_are_ignored(tmp_path):
    write_hf_dir(tmp_path / "model", config=MODEL)
    argv = [sys.executable, "-c", ORPHANING, *command(tmp_path, tmp_path / "model")]
    parent = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))

    async def stream_and_orphan():
        async with live_client(tmp_path) as client:
            stream = client.submit(submit("r1", max_tokens=LONG))
            await first_delta(stream)
            parent.kill()
            parent.wait()
            await until(lambda: not client.connected, "the engine's end")

    assert parent.stdout.readline() == "engine ready e7\n"
    asyncio.run(stream_and_orphan())
    parent.stdout.close()
    deadline = time.monotonic() + PATIENCE_S
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the engine outlived its parent"
        time.sleep(0.01)


@pytest.mark.parametrize(
    "change",
    [("--model", "nameless"), ("--device", "abacus"), ("--block-size", "many")],
    ids=lambda change: change[0],
)
def test_bad_options_are_refused_with_status_two(tmp_path, change):
    argv = [*command(tmp_path, tmp_path), *change]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert change[0] in done.stderr


def test_a_model_that_cannot_be_served_ends_the_process_with_its_reason(tmp_path):
    (tmp_path / "model").mkdir()
    done = subprocess.run(command(tmp_path, tmp_path / "model"), capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "engine e7 ends" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
