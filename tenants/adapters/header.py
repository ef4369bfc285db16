"""The header of an uploaded safetensors file, checked by our own rules before any tensor is looked at.

Format: 8 bytes little-endian header length, a JSON object, then the tensors' bytes (safetensors' README). The
library accepts duplicate keys, any name and NaN; this gate doesn't.
"""

import math
import re
import struct
from dataclasses import dataclass
from typing import Any, BinaryIO

from tenants.adapters.bounded_json import clip, clip_all, parse_object

MIN_HEADER_LIMIT_BYTES = 1 << 20
HEADER_BYTES_PER_TENSOR = 256
MAX_NAME_CHARS = 256
FEW = 16  # of tensors outside the layers
MAX_REASONS = 20  # of tensors that are malformed each in its own way
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}

_NAME = re.compile(r"[A-Za-z0-9_]+(?:\.[A-Za-z0-9_]+)*")
_FIELDS = {"dtype", "shape", "data_offsets"}
_MAX_DEPTH = 3  # {name: {"shape": […]}}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor: ``start`` and ``num_bytes`` place it in the whole file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


class BadHeader(Exception):
    """The file isn't safetensors as we take it; ``reasons`` says all that is wrong."""

    def __init__(self, reasons: list[str]) -> None:
        super().__init__("; ".join(reasons))
        self.reasons = reasons


def read_header(file: BinaryIO, file_bytes: int | None, max_tensors: int) -> list[TensorEntry]:
    """The tensors in the order of their bytes. Raises BadHeader. ``file_bytes`` None: the header alone is here yet.

    Entries are well-formed, named in our grammar, F32/F16/BF16, without holes, overlaps or trailing bytes. There may
    be twice ``max_tensors`` and a few: so that what is too much can be named (DoRA, biases, saved modules).
    """
    data_start, header = _read_json(file, file_bytes, max_tensors)
    metadata = header.pop("__metadata__", {})
    reasons = [] if _is_text_map(metadata) else ["safetensors: __metadata__ must map text to text"]
    if not header:
        reasons.append("safetensors: the file holds no tensors")
    if len(header) > 2 * max_tensors + FEW:
        reasons.append(f"safetensors: {len(header)} tensors, the model can take {max_tensors}")
    if reasons:
        raise BadHeader(reasons)
    entries, reasons = _entries(header, data_start)
    reasons += _layout_reasons(entries, data_start, file_bytes) if not reasons else []
    if reasons:
        raise BadHeader(reasons)
    return entries


def _read_json(file: BinaryIO, file_bytes: int | None, max_tensors: int) -> tuple[int, dict[str, Any]]:
    prefix = file.read(8)
    if len(prefix) < 8:
        raise BadHeader(["safetensors: the file is shorter than its length field"])
    (size,) = struct.unpack("<Q", prefix)
    limit = max(MIN_HEADER_LIMIT_BYTES, HEADER_BYTES_PER_TENSOR * max_tensors)
    if file_bytes is not None and 8 + size > file_bytes:
        raise BadHeader([f"safetensors: header length {size} is over the file's {file_bytes} bytes"])
    if size > limit:
        raise BadHeader([f"safetensors: header length {size} is over the limit of {limit} bytes"])
    data = file.read(size)
    if not data.startswith(b"{"):
        raise BadHeader(["safetensors: the header doesn't begin with {"])
    try:
        return 8 + size, parse_object(data, limit, _MAX_DEPTH)
    except (ValueError, RecursionError) as error:  # ValueError: also JSON and UTF-8
        raise BadHeader([f"safetensors: header: {error}"]) from error


def _entries(header: dict[str, Any], data_start: int) -> tuple[list[TensorEntry], list[str]]:
    entries: list[TensorEntry] = []
    reasons: list[str] = []
    bad_names = [name for name in header if len(name) > MAX_NAME_CHARS or not _NAME.fullmatch(name)]
    if bad_names:
        reasons.append(f"safetensors: names outside the grammar: {clip_all(bad_names)}")
    for name in header.keys() - set(bad_names):
        try:
            entries.append(_entry(name, header[name], data_start))
        except ValueError as error:
            reasons.append(f"safetensors: {clip(name)}: {error}")
    entries.sort(key=lambda entry: entry.start)
    return entries, sorted(reasons)[:MAX_REASONS]


def _entry(name: str, value: Any, data_start: int) -> TensorEntry:
    if not isinstance(value, dict) or set(value) != _FIELDS:
        raise ValueError("must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise ValueError(f"dtype {clip(str(dtype))} isn't one of {', '.join(ITEM_BYTES)}")
    if not _is_sizes(shape) or not 1 <= len(shape) <= 4 or min(shape) < 1:
        raise ValueError("shape must be 1 to 4 positive sizes")
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] < 0:
        raise ValueError("data_offsets must be two offsets")
    num_bytes = offsets[1] - offsets[0]
    if num_bytes != math.prod(shape) * ITEM_BYTES[dtype]:
        raise ValueError(f"{num_bytes} bytes for {dtype} of shape {shape}")
    return TensorEntry(name, dtype, tuple(shape), data_start + offsets[0], num_bytes)


def _layout_reasons(entries: list[TensorEntry], data_start: int, file_bytes: int | None) -> list[str]:
    """Tensors must follow each other exactly, from the header's end to the file's end."""
    end = data_start
    for entry in entries:
        if entry.start != end:
            kind = "a hole before" if entry.start > end else "an overlap at"
            return [f"safetensors: {kind} {clip(entry.name)}"]
        end += entry.num_bytes
    if file_bytes is None:
        return []
    if end > file_bytes:
        return [f"safetensors: tensors end at byte {end}, the file at {file_bytes}"]
    if end < file_bytes:
        return [f"safetensors: {file_bytes - end} trailing bytes after the last tensor"]
    return []


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(each) is int and each < 1 << 62 for each in value)


def _is_text_map(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(each, str) for each in value.values())
