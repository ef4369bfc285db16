"""``./run prove NAME [--seed N --rounds N]``: each proof says what its rounds are, and how many it has by itself."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=0, help="of everything random in a proof")
    parser.addoption("--rounds", type=int, default=None, help="how much of it; a proof has its own default")


@pytest.fixture(scope="session")
def seed(request: pytest.FixtureRequest) -> int:
    return request.config.getoption("--seed")


@pytest.fixture(scope="session")
def rounds(request: pytest.FixtureRequest) -> int | None:
    return request.config.getoption("--rounds")
