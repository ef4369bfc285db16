"""uvicorn's HTTP/1.1 with what it lacks at the edge: bounds on heads, connections and the time that a request may take
to come, word of every caller who leaves, JSON errors.

The HTTP parser hands a head over when it is complete and keeps what came of it until then, however long; and when a
connection ends, uvicorn tells only the newest of its requests, which with pipelining is not the one that runs.
"""

import asyncio
import http
from dataclasses import dataclass

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from gateway.call import caller_left, new_request_id
from gateway.errors import ApiError

MAX_HEAD_BYTES = 64 << 10  # what one read brings beyond it is let through
MIN_BYTES_PER_S = 1024  # of a body, on average


@dataclass(frozen=True, slots=True)
class Bounds:
    """What strangers may hold of a process. A head comes within ``receive_s`` of its first byte (of the connection's
    start, for the first), a body stands still no longer than that and brings MIN_BYTES_PER_S on average; who takes
    nothing of an answer for ``send_s`` has left; a connection between requests is kept for ``idle_s``. Connections are
    counted together: a proxy's peers have one address."""

    max_connections: int = 4096
    receive_s: float = 30.0
    idle_s: float = 75.0
    send_s: float = 60.0


DEFAULT_BOUNDS = Bounds()


class _OneWriteATurn:
    """A transport that writes what it was given during a turn of the loop at the turn's end, or when it is flushed, in
    one piece: a head with its body, the last chunk with the end of the stream. A write costs more than what it
    carries."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._call_soon = asyncio.get_running_loop().call_soon
        self._pieces: list[bytes] = []

    def write(self, data: bytes) -> None:
        if not self._pieces:
            self._call_soon(self.flush)
        self._pieces.append(data)

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def __getattr__(self, name: str):
        return getattr(self._transport, name)

    def flush(self) -> None:
        if self._pieces:
            pieces, self._pieces = self._pieces, []
            self._transport.write(b"".join(pieces))


class HttpProtocol(HttpToolsProtocol):
    """One connection. ``_due``: when, by the loop's clock, what is being received must be there; None: nothing is."""

    def __init__(self, *args, bounds: Bounds = DEFAULT_BOUNDS, **more) -> None:
        super().__init__(*args, **more)
        self._bounds = bounds
        self._gathered_bytes = 0  # since the last head or piece of a body was complete: heads, trailers, chunk sizes
        self._cycles: list[RequestResponseCycle] = []  # requests without a whole answer, oldest first
        self._due: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._untaken: asyncio.TimerHandle | None = None  # runs while the caller doesn't take what is written

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self._gathering = _OneWriteATurn(transport)
        super().connection_made(self._gathering)  # pyright: ignore[reportArgumentType]
        if len(self.connections) > self._bounds.max_connections:
            self._refuse(ApiError("This server has too many connections; try again.", code="overloaded"))
        else:
            self._expect(self._bounds.receive_s)

    def data_received(self, data: bytes) -> None:
        if self._due is None:
            self._expect(self._bounds.receive_s)
        self._gathered_bytes += len(data)
        super().data_received(data)
        if self._gathered_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(ApiError(f"Headers may have at most {MAX_HEAD_BYTES} bytes.", code="headers_too_large"))

    def on_headers_complete(self) -> None:
        self._gathered_bytes = 0
        self._expect(self._bounds.receive_s)
        super().on_headers_complete()
        self._cycles = [cycle for cycle in self._cycles if not cycle.response_complete]
        self._cycles.append(self.cycle)

    def on_body(self, body: bytes) -> None:
        self._gathered_bytes = 0
        if self._due is not None:
            self._due = min(self._due + len(body) / MIN_BYTES_PER_S, self.loop.time() + self._bounds.receive_s)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._gathered_bytes = 0
        self._due = None
        super().on_message_complete()

    def _expect(self, within_s: float) -> None:
        """The next part of a request. The timer is not moved for each, it looks at ``_due`` when it comes round."""
        self._due = self.loop.time() + within_s
        if self._timer is None:
            self._timer = self.loop.call_at(self._due, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._due is None or self.transport.is_closing():
            return
        if self._is_ours_to_go_on():
            self._due = max(self._due, self.loop.time() + self._bounds.receive_s)
        if self.loop.time() < self._due:
            self._timer = self.loop.call_at(self._due, self._look)
        elif self._is_nothing_asked():
            self.transport.close()
        else:
            self._refuse(ApiError("The request took too long to come.", code="request_timeout"))

    def _is_nothing_asked(self) -> bool:
        """Not a byte came, or the answer was there before the end of its request, which never came."""
        was_answered = any(cycle.response_started for cycle in self._cycles)
        return was_answered or not (self._cycles or self._gathered_bytes)

    def _is_ours_to_go_on(self) -> bool:
        """We don't read on, or still answer what came before: the caller isn't late."""
        return self.flow.read_paused or any(not (cycle.more_body or cycle.response_complete) for cycle in self._cycles)

    def on_response_complete(self) -> None:
        self._gathering.flush()  # nobody waits for what is done behind an answer
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._untaken = self.loop.call_later(self._bounds.send_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._untaken is not None:
            self._untaken.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
                caller_left(cycle.scope)
        for timer in (self._timer, self._untaken):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """What the parser can't read."""
        self._refuse(ApiError(msg))

    def _refuse(self, error: ApiError) -> None:
        """Answers without a request to answer to, and closes: nobody knows where the next one would begin."""
        body = msgspec.json.encode(error.body())
        lines = (
            f"HTTP/1.1 {error.status} {http.HTTPStatus(error.status).phrase}",
            "content-type: application/json",
            f"content-length: {len(body)}",
            *(f"{name}: {value}" for name, value in error.response_headers().items()),
            f"x-request-id: {new_request_id()}",
            "connection: close",
        )
        self.transport.write("\r\n".join((*lines, "", "")).encode() + body)
        self.transport.close()
