"""What "the same answer" means on the device that the suites run on."""

import os
from typing import Any

import pytest


def on_gpu() -> bool:
    """Engines compute on a GPU here."""
    device = os.environ.get("TENORA_DEVICE", "auto")
    if device != "auto":
        return device == "cuda"
    import torch

    return torch.cuda.is_available()


def assert_same(found: Any, expected: Any) -> None:
    """On a CPU, and on a deterministic GPU, to the last bit, whoever shared a step. Otherwise cuBLAS may take another
    algorithm for a step of another size: log-probabilities may differ in their last digits, and nothing else may."""
    if not on_gpu() or os.environ.get("TENORA_DETERMINISTIC") == "1":
        assert found == expected
        return
    assert_close(found, expected)


def assert_close(found: Any, expected: Any) -> None:
    """Floats of nested tuples and lists within 1e-4; everything else equal."""
    if isinstance(expected, float):
        assert found == pytest.approx(expected, abs=1e-4)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), (found, expected)
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other)
    else:
        assert found == expected
