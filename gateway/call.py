"""One HTTP request as the request path sees it: its names and times, its body, its caller's presence, its answer."""

import asyncio
import hashlib
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from litestar.types import Receive, Scope, Send

from gateway.errors import ApiError
from gateway.tracing.context import parent_of
from tenants.directory import Principal

MAX_DISCARDED_BYTES = 64 << 20  # of a body that is too large: read and dropped, so that the caller sees the 413
Headers: TypeAlias = list[tuple[bytes, bytes]]
_LABEL = re.compile(r"[\x20-\x7e]{1,128}")


def new_request_id() -> str:
    """A UUIDv7 (RFC 9562): 48 bits of Unix milliseconds, then chance."""
    value = (time.time_ns() // 1_000_000) << 80 | secrets.randbits(80)
    value = value & ~(0xF << 76) | 0x7 << 76
    digits = f"{value & ~(0x3 << 62) | 0x2 << 62:032x}"
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


@dataclass(slots=True)
class Call:
    """``read_ns`` is when the body was fully read (monotonic): where a request's total begins.

    ``answering`` says that the status line has been sent. ``label`` is the caller's own X-Request-ID (or
    X-Client-Request-ID), '' when absent or unfit. ``parent_span`` and ``sampled`` are of a valid traceparent; without
    one the trace begins here. ``given`` are the request's headers, the first of each name; ``headers`` go with the
    answer, whatever it will be. ``is_replay``: it is the answer that an earlier request got, and ``request_id`` is that
    one's. ``body_hash`` is there when an Idempotency-Key is. ``principal`` is who calls, once that is known.
    """

    scope: Scope
    receive: Receive
    send: Send
    send_body: Send
    given: dict[bytes, bytes]
    request_id: str = field(default_factory=new_request_id)
    label: str = ""
    trace_id: str = field(default_factory=lambda: secrets.token_hex(16))
    parent_span: str = ""
    sampled: bool = True
    idempotency_key: str | None = None
    body_hash: bytes = b""
    started_ns: int = field(default_factory=time.monotonic_ns)
    started_unix_ns: int = field(default_factory=time.time_ns)
    read_ns: int = 0
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    on_gone: Callable[[], None] | None = None
    answering: bool = False
    body_ended: bool = False
    headers: dict[str, str] = field(default_factory=dict)
    on_whole: Callable[[bytes | None], Awaitable[None]] | None = None
    is_replay: bool = False
    principal: Principal | None = None

    @classmethod
    def of(cls, scope: Scope, receive: Receive, send: Send) -> "Call":
        call = cls(scope, receive, send, send, dict(reversed(list(scope["headers"]))))
        label = call.header(b"x-request-id") or call.header(b"x-client-request-id") or ""
        call.label = label if _LABEL.fullmatch(label) else ""
        call.idempotency_key = call.header(b"idempotency-key")
        parent = parent_of(call.headers_of(b"traceparent"))
        if parent is not None:
            call.trace_id, call.parent_span, call.sampled = parent.trace_id, parent.span_id, parent.sampled
        return call

    def header(self, name: bytes) -> str | None:
        """A request header by its lower-case name; the first of several."""
        value = self.given.get(name)
        return None if value is None else value.decode("latin-1")

    def headers_of(self, name: bytes) -> list[str]:
        """All request headers of that lower-case name."""
        if name not in self.given:
            return []
        return [value.decode("latin-1") for key, value in self.scope["headers"] if key == name]

    @property
    def content_length(self) -> int | None:
        """How long the body says that it is; None when it comes in chunks. (The parser takes digits only.)"""
        length = self.header(b"content-length")
        return int(length) if length else None

    def unix_ns(self, monotonic_ns: int) -> int:
        """A time of this process's monotonic clock on the wall clock of the call's start."""
        return self.started_unix_ns + monotonic_ns - self.started_ns

    def over(self, receive: Receive, send: Send) -> "Call":
        """The same call on the channels that the framework gives its handler; it has to see how an answer begins."""
        self.receive, self.send = receive, send
        return self

    async def body(self, max_bytes: int) -> bytes:
        """The whole body. Raises ApiError 413 over ``max_bytes``, 400 when the caller left before its end."""
        await self._refuse_encoded()
        size, parts = 0, []
        while not self.body_ended:
            parts.append(await self._part(size, max_bytes))
            size += len(parts[-1])
        body = b"".join(parts)
        self.read_ns = time.monotonic_ns()
        if self.idempotency_key is not None:
            self.body_hash = hashlib.sha256(body).digest()
        return body

    async def chunks(self, max_bytes: int) -> AsyncIterator[bytes]:
        """The body as it comes. Raises as ``body`` does, and 415 for a compressed one; what is refused is read on, so
        that the refusal is seen."""
        await self._refuse_encoded()
        size = 0
        while not self.body_ended:
            chunk = await self._part(size, max_bytes)
            size += len(chunk)
            yield chunk

    async def _refuse_encoded(self) -> None:
        if (self.header(b"content-encoding") or "identity").lower() != "identity":
            await self.discard()
            raise ApiError("Send the body as it is, without a Content-Encoding.", code="unsupported_media_type")

    async def _part(self, size: int, max_bytes: int) -> bytes:
        part = await self._chunk()
        if size + len(part) > max_bytes:
            await self.discard()
            raise ApiError(f"The request body is larger than {max_bytes} bytes.", code="payload_too_large")
        return part

    async def discard(self) -> None:
        """Reads the rest of the body, up to MAX_DISCARDED_BYTES, and drops it: who still sends sees no answer."""
        size = 0
        while not self.body_ended and size <= MAX_DISCARDED_BYTES:
            size += len(await self._chunk())

    async def _chunk(self) -> bytes:
        message: Any = await self.receive()
        if message["type"] == "http.disconnect":
            self.gone.set()
            self.body_ended = True
            raise ApiError("The request body ended early.", code="invalid_json")
        self.body_ended = not message.get("more_body", False)
        return message.get("body", b"")

    def leave(self) -> None:
        """The caller has left: nothing is sent any more, and whoever works for it may stop."""
        self.gone.set()
        if self.on_gone is not None:
            self.on_gone()

    def end(self) -> None:
        """It is answered. What refers to it lets go of it, and it of that: it is freed with its last reader, and no
        collector has to look for it."""
        del self.scope["state"]["call"]
        self.receive = self.send = self.send_body = _ended
        self.on_whole = None

    async def whole(self, body: bytes | None) -> None:
        """Tells whoever asked for it that the answer is complete, before its last byte is sent; None: a stream."""
        if self.on_whole is not None:
            await self.on_whole(body)

    async def begin(self, status: int, headers: Headers) -> None:
        """Status and headers; nothing when the caller has left."""
        self.answering = True
        if not self.gone.is_set():
            await self.send({"type": "http.response.start", "status": status, "headers": headers})

    async def answer(self, body: bytes) -> None:
        """200 with a JSON body, and that is all."""
        await self.begin(200, [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))])
        await self.write(body, last=True)

    async def write(self, data: bytes, *, last: bool = False) -> None:
        """A piece of the body, flushed; straight to the server, since all layers between look at heads alone."""
        if not self.gone.is_set():
            await self.send_body({"type": "http.response.body", "body": data, "more_body": not last})


async def _ended(*_: Any) -> Any:
    raise AssertionError("a call is used after its end")


def call_of(scope: Scope) -> Call:
    """The Call that ``named`` made for this request."""
    return scope["state"]["call"]


def caller_left(scope: Any) -> None:
    """The server's word that the connection of this request ended before its answer did."""
    call = scope.get("state", {}).get("call")
    if call is not None:
        call.leave()


def named(app: Any, observe: Callable[[Call, int], None] | None = None) -> Any:
    """Wraps an ASGI app: each HTTP request gets a Call, each answer its ``x-request-id``, times, and ``headers``."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        call = Call.of(scope, receive, send)
        scope.setdefault("state", {})["call"] = call

        async def send_named(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *_names(call)]
                if observe is not None:
                    observe(call, message["status"])
            await send(message)

        try:
            await app(scope, receive, send_named)
        finally:
            call.end()

    return serve


def _names(call: Call) -> Headers:
    elapsed_ms = (time.monotonic_ns() - call.started_ns) // 1_000_000
    names = {"x-request-id": call.request_id, "openai-processing-ms": str(elapsed_ms)}
    if call.label:
        names["x-client-request-id"] = call.label
    return [(name.encode(), value.encode()) for name, value in (names | call.headers).items()]
