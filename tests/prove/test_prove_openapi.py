"""``./run prove openapi [--seed N --rounds N]``: schemathesis over the served OpenAPI document, against a whole server.

A round is one drawn request for each operation, beside those that the document's own bounds give. No 5xx, no status,
header, media type or body that the document does not name; wrong requests and missing keys are refused. Which checks
can't hold, and why, is in tests/schemathesis.toml.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.served import ROOT, Served, serving
from tests.tiny import tiny_adapter, write_hf_dir, write_peft_dir
from tests.uploads import upload

pytestmark = pytest.mark.long
ROUNDS = 120
OPTIONS = ("--block-size", "4", "--kv-blocks", "4096", "--context", "128", "--adapter-slots", "2", "--demo")
TESTED = re.compile(r"^  (\d+) generated", re.M)


def test_a_stranger_finds_nothing_that_the_document_does_not_say(tmp_path: Path, seed: int, rounds: int | None, capsys):
    model = write_hf_dir(tmp_path / "model")
    with serving(tmp_path / "home", "--model", f"tiny={model}", "--max-adapter-rank", "16", *OPTIONS) as served:
        with served.http() as http:
            adapter = write_peft_dir(tmp_path / "adapter", tiny_adapter(1, rank=4))
            assert upload(http, "mine", adapter).status_code == 201
            done = http.post("/completions", json={"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 2})
        engine = served.engines()[0]
        ran = _schemathesis(served, tmp_path, seed, rounds or ROUNDS, done.headers["x-request-id"])
        with capsys.disabled():
            print("\n" + ran.stdout[-6000:])

        assert ran.returncode == 0, ran.stdout[-20_000:] + ran.stderr[-4000:]
        assert engine.is_running(), "no request ended it"
        tested = TESTED.search(ran.stdout)
        assert tested is not None
        assert int(tested[1]) >= (0 if rounds else 2000)


def _schemathesis(
    served: Served, folder: Path, seed: int, rounds: int, request_id: str
) -> subprocess.CompletedProcess[str]:
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "--config-file", str(ROOT / "tests" / "schemathesis.toml")),
        *("run", f"{served.url}/openapi.json", "--url", served.url.removesuffix("/v1")),
        *("--seed", str(seed), "--max-examples", str(rounds), "--continue-on-failure"),
        *("-H", f"Authorization: Bearer {served.api_key('acme')}"),
        *("--report", "ndjson", "--report-ndjson-path", str(folder / "cases.ndjson")),
    ]
    environment = os.environ | {"KNOWN_REQUEST_ID": request_id, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
