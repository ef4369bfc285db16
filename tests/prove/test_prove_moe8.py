"""The suites that drive a whole installation, on the default model with experts in place of the dense one.

./run prove moe8
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.served import MODEL_VARIABLE

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
RECIPE = "smollm2-135m-moe8"


@pytest.mark.parametrize(("suite", "at_least"), [("tests/e2e", 60), ("tests/faults", 8)])
def test_a_whole_suite_passes_on_the_upcycled_model(suite: str, at_least: int):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", suite]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {MODEL_VARIABLE: RECIPE}, capture_output=True, text=True, timeout=2400
    )

    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= at_least
