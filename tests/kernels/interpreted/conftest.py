"""The tests of a file of this folder run in a child pytest with TRITON_INTERPRET=1, which Triton reads when it
decorates a kernel; here each of them reports what it did there. The child can die (guard pages) without taking others
along. One a file, since workers that share a run take whole files."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

IN_CHILD = os.environ.get("TRITON_INTERPRET") == "1"
_HERE = Path(__file__).parent
_RESULTS = "TENORA_TEST_RESULTS"  # the file into which the child writes a line a test
_found: dict[str, tuple[str, str]] = {}

if IN_CHILD:
    from tests.kernels.interpreted import shim, shortcuts

    shortcuts.install()
    shim.install()  # and checks both
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    for item in items:
        if _HERE in item.path.parents:  # numpy warns of lanes that nothing stores
            item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning"))


@pytest.fixture(autouse=True)
def _fresh_memory_is_nan(monkeypatch):
    """What a kernel forgets to write, or a wrapper takes for zero, shows."""
    empty = torch.empty

    def poisoned(*shape, **options):
        fresh = empty(*shape, **options)
        return fresh.fill_(float("nan") if fresh.is_floating_point() else torch.iinfo(fresh.dtype).max)

    monkeypatch.setattr(torch, "empty", poisoned)


def pytest_pyfunc_call(pyfuncitem):
    if IN_CHILD:
        return None
    if pyfuncitem.nodeid not in _found:
        _run_child(pyfuncitem.path, pyfuncitem.session, pyfuncitem.config)
    outcome, text = _found[pyfuncitem.nodeid]
    if outcome == "skipped":
        pytest.skip(text)
    if outcome != "passed":
        pytest.fail(text, pytrace=False)
    return True


def pytest_runtest_logreport(report):
    results = os.environ.get(_RESULTS)
    if not (IN_CHILD and results) or (report.when != "call" and report.passed):
        return
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
    with Path(results).open("a") as out:
        out.write(json.dumps([report.nodeid, report.outcome, text]) + "\n")


def _run_child(path: Path, session: pytest.Session, config: pytest.Config) -> None:
    ids = [item.nodeid for item in session.items if item.path == path]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *ids]
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results"
        results.touch()
        environment = {**os.environ, "TRITON_INTERPRET": "1", _RESULTS: str(results)}
        child = subprocess.run(
            command, cwd=config.rootpath, env=environment, capture_output=True, text=True, timeout=3000
        )
        reports = [json.loads(line) for line in results.read_text().splitlines()]
    said = f"{child.stdout[-3000:]}{child.stderr[-2000:]}"
    missing = ("failed", f"the child pytest ended with {child.returncode} before this test:\n{said}")
    _found.update(dict.fromkeys(ids, missing))
    _found.update({nodeid: (outcome, text) for nodeid, outcome, text in reports})
