"""uvicorn's HTTP/1.1 with what it lacks at the edge: a bound on heads, word of every caller who leaves, JSON errors.

The HTTP parser hands a head over when it is complete and keeps what came of it until then, however long; and when a
connection ends, uvicorn tells only the newest of its requests, which with pipelining is not the one that runs.
"""

import http

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from gateway.call import new_request_id
from gateway.errors import ApiError

MAX_HEAD_BYTES = 64 << 10  # what one read brings beyond it is let through


class HttpProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *args, **more) -> None:
        super().__init__(*args, **more)
        self._gathered_bytes = 0  # since the last head or piece of a body was complete: heads, trailers, chunk sizes
        self._cycles: list[RequestResponseCycle] = []  # requests without a whole answer, oldest first

    def data_received(self, data: bytes) -> None:
        self._gathered_bytes += len(data)
        super().data_received(data)
        if self._gathered_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(ApiError(f"Headers may have at most {MAX_HEAD_BYTES} bytes.", code="headers_too_large"))

    def on_headers_complete(self) -> None:
        self._gathered_bytes = 0
        super().on_headers_complete()
        self._cycles = [cycle for cycle in self._cycles if not cycle.response_complete]
        self._cycles.append(self.cycle)

    def on_body(self, body: bytes) -> None:
        self._gathered_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._gathered_bytes = 0
        super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
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
