"""The import contracts are real: each planted bad import is found by the same check that CI runs."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("gateway", "engine", "kernels", "tenants", "migrations")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__", "demo"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def lint(tree: Path) -> subprocess.CompletedProcess:
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True, env={"PYTHONPATH": str(tree)}, timeout=600)


def test_the_tree_keeps_its_contracts(copy: Path):
    result = lint(copy)

    assert result.returncode == 0, result.stdout


PLANTED = {
    "gateway imports torch": ("gateway/planted.py", "import torch"),
    "gateway imports the engine's scheduler": ("gateway/planted.py", "import engine.scheduler"),
    "gateway imports a kernel": ("gateway/planted.py", "import kernels.rope"),
    "engine imports tenants": ("engine/planted.py", "import tenants.tables"),
    "engine imports redis": ("engine/planted.py", "import redis"),
    "tenants import the engine": ("tenants/planted.py", "import engine.wire"),
    "tenants import an HTTP framework": ("tenants/planted.py", "import litestar"),
    "kernels import the engine": ("kernels/planted.py", "import engine.wire"),
    "the scheduler imports torch": ("engine/scheduler.py", "import torch"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_import_is_found(copy: Path, name: str):
    path, line = PLANTED[name]
    with (copy / path).open("a") as file:
        file.write(f"\n{line}\n")

    result = lint(copy)

    assert result.returncode != 0, f"nobody noticed that {name}"
    assert "BROKEN" in result.stdout
