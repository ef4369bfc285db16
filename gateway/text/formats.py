"""OpenAI's two shapes of an answer, whole and in chunks: chat, and the legacy text completion."""

from collections.abc import Iterator
from functools import cached_property
from typing import Protocol

import msgspec
from msgspec import UNSET

from engine.wire import TokenLogprobs, Usage
from gateway.call import Call
from gateway.schemas import (
    Answer,
    AnswerMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    CompletionDetails,
    ContentLogprob,
    PromptDetails,
    TextChoice,
    TextLogprobs,
    TokenLogprob,
    UsageBody,
)
from gateway.text.choices import Piece, ScoredToken
from gateway.text.tokenizer import ModelTokenizer
from gateway.work import Work

_LEAST_LOGPROB = -9999.0  # JSON has no -inf
_encode = msgspec.json.Encoder().encode


class Format(Protocol):
    """Answers as JSON."""

    def chunks(self, index: int, piece: Piece) -> Iterator[bytes]:
        """A piece of one choice as chunks of a stream, in order."""
        ...

    def blank(self) -> bytes:
        """A chunk that goes on with no text."""
        ...

    def usage_chunk(self, usage: Usage) -> bytes | None:
        """The last chunk, where the caller asked for it."""
        ...

    def whole(self, choices: dict[int, Piece], usage: Usage) -> bytes:
        """The body of an answer that is not streamed."""
        ...


class _Frame:
    """What all chunks of an answer have in common."""

    prefix: str
    whole_object: str
    chunk_object: str

    def __init__(self, call: Call, work: Work) -> None:
        self._id = f"{self.prefix}{call.request_id}"
        self._created = call.started_unix_ns // 1_000_000_000
        self._work = work
        self._tokenizer = work.text.tokenizer
        self._chunk_usage = None if work.style.include_usage else UNSET

    def usage_chunk(self, usage: Usage) -> bytes | None:
        if not self._work.style.include_usage:
            return None
        return self._answer(self.chunk_object, [], usage_body(usage))

    def _answer(self, kind: str, choices: list, usage: object) -> bytes:
        answer = Answer(
            id=self._id,
            object=kind,
            created=self._created,
            model=self._work.target.name,
            choices=choices,
            system_fingerprint=self._work.text.fingerprint,
            service_tier=self._work.service_tier,
            usage=usage,  # pyright: ignore[reportArgumentType]
        )
        return _encode(answer)

    def _chunk(self, choice: object) -> bytes:
        return b"%b%b%b" % (self._around[0], _encode(choice), self._around[1])

    @cached_property
    def _around(self) -> tuple[bytes, bytes]:
        """What stands before and behind a chunk's choice, made once. (No text has a quote that JSON would not mask.)"""
        before, _, behind = self._answer(self.chunk_object, [], self._chunk_usage).partition(b'"choices":[]')
        return before + b'"choices":[', b"]" + behind


class ChatFormat(_Frame):
    prefix, whole_object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, call: Call, work: Work) -> None:
        super().__init__(call, work)
        self._begun: set[int] = set()

    def chunks(self, index: int, piece: Piece) -> Iterator[bytes]:
        if index not in self._begun:
            self._begun.add(index)
            yield self._chunk(ChatChunkChoice(index, ChatDelta(role="assistant", content="")))
        if piece.text or piece.tokens:
            yield self._chunk(ChatChunkChoice(index, ChatDelta(content=piece.text), self._logprobs(piece)))
        if piece.finish_reason:
            yield self._chunk(ChatChunkChoice(index, ChatDelta(), finish_reason=piece.finish_reason))

    def blank(self) -> bytes:
        return self._chunk(ChatChunkChoice(0, ChatDelta(content="")))

    def whole(self, choices: dict[int, Piece], usage: Usage) -> bytes:
        bodies = [
            ChatChoice(index, AnswerMessage(piece.text), self._logprobs(piece), piece.finish_reason or "stop")
            for index, piece in choices.items()
        ]
        return self._answer(self.whole_object, bodies, usage_body(usage))

    def _logprobs(self, piece: Piece) -> ChatLogprobs | None:
        if not self._work.style.logprobs:
            return None
        return ChatLogprobs([content_logprob(token, self._tokenizer) for token in piece.tokens])


class TextFormat(_Frame):
    prefix, whole_object, chunk_object = "cmpl-", "text_completion", "text_completion"

    def chunks(self, index: int, piece: Piece) -> Iterator[bytes]:
        yield self._chunk(self._choice(index, piece))

    def blank(self) -> bytes:
        return self._chunk(TextChoice(0, ""))

    def whole(self, choices: dict[int, Piece], usage: Usage) -> bytes:
        bodies = [self._choice(index, piece) for index, piece in choices.items()]
        return self._answer(self.whole_object, bodies, usage_body(usage))

    def _choice(self, index: int, piece: Piece) -> TextChoice:
        logprobs = text_logprobs(piece.tokens, self._tokenizer) if self._work.style.logprobs else None
        return TextChoice(index, piece.text, logprobs, piece.finish_reason or None)


def usage_body(usage: Usage) -> UsageBody:
    total = usage.prompt_tokens + usage.output_tokens
    details = PromptDetails(usage.cached_tokens), CompletionDetails()
    return UsageBody(usage.prompt_tokens, usage.output_tokens, total, *details)


def content_logprob(token: ScoredToken, tokenizer: ModelTokenizer) -> ContentLogprob:
    scores = token.scores or TokenLogprobs(token.token_id, _LEAST_LOGPROB)
    data = b"" if token.silent else tokenizer.token_bytes(token.token_id)
    return ContentLogprob(
        token=tokenizer.token_name(token.token_id),
        logprob=_finite(scores.logprob),
        bytes=list(data),
        top_logprobs=[
            TokenLogprob(tokenizer.token_name(i), _finite(value), list(tokenizer.token_bytes(i)))
            for i, value in scores.top
        ],
    )


def text_logprobs(tokens: list[ScoredToken], tokenizer: ModelTokenizer) -> TextLogprobs:
    return TextLogprobs(
        tokens=[tokenizer.token_name(token.token_id) for token in tokens],
        token_logprobs=[None if token.scores is None else _finite(token.scores.logprob) for token in tokens],
        top_logprobs=[None if token.scores is None else _top(token.scores, tokenizer) for token in tokens],
        text_offset=[token.offset for token in tokens],
    )


def _top(scores: TokenLogprobs, tokenizer: ModelTokenizer) -> dict[str, float]:
    """The alternatives by name, with the token itself among them whatever its rank."""
    top = {tokenizer.token_name(i): _finite(value) for i, value in reversed(scores.top)}  # of equal names the best
    top[tokenizer.token_name(scores.token_id)] = _finite(scores.logprob)
    return top


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)
