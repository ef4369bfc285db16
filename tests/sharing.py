"""Which tests workers of one run take together, and in which order.

A fixture of a whole session lives once in every worker, so the files that use a dear one go to one worker. What takes
long comes first: no worker is to wait for the other at the end.
"""

import re
from functools import cache
from pathlib import Path

from xdist.scheduler import LoadFileScheduling

TESTS = Path(__file__).parent
# Installations, the dearest first, and the folder whose tests use them
SHARED = {"smollm": "", "tiny": "e2e", "observed": "e2e", "house": "unit/gateway"}
ORDER = ("e2e", "faults", "kernels/interpreted", "unit/gateway", "unit/engine", "kernels", "unit/tenants")


def place(path: Path) -> int:
    """Of a test's file in the order of a run."""
    return next((number for number, folder in enumerate(ORDER) if path.is_relative_to(TESTS / folder)), len(ORDER))


@cache
def group(path: Path) -> str:
    """What is run on one worker: the users of an installation, or just the file."""
    source = path.read_text()
    for name, folder in SHARED.items():
        if path.is_relative_to(TESTS / folder) and re.search(rf"^def \w+\([^)]*\b{name}\b", source, re.MULTILINE):
            return name
    return str(path)


class Sharing(LoadFileScheduling):
    """Hands out groups where LoadFileScheduling hands out files."""

    def _split_scope(self, nodeid: str) -> str:
        return group(TESTS.parent / super()._split_scope(nodeid))
