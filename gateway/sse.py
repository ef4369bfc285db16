"""Server-sent events of one call: their framing, padding against eavesdroppers, comments in long silences."""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Iterator, Sequence

from gateway.call import Call

PAD_BYTES = 32
KEEP_ALIVE_S = 15.0  # proxies commonly cut what is silent for 60 s
DONE = b"data: [DONE]\n\n"
_COMMENT = b": keep-alive\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_DRAWN_BYTES = 3072  # of chance at a time: the system's source costs more than what it gives


class _Letters:
    """Random letters, each given once."""

    def __init__(self) -> None:
        self._drawn = b""
        self._given = 0

    def take(self, number: int) -> bytes:
        start = self._given
        if start + number > len(self._drawn):
            self._drawn, start = secrets.token_urlsafe(_DRAWN_BYTES).encode(), 0
        self._given = start + number
        return self._drawn[start : self._given]


_letters = _Letters()


def padded(chunk: bytes, blank_bytes: int) -> bytes:
    """A chunk's JSON with as many random letters in ``obfuscation``, OpenAI's field, that what it has more than a
    chunk without text (``blank_bytes``) fills whole PAD_BYTES: its size tells no token from another of its kind."""
    return b'%b,"obfuscation":"%b"}' % (chunk[:-1], _letters.take((blank_bytes - len(chunk)) % PAD_BYTES))


class EventStream:
    """Writes to its call. The status line goes out with the first event or comment.

    ``blank`` is a chunk without text, by which the others are padded; None: they are not.
    """

    def __init__(self, call: Call, blank: bytes | None) -> None:
        self._call = call
        self._blank_bytes = len(blank) if blank is not None else None
        self._loop = asyncio.get_running_loop()
        self._written_s = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None
        self._comment: asyncio.Task[None] | None = None

    async def send(self, chunks: Sequence[bytes]) -> None:
        """All of them in one write, as one step brought them."""
        await self._write(b"".join(map(self._event, chunks)))

    async def end(self, chunks: Sequence[bytes]) -> None:
        """The last chunks and the sign that none follows."""
        await self._write(b"".join(map(self._event, chunks)) + DONE, last=True)

    @contextlib.contextmanager
    def kept_alive(self) -> Iterator[None]:
        """While entered, a comment breaks every silence of KEEP_ALIVE_S; clients pass over it."""
        self._look()
        try:
            yield
        finally:
            for pending in (self._timer, self._comment):
                if pending is not None:
                    pending.cancel()

    def _look(self) -> None:
        """The timer is not moved for each event, it looks how long ago the last was when it comes round."""
        wait_s = self._written_s + KEEP_ALIVE_S - time.monotonic()
        if wait_s <= 0:
            self._comment = self._loop.create_task(self._write(_COMMENT))
            wait_s = KEEP_ALIVE_S
        self._timer = self._loop.call_later(wait_s, self._look)

    def _event(self, chunk: bytes) -> bytes:
        return b"data: %b\n\n" % (chunk if self._blank_bytes is None else padded(chunk, self._blank_bytes))

    async def _write(self, data: bytes, *, last: bool = False) -> None:
        """Of several that wait for the caller to read on, the first goes first: each is whole events."""
        self._written_s = time.monotonic()
        if not self._call.answering:
            await self._call.begin(200, _HEADERS)
        await self._call.write(data, last=last)
