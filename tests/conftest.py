"""Shared by all tests: one torch thread (two spinning threads on a busy machine cost seconds a step), the installation
that several folders use, the same numbers in each run, and which tests two workers take together and first."""

import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests import sharing

if TYPE_CHECKING:
    from tests.served import Served

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: sharing.place(item.path))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """What draws tensors without a seed of its own gets the same in each run, whatever ran before in this worker."""
    if "torch" in sys.modules:  # which most tests of the gateway never import
        sys.modules["torch"].manual_seed(0)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return sharing.Sharing(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.fixture(scope="session")
def smollm(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Served]":
    """What a newcomer gets: SmolLM2, demo tenants, two gateways on one socket."""
    from tests.served import DEFAULT_MODEL, serving  # not for every test that is run alone

    options = ("--model", DEFAULT_MODEL, "--gateways", "2", "--drain-seconds", "600")  # a busy machine may need minutes
    with serving(tmp_path_factory.mktemp("smollm"), *options) as served:
        yield served
