"""A multipart adapter upload: small fields in memory, the weights straight into a staged file, both bounded."""

import asyncio
import errno
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from multipart import MultipartError, MultipartSegment, PushMultipartParser, parse_options_header

from gateway.call import Call
from gateway.errors import ApiError, invalid

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FIELDS = ("name", "base_model", "expected_version")
MAX_CONFIG_BYTES = 1 << 20
MAX_FIELD_BYTES = 1024
MAX_FRAME_BYTES = 64 << 10  # of boundaries and part headers
MAX_PARTS = 16
WRITE_BYTES = 1 << 20


@dataclass(slots=True)
class Upload:
    """What was sent. ``weights_bytes`` have been written to the file that the caller gave."""

    fields: dict[str, str] = field(default_factory=dict)
    config: bytes = b""
    weights_bytes: int = 0


async def read_upload(call: Call, weights: Path, max_weights_bytes: int) -> Upload:
    """Reads the body to its end. Raises ApiError 400, 413, 415, 422 (parts that don't belong), 507."""
    kind, options = parse_options_header(call.header(b"content-type") or "")
    if kind != "multipart/form-data" or not options.get("boundary"):
        raise ApiError("Send the adapter as multipart/form-data.", code="unsupported_media_type")
    limit = max_weights_bytes + MAX_CONFIG_BYTES + MAX_FRAME_BYTES
    if int(call.header(b"content-length") or 0) > limit:
        await call.discard()
        raise _too_large(max_weights_bytes)
    try:
        with weights.open("wb") as file:
            reader = _Parts(file, max_weights_bytes)
            with PushMultipartParser(options["boundary"], max_segment_count=MAX_PARTS) as parser:
                async for chunk in call.chunks(limit):
                    for item in parser.parse(chunk):
                        await reader.take(item)
            await reader.flush()
    except MultipartError as error:
        raise invalid(f"The multipart body is malformed: {error}") from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ApiError("There is no room for this adapter at the moment.", code="storage_full") from None
        raise
    return reader.upload


class _Parts:
    """Takes the parser's events, one part after the other."""

    def __init__(self, file: BinaryIO, max_weights_bytes: int) -> None:
        self.upload = Upload()
        self._file = file
        self._max_weights_bytes = max_weights_bytes
        self._name = ""
        self._data = bytearray()
        self._seen: set[str] = set()

    async def take(self, item: MultipartSegment | bytearray | bytes | None) -> None:
        if isinstance(item, MultipartSegment):
            self._begin(item)
        elif item is None:
            await self._end()
        else:
            await self._add(item)

    async def flush(self) -> None:
        """The rest of the weights to disk."""
        if self._name == WEIGHTS and self._data:
            data, self._data = bytes(self._data), bytearray()
            await asyncio.to_thread(self._file.write, data)

    def _begin(self, segment: MultipartSegment) -> None:
        name = segment.name or ""
        if name in ("file", "files") and segment.filename:
            name = segment.filename
        if name not in (*FIELDS, CONFIG, WEIGHTS):
            reason = f"a part named {name[:80]!r} does not belong to an adapter"
            raise ApiError(f"The adapter is refused: {reason}", code="invalid_adapter", reasons=(reason,))
        if name in self._seen:
            raise invalid(f"'{name}' is given twice.", name)
        self._seen.add(name)
        self._name, self._data = name, bytearray()

    async def _add(self, data: bytearray | bytes) -> None:
        self._data += data
        if self._name == WEIGHTS:
            self.upload.weights_bytes += len(data)
            if self.upload.weights_bytes > self._max_weights_bytes:
                raise _too_large(self._max_weights_bytes)
            if len(self._data) >= WRITE_BYTES:
                await self.flush()
        elif len(self._data) > (MAX_CONFIG_BYTES if self._name == CONFIG else MAX_FIELD_BYTES):
            raise ApiError(f"'{self._name}' is too large.", code="payload_too_large", param=self._name)

    async def _end(self) -> None:
        if self._name == WEIGHTS:
            await self.flush()
        elif self._name == CONFIG:
            self.upload.config = bytes(self._data)
        else:
            self.upload.fields[self._name] = self._data.decode("utf-8", "replace")
        self._name = ""


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(f"An adapter may have at most {max_bytes} bytes.", code="payload_too_large", param=WEIGHTS)
