"""Engines as child processes of this machine."""

import sys

from gateway.launchers import EngineHandle, EngineSpec, OnExit
from gateway.serve.children import Child, Command


class LocalEngine(Child):
    """A child process that listens on a unix socket."""

    def __init__(self, command: Command, on_exit: OnExit, address: str) -> None:
        super().__init__(command, on_exit)
        self.address = address


class LocalLauncher:
    """Starts `python -m engine` here, with the environment given; ``module`` is another that takes its flags."""

    def __init__(self, environment: dict[str, str], module: str = "engine") -> None:
        self._environment = environment
        self._module = module

    async def start(self, spec: EngineSpec, on_exit: OnExit) -> EngineHandle:
        spec.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        socket = spec.run_dir / f"engine-{spec.engine_id.partition('-')[0].removeprefix('e')}.sock"
        command = Command(
            name=f"engine {spec.engine_id}",
            argv=[sys.executable, "-m", self._module, *_flags(spec, str(socket))],
            ready_text=f"engine ready {spec.engine_id}",
            environment=self._environment,
        )
        engine = LocalEngine(command, on_exit, str(socket))
        engine.start()
        return engine


def _flags(spec: EngineSpec, socket: str) -> list[str]:
    where = ["--socket", socket, "--dir", str(spec.directory)]
    return [*where, "--model", f"{spec.model}={spec.source}", "--engine-id", spec.engine_id, *spec.flags]
