"""``python -m engine``: one engine as a process. Options only, no environment; it never outlives its parent."""

import argparse
import asyncio
import contextlib
import ctypes
import fcntl
import functools
import logging
import os
import signal
import sys
import time
from pathlib import Path

from engine.config import DISK_ADAPTER_BYTES, HOST_ADAPTER_BYTES, MAX_EXPERT_RANK

DRAIN_S = 30.0
SWITCH_INTERVAL_S = 0.0005  # the step thread waits no longer than this for the interpreter
PR_SET_PDEATHSIG = 1  # prctl(2)
LOCK_WAIT_S = 10.0
SOURCE_HELP = "a .gguf file, a Hugging Face folder, or upcycle:PATH of one, perhaps with ?options (weights/upcycle.py)"

logger = logging.getLogger("engine")


def main() -> int:
    """Exit status: 0 after SIGTERM or SIGINT, 1 when the engine can't start or broke, 2 for bad options."""
    parent = os.getppid()
    _die_with(parent)
    options = _parser().parse_args()
    logging.basicConfig(
        stream=sys.stderr, level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        with _only_one(options.dir):
            asyncio.run(_serve(options, parent))
    except Exception as error:
        details = logger.isEnabledFor(logging.DEBUG)
        logger.error("engine %s ends: %s: %s", options.engine_id, type(error).__name__, error, exc_info=details)
        return 1
    return 0


async def _serve(options: argparse.Namespace, parent: int) -> None:
    from engine.phases import Phases

    phases = Phases()
    # torch is imported here, after the parent's death is watched and bad options were refused
    from engine.build import Options, build
    from engine.journal import Journal
    from engine.journal.segments import Keep
    from engine.serve.adapter_tiers import DiskTier
    from engine.serve.server import Identity, Server

    phases.ended("imports")
    journal = Journal(options.dir, keep=Keep(options.journal_keep_days, options.journal_keep_bytes))
    if journal.torn_bytes:
        logger.warning("cut %d bytes of an unfinished group off the journal", journal.torn_bytes)
    name, _, source = options.model.partition("=")
    sizes = {key: value for key, value in vars(options).items() if key in Options.__dataclass_fields__}
    built = build(Options(**{**sizes, "model": name, "source": source}), phases)
    identity = Identity(options.engine_id, built.card, built.tokenizer)
    server = Server(identity, built.engine, journal, DiskTier(options.dir / "adapters", options.adapter_disk_bytes))
    stop = _watch_signals(parent)
    await server.start(options.socket)
    print(f"engine ready {options.engine_id}", flush=True)  # noqa: T201 (what the launcher waits for)
    logger.info("serving %s (%s, %s), %d blocks", name, built.card.dtype, built.card.device, built.card.num_blocks)
    logger.info("started in %s", phases)
    try:
        await asyncio.wait({stop, server.broken}, return_when=asyncio.FIRST_COMPLETED)
        if not server.broken.done() and stop.result() == signal.SIGTERM:
            logger.info("draining %d requests", server.num_open)
            await server.drain(DRAIN_S)
    finally:
        await server.stop()
        options.socket.unlink(missing_ok=True)
    if server.broken.done():
        server.broken.result()


def _watch_signals(parent: int) -> asyncio.Future[int]:
    """Done with SIGTERM (drain first) or SIGINT (end now). SIGHUP says that the parent died, or just its thread."""
    loop = asyncio.get_running_loop()
    stop: asyncio.Future[int] = loop.create_future()

    def received(number: int) -> None:
        if not stop.done() and (number != signal.SIGHUP or os.getppid() != parent):
            stop.set_result(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, received, number)
    received(signal.SIGHUP)  # it may have died before we watched
    return stop


def _die_with(parent: int) -> None:
    """Has the kernel send SIGHUP at the parent's death; by default that ends us, later it is handled."""
    if sys.platform == "linux":
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # below nohup it is ignored, and ignoring is inherited
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGHUP)
    if os.getppid() != parent:
        sys.exit(1)


@contextlib.contextmanager
def _only_one(folder: Path):
    """Holds the folder's lock: a predecessor that still ends keeps its journal to itself. Raises TimeoutError."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    deadline = time.monotonic() + LOCK_WAIT_S
    with (folder / "lock").open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"another engine uses {folder.name}") from None
                time.sleep(0.05)
        yield


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m engine", description=__doc__)
    add = parser.add_argument
    add("--socket", type=Path, required=True, help="unix socket, in a folder that only we may enter")
    add(
        "--model",
        type=_model,
        required=True,
        metavar="NAME=SOURCE",
        help=SOURCE_HELP,
    )
    add("--dir", type=Path, required=True, help="journal and adapter files")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    add("--threads", type=int, default=0, help="0: cores - 1")
    add("--block-size", type=int, default=16, help="tokens")
    add("--kv-blocks", type=int, default=0, help="0: as many as --kv-memory holds")
    add_bytes = functools.partial(add, type=int, metavar="BYTES")
    add_bytes(
        "--kv-memory",
        default=0,
        dest="kv_memory_bytes",
        help="0: 1 GiB on a CPU, what is left on a GPU: engines that share one need it each",
    )
    add("--context", type=int, default=0, dest="context_tokens", metavar="TOKENS", help="0: the model's")
    add("--max-step-tokens", type=int, default=0, help="0: 512 on a CPU, 8192 on a GPU, 256 with --deterministic")
    add("--max-running", type=int, default=0, help="0: 64 on a CPU, 256 on a GPU")
    add("--adapter-slots", type=int, default=0, help="0: 8 on a CPU, 64 on a GPU")
    add("--max-adapter-rank", type=int, default=64)
    add(
        "--expert-adapter-slots",
        type=int,
        default=0,
        help="of a GPU that may hold adapters on experts, each with memory for every expert; of a CPU all may",
    )
    add("--max-expert-adapter-rank", type=int, default=MAX_EXPERT_RANK, help="of adapters on experts, on a GPU")
    add_bytes(
        "--adapter-memory",
        default=HOST_ADAPTER_BYTES,
        dest="host_adapter_bytes",
        help="copies of adapters in the host's memory",
    )
    add_bytes("--adapter-disk", default=DISK_ADAPTER_BYTES, dest="adapter_disk_bytes", help="adapter files in --dir")
    add(
        "--deterministic",
        action="store_true",
        help="a row's bits on a GPU depend on no other row: each step is computed as one of 256 tokens, or as many as "
        "--max-step-tokens and --max-running ask for. A CPU's never depend on others",
    )
    add("--journal-keep-days", type=int, default=90, help="how long acknowledged usage records are kept for audits")
    add("--journal-keep-bytes", type=int, default=8 << 30, help="how much of them at most")
    add("--engine-id", default="engine-0")
    add("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    return parser


def _model(text: str) -> str:
    name, separator, source = text.partition("=")
    if not (name and separator and source):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=SOURCE")
    return text


if __name__ == "__main__":
    sys.exit(main())
