"""Installations of a tiny model, each started once."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.otlp import Collector, collecting
from tests.served import Served, serving


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.tiny import write_hf_dir

    path = tmp_path_factory.mktemp("model") / "tiny"
    write_hf_dir(path)
    return path


# fp32 whatever the device prefers: answers are held against fp32 ones
TINY_OPTIONS = ("--dtype", "float32", "--block-size", "4", "--kv-blocks", "256", "--context", "128")
TINY_OPTIONS += ("--adapter-slots", "2", "--demo")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Served]:
    """The tiny random model: context 128, blocks of 4 tokens, 2 adapter slots, rank limit 16, two gateways."""
    options = ("--model", f"tiny={model_dir}", "--gateways", "2", "--max-adapter-rank", "16", *TINY_OPTIONS)
    options += ("--webhook-loopback",)
    with serving(tmp_path_factory.mktemp("tiny-home"), *options) as served:
        yield served


@dataclass(frozen=True)
class Observed:
    served: Served
    collector: Collector


@pytest.fixture(scope="session")
def observed(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Observed]:
    """The tiny model with room for longer streams, everything logged and traced, for what looks into that."""
    options = ("--log-level", "debug", "--dtype", "float32", "--context", "512")
    options += ("--block-size", "4", "--kv-blocks", "512")
    options += ("--adapter-slots", "2", "--demo", "--model", f"tiny={model_dir}")
    with collecting() as collector, contextlib.ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:  # for this installation's start, not for the next ones'
            patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
            patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
            patch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
            served = stack.enter_context(serving(tmp_path_factory.mktemp("observed"), *options))
        yield Observed(served, collector)
