"""Tools: what may be called, how it is told to a model, and how its calls are found in what it says.

A call is written as ``<tool_call>\\n{"name": "NAME", "arguments": {…}}\\n</tool_call>``, the form of Hermes and Qwen;
calls follow one another by a line break. The grammar allows nothing else behind ``<tool_call>``, to the letter, so that
reading it is a matter of position. To templates that know this form tools are given as they are; with others they are
described in the system message.
"""

import json
import secrets
import string
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from gateway.errors import invalid
from gateway.schemas import ChatRequest, FunctionTool, NamedTool

CALL_OPEN = "<tool_call>"
CALL_HEAD, CALL_MIDDLE, CALL_CLOSE = '\n{"name": "', '", "arguments": ', "}\n</tool_call>"
MAX_CALLS = 16
_ID_LETTERS = string.ascii_letters + string.digits
_PREAMBLE = """You can call functions. Each line between <tools> and </tools> describes one in JSON:
<tools>
{tools}
</tools>
To call a function, write its name and its arguments as JSON, in exactly this form:
<tool_call>
{{"name": "NAME", "arguments": {{"PARAMETER": "VALUE"}}}}
</tool_call>"""


@dataclass(frozen=True, slots=True)
class Tools:
    """``callable`` are those that the answer may call, none for "none"; ``forced``: it has to; ``named``: the one."""

    functions: tuple[FunctionTool, ...]
    callable: tuple[FunctionTool, ...]
    forced: bool
    named: bool
    parallel: bool

    @property
    def may_call(self) -> bool:
        return bool(self.callable)

    def told(self) -> list[dict[str, Any]]:
        """As templates take them."""
        return [{"type": "function", "function": _told(function)} for function in self.functions]


def tools_of(request: ChatRequest) -> Tools | None:
    """None where none are given. Raises ApiError 400."""
    choice = request.tool_choice
    if not request.tools:
        if choice not in (None, "none", "auto"):
            raise invalid("'tool_choice' is only allowed when 'tools' are specified.", "tool_choice")
        return None
    functions = tuple(tool.function for tool in request.tools)
    if len({function.name for function in functions}) < len(functions):
        raise invalid("Names of functions must differ.", "tools")
    named = isinstance(choice, NamedTool)
    wanted = _named(choice.function.name, functions) if named else () if choice == "none" else functions
    parallel = request.parallel_tool_calls is not False and not named
    return Tools(functions, wanted, named or choice == "required", named, parallel)


def _named(name: str, functions: tuple[FunctionTool, ...]) -> tuple[FunctionTool, ...]:
    found = tuple(function for function in functions if function.name == name)
    if not found:
        raise invalid(f"'tool_choice' names '{name}', which 'tools' does not.", "tool_choice")
    return found


def with_preamble(messages: list[dict[str, Any]], told: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as templates know them, the tools described at the end of the system message."""
    lines = (json.dumps(tool["function"], ensure_ascii=False) for tool in told)
    preamble = _PREAMBLE.format(tools="\n".join(lines))
    if messages and messages[0]["role"] == "system":
        first = messages[0] | {"content": "\n\n".join(filter(None, (messages[0]["content"], preamble)))}
        return [first, *messages[1:]]
    return [{"role": "system", "content": preamble}, *messages]


def _told(function: FunctionTool) -> dict[str, Any]:
    fields = {"name": function.name, "description": function.description, "parameters": function.parameters}
    return {name: value for name, value in fields.items() if value is not None}


# ── reading ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Said:
    """Text of the answer beside its calls."""

    text: str


@dataclass(frozen=True, slots=True)
class Called:
    """A call begins. ``index`` counts the calls of a choice."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class Argued:
    """More of a call's arguments: a piece of JSON text."""

    index: int
    text: str


Event: TypeAlias = Said | Called | Argued


class ToolReader:
    """One choice's text in pieces → what it says and calls, as early as it is certain.

    White space around calls belongs to nothing. A call that was cut off before its arguments is not told.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        self._held = ""  # not yet certain, or not yet whole
        self._read = self._read_text
        self._json = _ObjectEnd()

    def feed(self, text: str) -> Iterator[Event]:
        self._held += text
        while True:
            before = self._read
            yield from before()
            if self._read == before:
                return

    def finish(self) -> Iterator[Event]:
        """No text will come."""
        if self._read == self._read_text and self._held and not self.num_calls:
            yield Said(self._held)
        self._held = ""

    def _read_text(self) -> Iterator[Event]:
        text, opened, rest = self._held.partition(CALL_OPEN)
        if opened:
            said, self._held, self._read = text.rstrip(), rest, self._read_head
        else:
            keep = _possible_open(text)
            said, self._held = text[: len(text) - keep], text[len(text) - keep :]
        if said:
            yield Said(said)

    def _read_head(self) -> Iterator[Event]:
        head, found, rest = self._held.partition(CALL_MIDDLE)
        if found:
            self._held, self._read, self._json = rest, self._read_arguments, _ObjectEnd()
            self.num_calls += 1
            yield Called(self.num_calls - 1, _new_call_id(), head.removeprefix(CALL_HEAD))

    def _read_arguments(self) -> Iterator[Event]:
        end = self._json.find(self._held)
        text, self._held = self._held[:end], self._held[end:]
        if self._json.found:
            self._read = self._read_close
        if text:
            yield Argued(self.num_calls - 1, text)

    def _read_close(self) -> Iterator[Event]:
        if len(self._held) >= len(CALL_CLOSE):
            self._held, self._read = self._held[len(CALL_CLOSE) :], self._read_text
        yield from ()


class _ObjectEnd:
    """Finds where the JSON object ends that a text in pieces begins with."""

    def __init__(self) -> None:
        self.found = False
        self._depth = 0
        self._in_string = self._escaped = False

    def find(self, text: str) -> int:
        """The index in the next piece behind the object; its length when it goes on."""
        for i, char in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped, self._in_string = char == "\\", char != '"'
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if not self._depth:
                    self.found = True
                    return i + 1
        return len(text)


def _possible_open(text: str) -> int:
    """How many characters at the end may be white space before a call, and the beginning of its mark."""
    length = next((n for n in range(len(CALL_OPEN) - 1, 0, -1) if text.endswith(CALL_OPEN[:n])), 0)
    return len(text) - len(text[: len(text) - length].rstrip())


def _new_call_id() -> str:
    return "call_" + "".join(secrets.choice(_ID_LETTERS) for _ in range(24))
