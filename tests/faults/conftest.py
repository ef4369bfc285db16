"""One installation on the real model for the process faults: generation is slow enough to be hit mid-stream."""

from collections.abc import Iterator

import pytest

from tests.served import DEFAULT_MODEL, Served, serving


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("faults"), "--model", DEFAULT_MODEL, "--gateways", "2") as running:
        yield running
