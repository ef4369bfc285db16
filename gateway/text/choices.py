"""One choice's token ids → text that may be sent, with its log-probabilities beside it."""

from collections import deque
from dataclasses import dataclass, field

from engine.wire import Delta, TokenLogprobs, unpack_ids
from gateway.text.tokenizer import ModelTokenizer


class StopFinder:
    """Passes text on until a stop string: that and all after it is dropped, wherever the pieces were cut.

    Of several the one that is complete first counts, of those that end together the longest. Held back is only
    the end of the text that may be the beginning of a stop string.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.found = False

    def feed(self, text: str) -> str:
        """What of the text so far is certain to be sent now."""
        if not self._stops:
            return text
        held = self._held + text
        ends = [(at + len(stop), at) for stop in self._stops if (at := held.find(stop)) >= 0]
        if ends:
            self.found, self._held = True, ""
            return held[: min(ends)[1]]
        keep = self._possible_start(held)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def flush(self) -> str:
        """The end of the text: no stop string will come."""
        held, self._held = self._held, ""
        return held

    def _possible_start(self, text: str) -> int:
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0


@dataclass(slots=True)
class ScoredToken:
    """A token with its probabilities; ``scores`` None: the first of a prompt. ``offset`` is where its text begins,
    in characters; ``silent``: it is no text (the token that stopped the choice)."""

    token_id: int
    scores: TokenLogprobs | None
    offset: int
    silent: bool = False


@dataclass(slots=True)
class Piece:
    """What one step adds to a choice; ``finish_reason`` is set on its last, unless the choice was cut off."""

    text: str = ""
    tokens: list[ScoredToken] = field(default_factory=list)
    finish_reason: str = ""

    def __bool__(self) -> bool:
        return bool(self.text or self.tokens or self.finish_reason)


class Choice:
    """The text of one choice as it grows. After ``done`` everything is ignored.

    A token's log-probabilities are given with the first of its text, so that tokens of a stop string, which are
    not part of the answer, leave none behind.
    """

    def __init__(self, tokenizer: ModelTokenizer, stops: tuple[str, ...], with_scores: bool) -> None:
        self._decoder = tokenizer.decoder()
        self._finder = StopFinder(stops)
        self._with_scores = with_scores
        self._pending: deque[ScoredToken] = deque()
        self._decoded = 0  # characters
        self._sent = 0
        self.done = False
        self.surplus_tokens = 0  # behind a stop string

    def echo(self, prompt: list[int], scores: list[TokenLogprobs]) -> Piece:
        """The prompt as the beginning of the text; stop strings are not looked for in it."""
        text = ""
        for position, token_id in enumerate(prompt):
            known = scores[position - 1] if 0 < position <= len(scores) else None
            self._note(token_id, known)
            text += self._decode(token_id)
        return self._piece(text)

    def take(self, delta: Delta) -> Piece:
        """A step's tokens."""
        text = ""
        ids = unpack_ids(delta.token_ids)
        if self.done:
            self.surplus_tokens += len(ids)
            return Piece()
        for position, token_id in enumerate(ids):
            scores = delta.logprobs[position] if delta.logprobs else None
            if token_id == delta.stop_token_id and position == len(ids) - 1:
                self._note(token_id, scores, silent=True)
                break
            if self._with_scores:
                self._note(token_id, scores)
            text += self._finder.feed(self._decode(token_id))
            if self._finder.found:
                self.surplus_tokens += len(ids) - position - 1
                return self._end(text, "stop")
        if delta.finish_reason in ("abort", "error"):  # cut off: whoever still listens hears of it otherwise
            return self._end(text, "")
        return self._finish(text, delta.finish_reason) if delta.finish_reason else self._piece(text)

    def _finish(self, text: str, reason: str) -> Piece:
        tail = self._decoder.finish()
        self._decoded += len(tail)
        text += self._finder.feed(tail)
        if self._finder.found:
            return self._end(text, "stop")
        text += self._finder.flush()
        piece = self._end(text, reason)
        piece.tokens += self._pending  # tokens without text of their own
        return piece

    def _end(self, text: str, reason: str) -> Piece:
        self.done = True
        piece = self._piece(text)
        piece.finish_reason = reason
        return piece

    def _decode(self, token_id: int) -> str:
        text = self._decoder.feed(token_id)
        self._decoded += len(text)
        return text

    def _note(self, token_id: int, scores: TokenLogprobs | None, *, silent: bool = False) -> None:
        if self._with_scores:
            self._pending.append(ScoredToken(token_id, scores, self._decoded, silent))

    def _piece(self, text: str) -> Piece:
        self._sent += len(text)
        piece = Piece(text)
        while self._pending and self._pending[0].offset < self._sent:
            piece.tokens.append(self._pending.popleft())
        return piece
