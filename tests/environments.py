"""Environments of their own for other people's clients: a folder each, made once, kept in the user's cache.

A folder is whole when its stamp says so; another pin or another Python makes it anew.
"""

import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tenora-clients"
INSTALL_TIMEOUT_S = 1_200
CALLS_HOME = {  # each tool's own word for: talk to nobody but the server you are told
    "DO_NOT_TRACK": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LANGCHAIN_TRACING_V2": "false",
    "LANGSMITH_TRACING": "false",
    "NEXT_TELEMETRY_DISABLED": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_DATASETS_OFFLINE": "1",
}
KEPT = ("PATH", "LANG", "OPENBLAS_CORETYPE", "SSL_CERT_FILE", "NODE_EXTRA_CA_CERTS")
INSTALLER_PREFIXES = ("PIP_", "npm_config_", "NPM_CONFIG_", "XDG_")


class CannotInstall(Exception):
    """Why an environment could not be made: the installer's own last word."""


@dataclass(frozen=True)
class Environment:
    """A folder whose ``bin`` comes first on PATH."""

    folder: Path
    bin: Path

    def run(
        self, command: Sequence[str], cwd: Path, variables: Mapping[str, str], timeout_s: float
    ) -> subprocess.CompletedProcess[str]:
        """Runs to its end in ``cwd``, with a home of its own there; whatever it started ends with it.

        Raises TimeoutExpired.
        """
        environment = {name: os.environ[name] for name in KEPT if name in os.environ} | CALLS_HOME | dict(variables)
        environment |= {
            "HOME": str(cwd),
            "PATH": f"{self.bin}{os.pathsep}{environment['PATH']}",
            "OMP_NUM_THREADS": "1",
        }
        return _bounded(command, cwd, environment, timeout_s)


def python_environment(name: str, *requirements: str) -> Environment:
    """A venv of this Python with exactly ``requirements`` and what they need. Raises CannotInstall."""
    folder = CACHE / name
    stamp = _stamp(sys.version, *requirements)
    if not _is_made(folder, stamp):
        _install(folder, [sys.executable, "-m", "venv", "."])
        _install(folder, ["bin/python", "-m", "pip", "install", "--no-input", "--progress-bar", "off", *requirements])
        (folder / "stamp").write_text(stamp)
    return Environment(folder, folder / "bin")


def node_environment(name: str, *packages: str) -> Environment:
    """A folder with these packages of npm in ``node_modules``. Raises CannotInstall."""
    folder = CACHE / name
    node = shutil.which("node")
    if node is None or shutil.which("npm") is None:
        raise CannotInstall("no node and npm on PATH")
    stamp = _stamp(node, *packages)
    if not _is_made(folder, stamp):
        _install(folder, ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", ".", *packages])
        (folder / "stamp").write_text(stamp)
    return Environment(folder, Path(node).parent)


def _stamp(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _is_made(folder: Path, stamp: str) -> bool:
    """Whether it is whole; what is there of another stamp, or half of one, is removed."""
    if (folder / "stamp").is_file() and (folder / "stamp").read_text() == stamp:
        return True
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return False


def _install(folder: Path, command: Sequence[str]) -> None:
    environment = {name: value for name, value in os.environ.items() if name in (*KEPT, "HOME")}
    environment |= {name: value for name, value in os.environ.items() if name.startswith(INSTALLER_PREFIXES)}
    try:
        done = _bounded(command, folder, environment, INSTALL_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise CannotInstall(f"not installed within {INSTALL_TIMEOUT_S} s") from None
    if done.returncode:
        errors = [line for line in (done.stdout + done.stderr).splitlines() if re.match(r"(ERROR|npm error)", line)]
        raise CannotInstall("; ".join(errors[-2:]) or f"{command[0]} ended with {done.returncode}")


def _bounded(
    command: Sequence[str], cwd: Path, environment: Mapping[str, str], timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """``subprocess.run`` whose whole process group is ended, by the group that we made, in time or at its end.

    Output goes through files: a grandchild that holds a pipe open would keep us waiting.
    """
    with (cwd / "stdout.log").open("w+") as out, (cwd / "stderr.log").open("w+") as err:
        process = subprocess.Popen(
            command, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
        )
        try:
            code = process.wait(timeout_s)
        finally:
            _end_group(process)
        out.seek(0), err.seek(0)
        return subprocess.CompletedProcess(command, code, out.read(), err.read())


def _end_group(process: subprocess.Popen) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait(10)
