"""Engines as processes that begin as copies of one that has imported torch, which takes most of an engine's start."""

import multiprocessing
import os
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from engine.__main__ import main

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["engine.build", "engine.serve.server"])


def _run_engine(arguments: list[str], stdout: Connection) -> None:
    """What ``python -m engine`` does."""
    os.dup2(stdout.fileno(), sys.stdout.fileno())
    sys.argv = ["engine", *arguments]
    sys.exit(main())


@dataclass
class EngineProcess:
    """An engine on a socket; may be killed and started again on the same journal."""

    socket_path: Path
    model_dir: Path
    folder: Path
    options: tuple[str, ...] = ()
    process: BaseProcess | None = None

    def start(self) -> None:
        arguments = [
            "--socket", str(self.socket_path), "--model", f"tiny={self.model_dir}", "--dir", str(self.folder),
            "--device", "cpu", "--dtype", "float32", "--threads", "1", "--block-size", "4", *self.options,
        ]  # fmt: skip
        said, stdout = _FORKS.Pipe(duplex=False)
        self.process = _FORKS.Process(target=_run_engine, args=(arguments, stdout))
        self.process.start()
        stdout.close()
        with os.fdopen(os.dup(said.fileno())) as lines:
            assert "engine ready" in lines.readline()
        said.close()

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.join(10)
        self.process.close()
        self.process = None

    def stop(self) -> None:
        """However it stands."""
        if self.process is not None:
            self.kill()
