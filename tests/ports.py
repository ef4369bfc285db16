"""Ports for servers that must be told theirs before they bind it.

A port that the system gives and that is then let go may be given to anybody else before the server has it: so these
are of no range that a system gives from by itself, and no two workers of a run draw from the same.
"""

import os
import random
import socket
from collections.abc import Iterator
from contextlib import suppress

FIRST, PER_WORKER, NUM_WORKERS = 20_000, 1500, 8  # below 32768, where Linux begins to give


def _drawn() -> Iterator[int]:
    """Each port of this worker's own once, in an order of chance: other runs of this machine draw from them too."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % NUM_WORKERS
    first = FIRST + worker * PER_WORKER
    yield from random.SystemRandom().sample(range(first, first + PER_WORKER), PER_WORKER)


_ports = _drawn()


def free_port() -> int:
    """On 127.0.0.1, that nobody listens at; never the same twice."""
    for port in _ports:
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no port is left")
