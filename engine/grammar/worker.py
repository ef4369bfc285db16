"""``python -m engine.grammar.worker``: compiles grammars that nobody trusts, in a process that may be killed.

Frames of ``framing.py`` on stdin and stdout, msgpack inside. First [tokenizer_json, vocab_size, eos_token_ids]; then
grammars, one text a frame. Each is answered by its reason to be refused, "" = none. A grammar that takes too much
memory or time ends the process instead.
"""

import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator

import msgspec

from engine.errors import InvalidGrammar
from engine.grammar import Compiler
from engine.wire.framing import Frames, frame

MAX_GROWTH_BYTES = 512 << 20  # over what the process takes when it is ready
ALARM_S = 3.0  # later than whoever waits for an answer gives up


def main() -> None:
    frames = _frames()
    compiler = Compiler(*msgspec.msgpack.decode(next(frames), type=tuple[str, int, tuple[int, ...]]))
    _answer(compiler.prepare)
    _bound_memory()
    for body in frames:
        text = msgspec.msgpack.decode(body, type=str)
        signal.setitimer(signal.ITIMER_REAL, ALARM_S)  # by default SIGALRM ends us, whatever we are in
        _answer(compiler.compile, text)
        signal.setitimer(signal.ITIMER_REAL, 0)


def _answer(check: Callable[..., object], *args: object) -> None:
    try:
        check(*args)
        reason = ""
    except InvalidGrammar as error:
        reason = str(error)
    sys.stdout.buffer.write(frame(msgspec.msgpack.encode(reason)))
    sys.stdout.buffer.flush()


def _frames() -> Iterator[bytes]:
    """Until whoever started us closes our stdin."""
    frames = Frames()
    while data := os.read(sys.stdin.fileno(), 1 << 20):
        yield from frames.feed(data)


def _bound_memory() -> None:
    with open("/proc/self/statm") as file:
        size_bytes = int(file.read().split()[0]) * resource.getpagesize()
    limit = size_bytes + MAX_GROWTH_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main()
