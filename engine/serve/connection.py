"""One gateway's (or observer's) socket at the engine: who it is, frames in, bounded frames out."""

import asyncio
import logging
import os
import socket
import struct
from typing import Protocol, cast

from engine import wire

logger = logging.getLogger("engine.connection")

MAX_BUFFERED_BYTES = 8 << 20  # of what a gateway hasn't read, beside the largest message of it; over it, it is cut off
_CREDENTIALS = struct.Struct("iII")  # struct ucred: pid, uid, gid (unix(7))


class Listener(Protocol):
    """Who is told what happens on a connection; everything on the event loop."""

    def greeted(self, connection: "Connection") -> None: ...
    def received(self, connection: "Connection", message: wire.ToEngine) -> None: ...
    def lost(self, connection: "Connection") -> None: ...


class Connection(asyncio.Protocol):
    """Its first frame must be a Hello of a version we accept; anything that isn't our protocol ends it, and
    nothing else. ``hello`` is None until then."""

    def __init__(self, listener: Listener) -> None:
        self.hello: wire.Hello | None = None
        self._listener = listener
        self._frames = wire.Frames()
        self._transport: asyncio.Transport | None = None
        self._num_holds = 0
        self._largest_bytes = 0  # of the messages since the buffer was empty: a long prompt's scores are 10 MB and more

    @property
    def is_gateway(self) -> bool:
        return self.hello is not None and self.hello.role == "gateway" and self._transport is not None

    @property
    def name(self) -> str:
        return self.hello.peer[:64] if self.hello else "a stranger"

    @property
    def buffered_bytes(self) -> int:
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        uid = peer_uid(self._transport.get_extra_info("socket"))
        if uid != os.getuid():
            logger.warning("refused a connection of user %d", uid)
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._listener.lost(self)

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._frames.feed(data):
                if self._transport is None or self._transport.is_closing():
                    return
                self._receive(wire.decode_to_engine(body))
        except wire.WireError as error:
            logger.warning("closed the connection of %r: %s", self.name, error)
            self.abort()

    def send(self, *messages: wire.ToGateway) -> None:
        """Queues messages as one write, since each wakes the peer; dropped when the connection is gone. A peer that
        doesn't read is disconnected."""
        if self._transport is None or self._transport.is_closing():
            return
        buffered = self.buffered_bytes
        if buffered > MAX_BUFFERED_BYTES + self._largest_bytes:
            logger.warning("closed the connection of %r: it doesn't read", self.name)
            self._transport.abort()
            return
        data = b"".join(map(wire.encode, messages))
        self._largest_bytes = max(len(data), self._largest_bytes if buffered else 0)
        self._transport.write(data)

    def hold(self) -> None:
        """Stops reading until as many ``release`` have come: its sender waits then."""
        self._num_holds += 1
        if self._transport is not None:
            self._transport.pause_reading()

    def release(self) -> None:
        self._num_holds -= 1
        if self._transport is not None and not self._num_holds:
            self._transport.resume_reading()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _receive(self, message: wire.ToEngine) -> None:
        if self.hello is not None and not isinstance(message, wire.Hello):
            self._listener.received(self, message)
        elif self.hello is None and isinstance(message, wire.Hello):
            self.hello = message
            self._listener.greeted(self)
        else:
            raise wire.WireError("a connection begins with one hello")

    def close_after_sending(self) -> None:
        if self._transport is not None:
            self._transport.close()


def peer_uid(peer: socket.socket) -> int:
    """The user at the other end of a unix socket."""
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(credentials)[1]
