"""Kernels that are compiled before anybody launches them, by several processes at once.

Triton compiles a kernel when it is launched for the first time, in the thread that launches it: most of a second, while
all else waits. A rehearsal is the code that launches, run once with nothing launched: what Triton would have had to
compile is noted, and processes that never touch the device compile it into Triton's cache on disk, where the first
launch finds it.
"""

import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from importlib import import_module
from queue import SimpleQueue
from typing import Any, cast

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.cache import triton_key
from triton.runtime.jit import JITFunction

Job = tuple[str, str, str]  # module and name of a kernel, and what Triton compiles it for

logger = logging.getLogger("kernels.ahead")


@contextmanager
def rehearsal(tell: Callable[[Job], object]) -> Iterator[None]:
    """Within, no kernel is launched: what it would have written is as it was. ``tell`` hears of each that would be
    compiled, each time. Only for the thread that launches."""
    launch = JITFunction.run

    def only_look(self: JITFunction, *args: Any, grid: Any, warmup: Any, **options: Any) -> Any:
        return launch(self, *args, grid=grid, warmup=True, **options)

    def note(*, fn: Any, **noted: Any) -> bool:
        tell((fn.module, fn.name, noted["compile"]["specialization_data"]))
        return True  # it is not compiled now

    before, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, note
    JITFunction.run = only_look
    try:
        yield
    finally:
        JITFunction.run = launch
        knobs.runtime.jit_cache_hook = before


def warn_of_compiling() -> None:
    """From now on each kernel that is compiled because it was launched is logged: no rehearsal had it."""

    def tell(*, src: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            logger.warning("%s was compiled because it was launched: whoever launched it waited", src.name)

    knobs.compilation.listener = tell


class Compilers:
    """Processes that compile for one kind of device, into the cache that Triton has by now. They begin at once, and end
    with ``close`` or with this process."""

    def __init__(self, num_processes: int, target: GPUTarget) -> None:
        self._idle: SimpleQueue[subprocess.Popen[str]] = SimpleQueue()
        self._processes = [_start(target) for _ in range(num_processes)]
        self._threads = ThreadPoolExecutor(num_processes, "compilers")
        self._jobs: dict[Job, Future[str]] = {}
        for process in self._processes:
            self._idle.put(process)

    def rehearse(self, run: Callable[[], object]) -> int:
        """Compiles all that ``run`` launches → how many kernels. What fails is logged: who launches it compiles it."""
        with rehearsal(self._begin):
            run()
        wait(self._jobs.values())
        for (_, name, _), job in self._jobs.items():
            fault = job.exception() or job.result()
            if fault:
                logger.warning("%s was not compiled ahead: %s", name, fault)
        return len(self._jobs)

    def _begin(self, job: Job) -> None:
        if job not in self._jobs:
            self._jobs[job] = self._threads.submit(self._compile, job)

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            process.kill()  # it has nothing to put in order, and would take half a second for it
        for process in self._processes:
            process.communicate()

    def _compile(self, job: Job) -> str:
        process = self._idle.get()
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            print(json.dumps(job), file=process.stdin, flush=True)
            return json.loads(process.stdout.readline())
        finally:
            self._idle.put(process)


def target_here() -> GPUTarget:
    """The device of this process."""
    target = driver.active.get_current_target()
    assert target is not None
    return target


def _start(target: GPUTarget) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "kernels.ahead", target.backend, str(target.arch), str(target.warp_size)]
    return subprocess.Popen(  # noqa: S603
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # who interrupts a terminal's processes means us; they end when their input does
    )


class _Elsewhere:
    """In the place of a device that this process does not have."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0


def main() -> None:
    """Compiles what its input asks for, a job a line, and answers each with its fault, "" for none."""
    _get_ready()
    backend, arch, warp_size = sys.argv[1:]
    driver.set_active(cast(Any, _Elsewhere(GPUTarget(backend, int(arch), int(warp_size)))))
    answers, sys.stdout = sys.stdout, sys.stderr  # where compilers may print
    for line in sys.stdin:
        print(json.dumps(_fault_of(*json.loads(line))), file=answers, flush=True)


def _get_ready() -> None:
    """What the first job would wait for: torch, which each kernel's module imports, and the sum over all of Triton by
    which it finds what was compiled before."""
    import_module("torch")
    triton_key()


def _fault_of(module: str, name: str, wanted: str) -> str:
    try:
        getattr(import_module(module), name).preload(wanted)
    except Exception as error:  # the compiler's, of whatever kind: the caller goes on without
        return f"{type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    main()
