"""OpenAI's shape of a chat answer that may call tools, whole and in chunks."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from engine.wire import Usage
from gateway.call import Call
from gateway.schemas import (
    AnswerCall,
    AnswerMessage,
    CallDelta,
    CalledFunction,
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    FunctionDelta,
)
from gateway.text.choices import Piece, ScoredToken
from gateway.text.formats import ChatFormat, usage_body
from gateway.text.tools import Called, Event, Said, ToolReader
from gateway.work import Work


@dataclass(slots=True)
class _Stream:
    """What a streamed choice has come to. ``tokens`` wait for the text that they are told with."""

    reader: ToolReader = field(default_factory=ToolReader)
    begun: bool = False
    tokens: list[ScoredToken] = field(default_factory=list)


class ToolFormat(ChatFormat):
    """Log-probabilities are told of text only. An answer that calls ends with ``tool_calls``, one that had to call a
    named function with ``stop``, as OpenAI's do; one that was cut with ``length``."""

    def __init__(self, call: Call, work: Work) -> None:
        super().__init__(call, work)
        self._streams: dict[int, _Stream] = {}

    def chunks(self, index: int, piece: Piece) -> Iterator[bytes]:
        stream = self._streams.setdefault(index, _Stream())
        stream.tokens += piece.tokens
        for event in _events(stream.reader, piece):
            if isinstance(event, Said):
                yield from self._text_chunks(index, stream, event.text)
            else:
                yield self._chunk(ChatChunkChoice(index, _delta(event, first=not stream.begun)))
                stream.begun = True
        if piece.finish_reason:
            if not stream.begun or (stream.tokens and not stream.reader.num_calls):
                yield from self._text_chunks(index, stream, "")
            reason = self._reason(piece, stream.reader)
            yield self._chunk(ChatChunkChoice(index, ChatDelta(), finish_reason=reason))

    def whole(self, choices: dict[int, Piece], usage: Usage) -> bytes:
        bodies = [self._choice(index, piece) for index, piece in choices.items()]
        return self._answer(self.whole_object, bodies, usage_body(usage))

    def _text_chunks(self, index: int, stream: _Stream, text: str) -> Iterator[bytes]:
        if not stream.begun:
            yield self._chunk(ChatChunkChoice(index, ChatDelta(role="assistant", content="")))
            stream.begun = True
        if text or stream.tokens:
            piece = Piece(text, stream.tokens)
            stream.tokens = []
            yield self._chunk(ChatChunkChoice(index, ChatDelta(content=text), self._logprobs(piece)))

    def _choice(self, index: int, piece: Piece) -> ChatChoice:
        reader = ToolReader()
        text, calls = "", list[AnswerCall]()
        for event in _events(reader, piece, last=True):
            if isinstance(event, Said):
                text += event.text
            elif isinstance(event, Called):
                calls.append(AnswerCall(event.call_id, CalledFunction(event.name, "")))
            else:
                known = calls[event.index]
                function = CalledFunction(known.function.name, known.function.arguments + event.text)
                calls[event.index] = AnswerCall(known.id, function)
        if not calls:
            return ChatChoice(index, AnswerMessage(text), self._logprobs(piece), piece.finish_reason or "stop")
        return ChatChoice(index, AnswerMessage(text or None, tool_calls=calls), None, self._reason(piece, reader))

    def _reason(self, piece: Piece, reader: ToolReader) -> str:
        tools = self._work.style.tools
        called = reader.num_calls and tools is not None and not tools.named
        return "tool_calls" if called and piece.finish_reason == "stop" else piece.finish_reason


def _events(reader: ToolReader, piece: Piece, *, last: bool = False) -> Iterator[Event]:
    yield from reader.feed(piece.text)
    if piece.finish_reason or last:
        yield from reader.finish()


def _delta(event: Event, *, first: bool) -> ChatDelta:
    """A call's beginning, or a piece of its arguments; the first of a choice also says who speaks."""
    if isinstance(event, Called):
        function = FunctionDelta(name=event.name, arguments="")
        calls = [CallDelta(index=event.index, id=event.call_id, type="function", function=function)]
        return ChatDelta(role="assistant", content=None, tool_calls=calls) if first else ChatDelta(tool_calls=calls)
    assert not isinstance(event, Said), "text is no delta of a call"
    return ChatDelta(tool_calls=[CallDelta(index=event.index, function=FunctionDelta(arguments=event.text))])
