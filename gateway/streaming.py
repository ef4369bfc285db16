"""From an engine's events to the answer: chunks as the steps bring them, or one whole body."""

import logging
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from engine import wire
from gateway.call import Call
from gateway.errors import ApiError, as_api_error, sse_error
from gateway.flight import Flight
from gateway.sse import EventStream
from gateway.text.choices import Choice, Piece, ScoredToken
from gateway.text.formats import ChatFormat, Format, TextFormat
from gateway.text.tool_format import ToolFormat
from gateway.work import Work

_log = logging.getLogger("gateway.streaming")


async def deliver(call: Call, work: Work, flight: Flight) -> None:
    """Answers the call from the flight's events, to its terminal event whether or not the caller is still there.

    Raises ApiError as long as nothing was sent; after that the failure is the stream's last event.
    """
    text, form = Text(work), _format(call, work)
    answer = (Streamed if work.style.stream else Whole)(call, work, flight, form)
    try:
        with answer.kept_alive():
            while (batch := await flight.next()) is not None:
                pieces = text.pieces(batch)
                for index in text.stopped():
                    flight.abort(index)
                await answer.add(pieces)
        flight.leave_out(text.surplus_tokens)
        await answer.end()
        flight.answered()
    except Exception as error:
        if not call.answering:
            raise
        await call.write(sse_error(_told(error)), last=True)


def _format(call: Call, work: Work) -> Format:
    if work.operation == "completions":
        return TextFormat(call, work)
    tools = work.style.tools
    return ToolFormat(call, work) if tools is not None and tools.may_call else ChatFormat(call, work)


def _told(error: Exception) -> ApiError:
    """What the caller of a broken stream hears; our own bugs without their details."""
    told = as_api_error(error)
    if told.code == "internal":
        _log.exception("a stream broke")
    return told


class Text:
    """All choices of a request: engine events in, pieces of text out."""

    def __init__(self, work: Work) -> None:
        style = work.style
        self._work = work
        scored = style.logprobs or work.is_ranked
        self._choices = [Choice(work.text.tokenizer, style.stops, scored) for _ in range(work.total_choices)]
        self._unechoed = set(range(work.total_choices)) if style.echo else set()
        self._scores: list[list[wire.TokenLogprobs]] = [[] for _ in work.prompts]
        self._stopped: list[int] = []

    def pieces(self, batch: list) -> list[tuple[int, Piece]]:
        """(choice index, piece) in the order of the events, empty pieces left out."""
        pieces = []
        for event in batch:
            if isinstance(event, wire.Delta):
                piece = self._take(event)
                if piece:
                    pieces.append((event.choice, piece))
            elif isinstance(event, wire.PromptScores):
                self._scores[event.prompt_index] += event.logprobs
        return pieces

    def stopped(self) -> list[int]:
        """Choices that a stop string has ended since the last time: the engine needn't go on with them."""
        stopped, self._stopped = self._stopped, []
        return stopped

    @property
    def surplus_tokens(self) -> int:
        """Tokens that the engine made after a stop string."""
        return sum(choice.surplus_tokens for choice in self._choices)

    def _take(self, delta: wire.Delta) -> Piece:
        choice = self._choices[delta.choice]
        was_done = choice.done
        echoed = self._echo(delta.choice) if self._unechoed else None
        piece = choice.take(delta)
        if choice.done and not was_done and not delta.finish_reason:
            self._stopped.append(delta.choice)
        if echoed:
            piece = Piece(echoed.text + piece.text, echoed.tokens + piece.tokens, piece.finish_reason)
        return piece

    def _echo(self, index: int) -> Piece | None:
        if index not in self._unechoed:
            return None
        self._unechoed.discard(index)
        prompt = index // self._work.num_choices
        return self._choices[index].echo(self._work.prompts[prompt], self._scores[prompt])


class Answer(Protocol):
    def kept_alive(self) -> AbstractContextManager[None]: ...
    async def add(self, pieces: list[tuple[int, Piece]]) -> None: ...
    async def end(self) -> None: ...


class Streamed:
    """Server-sent events, a chunk for each choice that a step went on with."""

    def __init__(self, call: Call, work: Work, flight: Flight, form: Format) -> None:
        self._call = call
        self._flight = flight
        self._form = form
        self._events = EventStream(call, form.blank() if work.style.obfuscate else None)
        self.kept_alive = self._events.kept_alive

    async def add(self, pieces: list[tuple[int, Piece]]) -> None:
        chunks = [chunk for index, piece in pieces for chunk in self._form.chunks(index, piece)]
        if not chunks:
            return
        await self._events.send(chunks)
        if not self._flight.first_token_ns and any(self._flight.output_tokens):
            self._flight.first_token_ns = time.monotonic_ns() - self._call.read_ns

    async def end(self) -> None:
        usage = self._form.usage_chunk(self._flight.usage)
        await self._call.whole(None)
        await self._events.end([] if usage is None else [usage])


class Whole:
    """One JSON body at the end."""

    def __init__(self, call: Call, work: Work, flight: Flight, form: Format) -> None:
        self._call = call
        self._work = work
        self._flight = flight
        self._form = form
        self._pieces: dict[int, list[Piece]] = {}
        self.kept_alive = nullcontext

    async def add(self, pieces: list[tuple[int, Piece]]) -> None:
        for index, piece in pieces:
            self._pieces.setdefault(index, []).append(piece)

    async def end(self) -> None:
        choices = {index: _merge(pieces) for index, pieces in sorted(self._pieces.items())}
        if self._work.is_ranked:
            choices = _best(self._work, list(choices.values()))
        body = self._form.whole(choices, self._flight.usage)
        await self._call.whole(body)
        await self._call.answer(body)


def _merge(pieces: list[Piece]) -> Piece:
    return Piece(
        "".join(piece.text for piece in pieces),
        [token for piece in pieces for token in piece.tokens],
        pieces[-1].finish_reason,
    )


def _best(work: Work, choices: list[Piece]) -> dict[int, Piece]:
    """Of each prompt's choices the ``num_best`` likeliest by token, the likeliest first."""
    best: list[Piece] = []
    for i, prompt in enumerate(work.prompts):
        own = choices[i * work.num_choices : (i + 1) * work.num_choices]
        echoed = len(prompt) if work.style.echo else 0
        own.sort(key=lambda piece, echoed=echoed: -_mean_logprob(piece.tokens[echoed:]))
        best += own[: work.num_best]
    return dict(enumerate(best))


def _mean_logprob(tokens: list[ScoredToken]) -> float:
    known = [token.scores.logprob for token in tokens if token.scores is not None]
    return sum(known) / len(known) if known else 0.0
