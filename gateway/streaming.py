"""From an engine's events to the answer's bytes: one chunk a step and choice, or one whole body."""

import contextlib
import logging
import time
from collections.abc import Iterator
from typing import Protocol

import msgspec

from engine import wire
from gateway.call import Call
from gateway.choices import Choice, Piece
from gateway.dispatch import Flight
from gateway.errors import ApiError, as_api_error, sse_error
from gateway.formats import Format, format_of
from gateway.work import Work

_log = logging.getLogger("gateway.streaming")
_encode = msgspec.json.Encoder().encode
_EVENT, _END = b"data: ", b"\n\n"
_SSE_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
_JSON_HEADERS = {"content-type": "application/json"}


async def deliver(call: Call, work: Work, flight: Flight) -> None:
    """Answers the call from the flight's events, to its terminal event whether or not the caller is still there.

    Raises ApiError as long as nothing was sent; after that the failure is the stream's last event.
    """
    text, form = Text(work), format_of(call, work)
    answer = Streamed(call, flight, form) if work.style.stream else Whole(call, flight, form)
    try:
        async with contextlib.aclosing(flight.events()) as batches:
            async for batch in batches:
                pieces = list(text.pieces(batch))
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
        self._choices = [Choice(work.text.tokenizer, style.stops, style.logprobs) for _ in range(work.total_choices)]
        self._unechoed = set(range(work.total_choices)) if style.echo else set()
        self._scores: list[list[wire.TokenLogprobs]] = [[] for _ in work.prompts]
        self._stopped: list[int] = []

    def pieces(self, batch: list) -> Iterator[tuple[int, Piece]]:
        """(choice index, piece) in the order of the events, empty pieces left out."""
        for event in batch:
            if isinstance(event, wire.PromptScores):
                self._scores[event.prompt_index] += event.logprobs
            elif isinstance(event, wire.Delta):
                piece = self._take(event)
                if piece:
                    yield event.choice, piece

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
        echoed = self._echo(delta.choice)
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
    async def add(self, pieces: list[tuple[int, Piece]]) -> None: ...
    async def end(self) -> None: ...


class Streamed:
    """Server-sent events. The status line goes out with the first of them."""

    def __init__(self, call: Call, flight: Flight, form: Format) -> None:
        self._call = call
        self._flight = flight
        self._form = form

    async def add(self, pieces: list[tuple[int, Piece]]) -> None:
        """One write for all that a step brought."""
        if not pieces:
            return
        chunks = [chunk for index, piece in pieces for chunk in self._form.chunks(index, piece)]
        await self._begin()
        await self._call.write(b"".join(_EVENT + _encode(chunk) + _END for chunk in chunks))
        if not self._flight.first_token_ns and any(self._flight.output_tokens):
            self._flight.first_token_ns = time.monotonic_ns() - self._call.read_ns

    async def end(self) -> None:
        await self._begin()
        usage = self._form.usage_chunk(self._flight.usage)
        data = _EVENT + _encode(usage) + _END if usage is not None else b""
        await self._call.write(data + b"data: [DONE]\n\n", last=True)

    async def _begin(self) -> None:
        if not self._call.answering:
            await self._call.begin(200, _SSE_HEADERS | self._flight.ticket.rate_limit_headers())


class Whole:
    """One JSON body at the end."""

    def __init__(self, call: Call, flight: Flight, form: Format) -> None:
        self._call = call
        self._flight = flight
        self._form = form
        self._pieces: dict[int, list[Piece]] = {}

    async def add(self, pieces: list[tuple[int, Piece]]) -> None:
        for index, piece in pieces:
            self._pieces.setdefault(index, []).append(piece)

    async def end(self) -> None:
        merged = {index: _merge(pieces) for index, pieces in sorted(self._pieces.items())}
        body = _encode(self._form.whole(merged, self._flight.usage))
        headers = _JSON_HEADERS | {"content-length": str(len(body))} | self._flight.ticket.rate_limit_headers()
        await self._call.begin(200, headers)
        await self._call.write(body, last=True)


def _merge(pieces: list[Piece]) -> Piece:
    return Piece(
        "".join(piece.text for piece in pieces),
        [token for piece in pieces for token in piece.tokens],
        pieces[-1].finish_reason,
    )
