"""Two installations, each started once: the default model with its demo, and a tiny model in a tiny pool."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.served import DEFAULT_MODEL, Served, serving


@pytest.fixture(scope="session")
def smollm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """What a newcomer gets: SmolLM2, demo tenants, two gateways on one socket."""
    with serving(tmp_path_factory.mktemp("smollm"), "--model", DEFAULT_MODEL, "--gateways", "2") as served:
        yield served


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.tiny import write_hf_dir

    path = tmp_path_factory.mktemp("model") / "tiny"
    write_hf_dir(path)
    return path


TINY_OPTIONS = ("--block-size", "4", "--kv-blocks", "256", "--context", "128", "--adapter-slots", "2", "--demo")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Served]:
    """The tiny random model: context 128, blocks of 4 tokens, 2 adapter slots, rank limit 16, two gateways."""
    options = ("--model", f"tiny={model_dir}", "--gateways", "2", "--max-adapter-rank", "16", *TINY_OPTIONS)
    options += ("--webhook-loopback",)
    with serving(tmp_path_factory.mktemp("tiny-home"), *options) as served:
        yield served
