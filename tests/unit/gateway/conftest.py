"""One gateway with one engine for the HTTP tests of this folder."""

import pytest
from gateway_harness import running_house


@pytest.fixture(scope="session")
def house(tmp_path_factory):
    with running_house(
        tmp_path_factory.mktemp("house"), "--max-adapter-rank", "16", "--adapter-slots", "2", "--kv-blocks", "512"
    ) as running:
        yield running


@pytest.fixture(scope="session")
def key(house) -> str:
    """A tenant without limits."""
    return house.new_tenant("unlimited")
