"""kernels/ahead.py: what a rehearsal notes, other processes compile (for sm_90, without a GPU), and a launch finds."""

import logging
import pkgutil
from collections.abc import Iterator
from contextlib import closing
from importlib import import_module
from pathlib import Path

import pytest
import torch
import triton
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import kernels
from kernels import ahead
from kernels.rms_norm import triton_kernel as rms_norm
from kernels.silu_mul import triton_kernel as silu_mul
from tests.hopper import TARGET, Hopper


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(driver, "_active", Hopper())
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.fixture
def compilers() -> Iterator[ahead.Compilers]:
    with closing(ahead.Compilers(2, TARGET)) as compilers:
        yield compilers


@triton.jit
def _unknown_elsewhere(p_x):
    pass


def norms_and_silu() -> None:
    for num_rows in (1, 16, 40):
        rms_norm.rms_norm(torch.zeros(num_rows, 64), torch.zeros(64), 1e-5)
    silu_mul.silu_mul(torch.zeros(16, 256))


def test_what_is_launched_has_been_compiled_by_other_processes(
    compilers: ahead.Compilers, monkeypatch: pytest.MonkeyPatch
):
    assert compilers.rehearse(norms_and_silu) == 2

    found: list[tuple[str, bool]] = []
    listener = lambda *, src, cache_hit, **_: found.append((src.name, cache_hit))  # noqa: E731
    monkeypatch.setattr(knobs.compilation, "listener", listener)
    launch = JITFunction.run  # as far as the launch itself
    monkeypatch.setattr(JITFunction, "run", lambda *args, warmup, **named: launch(*args, warmup=True, **named))
    norms_and_silu()
    assert found == [("_rms_norm", True), ("_silu_mul", True)]


def all_kernels() -> Iterator[JITFunction]:
    """And the functions that they call."""
    for found in pkgutil.walk_packages(kernels.__path__, "kernels."):
        module = import_module(found.name)
        yield from (each for each in vars(module).values() if isinstance(each, JITFunction))


def test_a_kernel_has_one_key_in_every_process():
    """Triton's key has the global constants of a function that is called only if that function had its own key before:
    what another process compiled would not be found."""
    read = {each.fn.__qualname__: [] for each in all_kernels()}
    for each in [*all_kernels()] * 2:
        each.hash = None
        assert each.cache_key
        read[each.fn.__qualname__] += [name for name, _ in each.used_global_vals]

    assert len(read) > 40
    assert not any(read.values()), read


def test_what_cannot_be_compiled_elsewhere_is_told_and_holds_nobody_up(
    compilers: ahead.Compilers, caplog: pytest.LogCaptureFixture
):
    assert compilers.rehearse(lambda: _unknown_elsewhere[(1,)](torch.zeros(4))) == 1

    assert "_unknown_elsewhere was not compiled ahead: ModuleNotFoundError" in caplog.text


def test_a_launch_that_waits_for_a_compiler_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr(knobs.compilation, "listener", None)
    ahead.warn_of_compiling()

    with caplog.at_level(logging.WARNING, "kernels.ahead"):
        for _ in range(2):
            _unknown_elsewhere.device_caches.clear()
            _unknown_elsewhere.warmup(torch.zeros(4), grid=(1,))

    assert [record.getMessage() for record in caplog.records] == [
        "_unknown_elsewhere was compiled because it was launched: whoever launched it waited"
    ]


def test_after_a_rehearsal_launches_are_launches_again():
    launch, hook = JITFunction.run, knobs.runtime.jit_cache_hook

    with ahead.rehearsal(lambda job: None):
        assert JITFunction.run is not launch

    assert (JITFunction.run, knobs.runtime.jit_cache_hook) == (launch, hook)
