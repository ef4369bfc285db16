"""W3C Trace Context: the caller's trace, if it sent one that is valid."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

_TRACEPARENT = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})(?P<rest>-.*)?"
)


@dataclass(frozen=True, slots=True)
class Parent:
    """Hex digits as sent. ``sampled``: its caller records this trace."""

    trace_id: str
    span_id: str
    sampled: bool


def parent_of(traceparents: Sequence[str]) -> Parent | None:
    """What the traceparent headers of a request say; None, hence a new trace, for more than one or none that is valid.

    Version ff is invalid, 00 ends with the flags, a later one may go on (https://www.w3.org/TR/trace-context/).
    """
    found = _TRACEPARENT.fullmatch(traceparents[0].strip(" \t")) if len(traceparents) == 1 else None
    if found is None or found["version"] == "ff" or (found["version"] == "00" and found["rest"]):
        return None
    if not int(found["trace"], 16) or not int(found["span"], 16):
        return None
    return Parent(found["trace"], found["span"], bool(int(found["flags"], 16) & 1))
