"""No kernel touches memory past the end of a tensor, not even in lanes that it throws away."""

import signal
import subprocess
import sys

import pytest

from tests.kernels.interpreted.guarded import CASES


def _run(case: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "tests.kernels.interpreted.guarded", case]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("case", sorted(set(CASES) - {"past_an_end"}))
def test_nothing_past_an_end_is_touched(case):
    ended = _run(case)
    assert ended.returncode == 0, ended.stderr


def test_what_touches_memory_past_an_end_dies():
    assert _run("past_an_end").returncode == -signal.SIGSEGV
