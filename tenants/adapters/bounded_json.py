"""JSON from an uploader: bounded in size and depth, no duplicate keys, no NaN, before anything is built from it."""

import json
import re
from typing import Any

_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"', re.DOTALL)
_BRACKET = re.compile(rb"[\[\]{}]")


def parse_object(data: bytes, max_bytes: int, max_depth: int) -> dict[str, Any]:
    """The object that ``data`` holds. Raises ValueError saying what is wrong, in words for the uploader."""
    if len(data) > max_bytes:
        raise ValueError(f"{len(data)} bytes, {max_bytes} allowed")
    if _is_deeper(data, max_depth):
        raise ValueError(f"nested deeper than {max_depth}")
    value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    if not isinstance(value, dict):
        raise ValueError("not an object")
    return value


def clip(text: str, max_chars: int = 120) -> str:
    """Text of an uploader, safe to put into a message: printable ASCII, bounded."""
    shown = text[:max_chars].encode("unicode_escape").decode("ascii")
    return shown if len(text) <= max_chars else shown + "…"


def clip_all(texts: list[str], max_texts: int = 20) -> str:
    """The first of them, and how many there are more."""
    shown = ", ".join(clip(text) for text in texts[:max_texts])
    more = len(texts) - max_texts
    return f"{shown} and {more} more" if more > 0 else shown


def _is_deeper(data: bytes, max_depth: int) -> bool:
    """Whether brackets outside strings nest deeper; linear, and right for every text that is JSON."""
    depth = 0
    for match in _BRACKET.finditer(_STRING.sub(b"", data)):
        depth += 1 if match.group() in b"[{" else -1
        if depth > max_depth:
            return True
    return False


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for name, value in pairs:
        if name in seen:
            raise ValueError(f"duplicate key {clip(name)}")
        seen[name] = value
    return seen


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
