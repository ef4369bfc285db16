"""An adapter's files on their way in: small ones in memory, the weights straight into a staged file, all bounded.

Two ways: one multipart body, or a plain body for each file and a commit. What is refused half-way is answered at once;
the server reads on and drops the rest, so that a caller who still sends sees the answer.
"""

import asyncio
import hashlib
import struct
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, TypeAlias

from multipart import MultipartError, MultipartSegment, PushMultipartParser, parse_options_header

from gateway.adapters.check import refusal
from gateway.call import Call
from gateway.errors import ApiError, invalid

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FILES = (CONFIG, WEIGHTS)
FIELDS = ("name", "base_model", "expected_version")
MAX_CONFIG_BYTES = 1 << 20
MAX_FIELD_BYTES = 1024
MAX_FRAME_BYTES = 64 << 10  # of boundaries and part headers
MAX_PARTS = 16
WRITE_BYTES = 1 << 20
EARLY_LOOK_BYTES = 8 << 20  # a body so large is worth a look at its header before the rest is read
MAX_HEADER_BYTES = 64 << 20  # no model of ours takes a header as long as this

LookAtHeader: TypeAlias = Callable[[Path, int | None], Awaitable[None]]  # the file so far, its whole size if known


@dataclass(slots=True)
class Upload:
    """What was sent beside the weights, which were written to the file that the caller gave."""

    fields: dict[str, str] = field(default_factory=dict)
    config: bytes = b""


@dataclass(frozen=True, slots=True)
class Received:
    """A file that came whole."""

    size_bytes: int
    sha256: str


async def read_upload(call: Call, weights: Path, max_weights_bytes: int, look: LookAtHeader) -> Upload:
    """Reads a multipart body to its end. Raises ApiError 400, 413, 415, 422 (parts that don't belong), OSError."""
    kind, options = parse_options_header(call.header(b"content-type") or "")
    if kind != "multipart/form-data" or not options.get("boundary"):
        raise ApiError("Send the adapter as multipart/form-data.", code="unsupported_media_type")
    limit = max_weights_bytes + MAX_CONFIG_BYTES + MAX_FRAME_BYTES
    if (call.content_length or 0) > limit:
        raise too_large(WEIGHTS, max_weights_bytes)
    with weights.open("wb") as file:
        sink = WeightsSink(file, weights, max_weights_bytes, _early(call, None, look))
        reader = _Parts(sink)
        with _form(options["boundary"]) as parser:
            async for chunk in call.chunks(limit):
                for item in parser.parse(chunk):
                    await reader.take(item)
        await sink.flush()
    return reader.upload


async def read_file(call: Call, name: str, path: Path, max_weights_bytes: int, look: LookAtHeader) -> Received:
    """Reads a plain body to its end, which is the file ``name``. Raises ApiError 400, 413, 422, OSError."""
    limit = max_weights_bytes if name == WEIGHTS else MAX_CONFIG_BYTES
    size = call.content_length
    if (size or 0) > limit:
        raise too_large(name, limit)
    with path.open("wb") as file:
        sink = WeightsSink(file, path, limit, _early(call, size, look) if name == WEIGHTS else None)
        async for chunk in call.chunks(limit):
            await sink.write(chunk)
        await sink.flush()
    if not sink.num_bytes:
        raise invalid(f"'{name}' is empty.", name)
    return Received(sink.num_bytes, sink.sha256)


@contextmanager
def _form(boundary: str) -> Iterator[PushMultipartParser]:
    """Raises ApiError 400 for what is no multipart."""
    try:
        with PushMultipartParser(boundary, max_segment_count=MAX_PARTS) as parser:
            yield parser
    except MultipartError as error:
        raise invalid(f"The multipart body is malformed: {error}") from None


def _early(call: Call, file_bytes: int | None, look: LookAtHeader) -> Callable[[Path], Awaitable[None]] | None:
    """A look at the header of a body that is long, or that does not say how long it is."""
    if call.content_length is not None and call.content_length < EARLY_LOOK_BYTES:
        return None
    return lambda path: look(path, file_bytes)


class WeightsSink:
    """A file that is written as it comes, and hashed, and looked at as soon as its header is whole."""

    def __init__(
        self, file: BinaryIO, path: Path, max_bytes: int, look: Callable[[Path], Awaitable[None]] | None
    ) -> None:
        self.num_bytes = 0
        self._file = file
        self._path = path
        self._max_bytes = max_bytes
        self._look = look
        self._header_end: int | None = None  # not known yet
        self._digest = hashlib.sha256()
        self._pending = bytearray()

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    async def write(self, data: bytes | bytearray) -> None:
        """Raises ApiError 413, 422; OSError."""
        self.num_bytes += len(data)
        if self.num_bytes > self._max_bytes:
            raise too_large(WEIGHTS, self._max_bytes)
        self._pending += data
        if len(self._pending) >= WRITE_BYTES:
            await self.flush()

    async def flush(self) -> None:
        data, self._pending = self._pending, bytearray()
        if not data:
            return
        if self._look is not None and self._header_end is None:
            self._header_end = _header_end(data)
        await asyncio.to_thread(self._append, data)
        if self._look is not None and self.num_bytes >= (self._header_end or 0):
            look, self._look = self._look, None
            await look(self._path)

    def _append(self, data: bytearray) -> None:
        self._digest.update(data)
        self._file.write(data)
        self._file.flush()


def _header_end(first_bytes: bytearray) -> int:
    """Where a safetensors file's header ends. Raises ApiError 422 for one that no adapter has."""
    if len(first_bytes) < 8:
        raise refusal(["safetensors: the file is shorter than its length field"])
    (size,) = struct.unpack_from("<Q", first_bytes)
    if size > MAX_HEADER_BYTES:
        raise refusal([f"safetensors: header length {size} is over the limit of {MAX_HEADER_BYTES} bytes"])
    return 8 + size


class _Parts:
    """Takes the parser's events, one part after the other."""

    def __init__(self, weights: WeightsSink) -> None:
        self.upload = Upload()
        self._weights = weights
        self._name = ""
        self._data = bytearray()
        self._seen: set[str] = set()

    async def take(self, item: MultipartSegment | bytearray | bytes | None) -> None:
        if isinstance(item, MultipartSegment):
            self._begin(item)
        elif item is None:
            self._end()
        else:
            await self._add(item)

    def _begin(self, segment: MultipartSegment) -> None:
        name = segment.name or ""
        if name in ("file", "files") and segment.filename:
            name = segment.filename
        if name not in (*FIELDS, *FILES):
            raise refusal([f"a part named {name[:80]!r} does not belong to an adapter"])
        if name in self._seen:
            raise invalid(f"'{name}' is given twice.", name)
        self._seen.add(name)
        self._name, self._data = name, bytearray()

    async def _add(self, data: bytearray | bytes) -> None:
        if self._name == WEIGHTS:
            await self._weights.write(data)
            return
        self._data += data
        if len(self._data) > (MAX_CONFIG_BYTES if self._name == CONFIG else MAX_FIELD_BYTES):
            raise ApiError(f"'{self._name}' is too large.", code="payload_too_large", param=self._name)

    def _end(self) -> None:
        if self._name == CONFIG:
            self.upload.config = bytes(self._data)
        elif self._name in FIELDS:
            self.upload.fields[self._name] = self._data.decode("utf-8", "replace")
        self._name = ""


def too_large(name: str, max_bytes: int) -> ApiError:
    return ApiError(f"'{name}' may have at most {max_bytes} bytes.", code="payload_too_large", param=name)
