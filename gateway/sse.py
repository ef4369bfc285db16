"""Server-sent events of one call: their framing, padding against eavesdroppers, comments in long silences."""

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Sequence

import msgspec

from gateway.call import Call
from gateway.schemas import Answer

PAD_BYTES = 32
KEEP_ALIVE_S = 15.0  # proxies commonly cut what is silent for 60 s
DONE = b"data: [DONE]\n\n"
_COMMENT = b": keep-alive\n\n"
_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
_encode = msgspec.json.Encoder().encode


def padded(chunk: bytes, blank_bytes: int) -> bytes:
    """A chunk's JSON with as many random letters in ``obfuscation``, OpenAI's field, that what it has more than a
    chunk without text (``blank_bytes``) fills whole PAD_BYTES: its size tells no token from another of its kind."""
    letters = secrets.token_urlsafe(PAD_BYTES)[: (blank_bytes - len(chunk)) % PAD_BYTES]
    return b'%b,"obfuscation":"%b"}' % (chunk[:-1], letters.encode())


class EventStream:
    """Writes to its call, one message at a time. The status line goes out with the first event or comment.

    ``blank`` is a chunk without text, by which the others are padded; None: they are not.
    """

    def __init__(self, call: Call, blank: Answer | None) -> None:
        self._call = call
        self._blank_bytes = len(_encode(blank)) if blank is not None else None
        self._turn = asyncio.Lock()
        self._written_s = time.monotonic()

    async def send(self, chunks: Sequence[Answer]) -> None:
        """All of them in one write, as one step brought them."""
        await self._write(b"".join(map(self._event, chunks)))

    async def end(self, chunks: Sequence[Answer]) -> None:
        """The last chunks and the sign that none follows."""
        await self._write(b"".join(map(self._event, chunks)) + DONE, last=True)

    @contextlib.asynccontextmanager
    async def kept_alive(self) -> AsyncIterator[None]:
        """While entered, a comment breaks every silence of KEEP_ALIVE_S; clients pass over it."""
        comments = asyncio.create_task(self._comment(), name=f"keep-alive of {self._call.request_id}")
        try:
            yield
        finally:
            comments.cancel()

    async def _comment(self) -> None:
        while True:
            await asyncio.sleep(self._written_s + KEEP_ALIVE_S - time.monotonic())
            if time.monotonic() >= self._written_s + KEEP_ALIVE_S:
                await self._write(_COMMENT)

    def _event(self, chunk: Answer) -> bytes:
        data = _encode(chunk)
        return b"data: %b\n\n" % (data if self._blank_bytes is None else padded(data, self._blank_bytes))

    async def _write(self, data: bytes, *, last: bool = False) -> None:
        async with self._turn:
            if not self._call.answering:
                await self._call.begin(200, _HEADERS)
            await self._call.write(data, last=last)
            self._written_s = time.monotonic()
