"""``./run prove backup``: a copy is taken while streams run, the original goes away, the copy is served: its books
hold, and what the copied database lacked is delivered by the copied journal."""

import random
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from click.testing import CliRunner

from gateway.cli import main
from tests.crashes import CONTEXT, OPTIONS, Stream
from tests.served import Served, eventually, start
from tests.stores import PostgresServer, postgres_server
from tests.tiny import tiny_config, write_hf_dir

pytestmark = pytest.mark.long
NUM_STREAMS = 12


def tenora(*arguments: str) -> str:
    result = CliRunner().invoke(main, list(arguments), standalone_mode=False)
    assert result.exception is None, result.exception
    return result.stdout


def streams_of(served: Served, key: str, label: str, pool: ThreadPoolExecutor) -> list[Stream]:
    """Some end before the copy is taken, some while, some behind it."""
    draw = random.Random(3)
    made = []
    for number in range(NUM_STREAMS):
        body = {"model": "tiny", "prompt": [9, 8, 7 + number], "max_tokens": draw.randrange(5, 300)}
        made.append(Stream(f"{label}-{number}", body | {"ignore_eos": True, "stream": True}))
        pool.submit(made[-1].run, served.url, key)
    assert all(stream.first.wait(60) for stream in made)
    return made


def settled(served: Served) -> bool:
    return not served.metric("tenora_usage_records_unacked") and not served.metric("tenora_engine_open_requests")


def lives_on(home: Path, copy: Path, options: tuple[str, ...], restored: tuple[str, ...], database: list[str]) -> None:
    """Serves ``home``, copies it under load with ``database``'s options of the command, and serves the copy."""
    served = start(home, *options)
    try:
        key = served.new_tenant("kept")
        with ThreadPoolExecutor(NUM_STREAMS) as pool:
            streams = streams_of(served, key, "before", pool)
            tenora("backup", str(copy), "--home", str(home), *database)
        assert all(stream.is_whole for stream in streams)
    finally:
        served.stop()
    shutil.rmtree(home)
    restore_database(copy, restored)
    served = start(copy, *restored)
    try:
        with served.http(key) as http:
            eventually(lambda: http.post("/completions", json=streams[0].body | {"stream": False}).status_code == 200)
        eventually(lambda: settled(served), timeout_s=30)
        audit = ["audit", "--home", str(copy), *(("--database-url", url_of(restored)) if url_of(restored) else ())]
        assert '"ok": true' in tenora(*audit, "--json")
    finally:
        served.stop()


def url_of(options: tuple[str, ...]) -> str:
    return options[options.index("--database-url") + 1] if "--database-url" in options else ""


def restore_database(copy: Path, options: tuple[str, ...]) -> None:
    if url := url_of(options):
        plain = url.replace("+asyncpg", "")
        done = subprocess.run(["pg_restore", f"--dbname={plain}", str(copy / "database.dump")], capture_output=True)
        assert done.returncode == 0, done.stderr


@pytest.fixture
def options(tmp_path: Path) -> tuple[str, ...]:
    model = write_hf_dir(tmp_path / "model", config=tiny_config(context_tokens=CONTEXT))
    return ("--model", f"tiny={model}", *OPTIONS)


def test_a_home_on_sqlite_is_copied_under_load_and_lives_on(tmp_path: Path, options: tuple[str, ...]):
    lives_on(tmp_path / "home", tmp_path / "copy", options, options, [])


def test_a_home_on_postgresql_is_copied_under_load_and_lives_on(tmp_path: Path, options: tuple[str, ...]):
    with postgres_server() as postgres:
        urls = [postgres.url(postgres.create_database()) for _ in range(2)]
        before, after = ((*options, "--database-url", url) for url in urls)
        programs = ["--pg-dump", str(_client_program(postgres, "pg_dump"))]
        lives_on(tmp_path / "home", tmp_path / "copy", before, after, ["--database-url", urls[0], *programs])


def _client_program(postgres: PostgresServer, name: str) -> Path | str:
    """The server's own, where it brings one."""
    own = postgres.folder / "bin" / name
    return own if own.exists() else name
