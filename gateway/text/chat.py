"""Chat messages → token ids through the model's own template, in a sandbox.

What a caller wrote can never become a control token. In every string of the messages a mark (a character that
occurs nowhere in them) is put behind each character that a control token could begin with; the template then
sees the caller's own text in its place, so that ``trim``, ``in`` and ``startswith`` work. Control tokens are looked
for in the rendered text with the marks still in it, so only the template's own are found; between them everything
is encoded as ordinary text, marks removed, and with the same seams as in one string.
"""

import json
import re
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.errors import ApiError, invalid
from gateway.schemas import Message, Part
from gateway.text.tokenizer import ModelTokenizer
from gateway.text.tools import CALL_OPEN, with_preamble

MAX_RENDERED_CHARS = 16 << 20  # a template may repeat what it is given; nothing sane comes near
_MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # Unicode noncharacters
_ANY_MARK = re.compile(f"[{_MARKS[0]}-{_MARKS[-1]}]")


class ChatTemplate:
    """One model's template. ``tokens`` are its variables: bos_token, eos_token, …"""

    def __init__(self, source: str, tokens: dict[str, str], tokenizer: ModelTokenizer) -> None:
        self._template = _environment().from_string(source)
        self._template.globals = dict(self._template.globals)  # a rendering reads all of them, slowly from their chain
        self._tokens = tokens
        self._knows_calls = "tool_calls" in source
        self._knows_tools = CALL_OPEN in source and "tools" in source
        self._tokenizer = tokenizer
        self._control = _alternatives(tokenizer.control)
        self._marks = _mark_finder(tokenizer)
        # what it writes itself between control tokens, encoded
        self._own = {part: tokenizer.encode(part) for part in self._own_parts()}

    def render(self, messages: list[Message], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        """The prompt's ids, ending where the assistant's answer begins.

        Raises ApiError 400 for messages that the template refuses.
        """
        told = list(tools)
        plain = [_plain(message, i) for i, message in enumerate(messages)]
        if not self._knows_calls:
            plain = list(map(_with_calls_as_text, plain))
        if told and not self._knows_tools:
            plain, told = with_preamble(plain, told), []
        words = {"messages": plain} | ({"tools": told} if told else {})
        said = "".join(_strings(words))
        if self._marks.search(said) is None:
            return self._encode(self._render(words), "")
        mark = _unused_mark(said)
        marked = _map_strings(words, lambda text: self._marks.sub(lambda m: m[1] or m[0] + mark, text))
        return self._encode(self._render(marked), mark)

    def _render(self, words: dict[str, Any]) -> str:
        pieces, size = [], 0
        try:
            for piece in self._template.generate(**words, add_generation_prompt=True, **self._tokens):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_RENDERED_CHARS:
                    raise invalid("The rendered messages are too long.", "messages")
        except ApiError:
            raise
        except Exception as error:  # a template is a program: whatever it raises is about these messages
            reason = error.message if isinstance(error, TemplateError) else type(error).__name__
            raise invalid(f"The model's chat template refuses these messages: {reason}", "messages") from None
        return "".join(pieces)

    def _encode(self, text: str, mark: str) -> list[int]:
        ids: list[int] = []
        for i, part in enumerate(self._control.split(text)):
            if i % 2:
                ids.append(self._tokenizer.control[part])
            elif part:
                ids += self._own.get(part) or self._tokenizer.encode(part.replace(mark, ""))
        return ids

    def _own_parts(self) -> set[str]:
        """Of a chat without a word; none of a template that refuses it."""
        try:
            text = self._render({"messages": [{"role": "user", "content": ""}]})
        except ApiError:
            return set()
        return set(self._control.split(text)[::2]) - {""}


def _environment() -> ImmutableSandboxedEnvironment:
    def refuse(message: str) -> NoReturn:
        raise TemplateError(message)

    def tojson(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _plain(message: Message, index: int) -> dict[str, Any]:
    """A message as templates know it: one string of content, never null; absent fields absent."""
    role = "system" if message.role == "developer" else message.role
    result: dict[str, Any] = {"role": role, "content": _content(message, index)}
    if message.name:
        result["name"] = message.name
    if message.tool_call_id:
        result["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        result["tool_calls"] = [
            {"id": c.id or "", "type": c.type, "function": {"name": c.function.name, "arguments": _arguments(c)}}
            for c in message.tool_calls
        ]
    return result


def _with_calls_as_text(message: dict[str, Any]) -> dict[str, Any]:
    """For templates that pass over tool calls: they follow the content, in the words of most models with tools."""
    if "tool_calls" not in message:
        return message
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in message["tool_calls"]]
    texts = [message["content"], *(f"<tool_call>\n{call}\n</tool_call>" for call in calls)]
    return message | {"content": "\n".join(filter(None, texts))}


def _content(message: Message, index: int) -> str:
    where = f"messages[{index}].content"
    if isinstance(message.content, str):
        return message.content
    if message.content is None:
        if message.role == "assistant":
            return ""
        raise invalid(f"Invalid value for '{where}': it is required for the role '{message.role}'.", where)
    return "".join(_part(part, message.role, f"{where}[{i}]") for i, part in enumerate(message.content))


def _part(part: Part, role: str, where: str) -> str:
    """The text of a part of a message's content."""
    if part.type != "text" and (part.type, role) != ("refusal", "assistant"):
        raise invalid(f"Content of type '{part.type[:64]}' is not supported by this model.", f"{where}.type")
    text = part.text if part.type == "text" else part.refusal
    if text is None:
        raise invalid(f"Invalid value for '{where}.{part.type}': it is required.", f"{where}.{part.type}")
    return text


def _arguments(call: Any) -> Any:
    """A call's arguments as the object that they encode, which is what templates expect; else the text."""
    try:
        return json.loads(call.function.arguments)
    except (ValueError, RecursionError):
        return call.function.arguments


def _strings(value: Any) -> list[str]:
    """Every string in messages and tools, names of fields too, in no order."""
    found, left = list[str](), [value]
    while left:
        each = left.pop()
        if isinstance(each, str):
            found.append(each)
        elif isinstance(each, dict):
            found += each
            left += each.values()
        elif isinstance(each, list):
            left += each
    return found


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_map_strings(item, change) for item in value]
    if isinstance(value, dict):
        return {change(key): _map_strings(item, change) for key, item in value.items()}
    return value


def _unused_mark(said: str) -> str:
    seen = set(_ANY_MARK.findall(said))
    for mark in _MARKS:
        if mark not in seen:
            return mark
    raise invalid("The messages contain too many Unicode noncharacters.", "messages")


def _alternatives(texts: Any) -> re.Pattern[str]:
    """Splits at the longest of ``texts``; a pattern that never matches when there are none."""
    longest_first = sorted(map(re.escape, texts), key=len, reverse=True)
    return re.compile("(" + "|".join(longest_first) + ")" if longest_first else r"((?!))")


def _mark_finder(tokenizer: ModelTokenizer) -> re.Pattern[str]:
    """Group 1: a marker such as ``<think>``, left whole; else a character that begins a control token."""
    firsts = "".join(sorted({re.escape(text[0]) for text in tokenizer.control}))
    return re.compile(_alternatives(tokenizer.markers).pattern + (f"|[{firsts}]" if firsts else ""))
