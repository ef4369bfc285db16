"""What a step has to tell: new tokens, prompt scores, ends. Knows the rules by which a choice ends by itself."""

from dataclasses import dataclass, field

from engine import wire
from engine.scheduler import Chunk, ChunkResult
from engine.sequence import PENDING, Request, Sequence


@dataclass(slots=True)
class Events:
    """In the order in which they happened."""

    deltas: list[wire.Delta] = field(default_factory=list)
    scores: list[wire.PromptScores] = field(default_factory=list)
    finished: list[wire.Finished] = field(default_factory=list)


class Outbox:
    """Collects events until they are taken. Each choice's last Delta has a finish reason; the last choice's end
    makes its request's Finished, once."""

    def __init__(self, context_tokens: int, eos_token_ids: tuple[int, ...]) -> None:
        self._context_tokens = context_tokens
        self._eos_token_ids = frozenset(eos_token_ids)
        self._events = Events()

    def __bool__(self) -> bool:
        return bool(self._events.deltas or self._events.finished)

    def take(self) -> Events:
        events, self._events = self._events, Events()
        return events

    def add_token(self, chunk: Chunk, result: ChunkResult, now_ns: int) -> wire.FinishReason:
        """Puts the drawn token in its place and tells it; says why the choice ends with it ('': it goes on). The
        caller then takes it out and calls ``close``."""
        sequence = chunk.sequence
        assert result.token_id >= 0, f"{sequence} was to get a token"
        assert sequence.token_ids[chunk.end] == PENDING, f"{sequence} gets a token twice"
        request = sequence.request
        sequence.token_ids[chunk.end] = result.token_id
        if sequence.matcher is not None:
            sequence.matcher.advance(result.token_id)
        request.first_token_ns = request.first_token_ns or now_ns
        request.last_token_ns = now_ns
        reason = self._verdict(sequence, chunk.end + 1)
        stop_id = result.token_id if reason == "stop" and self._is_stop(sequence, result.token_id) else -1
        logprobs = () if result.logprobs is None else (result.logprobs,)
        token = wire.pack_ids((result.token_id,))
        self._events.deltas.append(wire.Delta(request.request_id, sequence.choice, token, logprobs, reason, stop_id))
        return reason

    def add_scores(self, chunk: Chunk, result: ChunkResult) -> None:
        """Keeps a leader's prompt log-probabilities and tells them, once, when the prompt is computed. Those of
        before a preemption stay; what is computed again is skipped."""
        sequence = chunk.sequence
        if chunk.scores:
            sequence.prompt_scores += result.scores[len(sequence.prompt_scores) - chunk.start :]
        if chunk.end >= sequence.num_prompt_tokens and not sequence.scores_sent:
            assert len(sequence.prompt_scores) == sequence.num_prompt_tokens - 1, "prompt scores have a gap"
            scores = tuple(sequence.prompt_scores)
            self._events.scores.append(wire.PromptScores(sequence.request.request_id, sequence.prompt_index, scores))
            sequence.scores_sent = True

    def add_end(self, sequence: Sequence, reason: wire.FinishReason) -> None:
        """The last word on a choice that ends without a token; ``close`` follows."""
        request_id = sequence.request.request_id
        self._events.deltas.append(wire.Delta(request_id, sequence.choice, b"", finish_reason=reason))

    def close(self, sequence: Sequence, reason: wire.FinishReason, now_ns: int) -> Request | None:
        """Counts a choice's end. The request, when that was its last choice."""
        assert not sequence.finish_reason, f"{sequence} ends twice"
        sequence.finish_reason = reason
        request = sequence.request
        request.num_unfinished -= 1
        if request.num_unfinished:
            return None
        request.finished_ns = now_ns
        finished = wire.Finished(request.request_id, request.usage(), request.error_code, request.error_message)
        self._events.finished.append(finished)
        return request

    def _is_stop(self, sequence: Sequence, token_id: int) -> bool:
        """Whether it is no text; the last token of a grammar often is."""
        return token_id in self._eos_token_ids or token_id in sequence.sampling.stop_token_ids

    def _verdict(self, sequence: Sequence, num_known: int) -> wire.FinishReason:
        sampling, token_id, matcher = sequence.sampling, sequence.token_ids[num_known - 1], sequence.matcher
        num_output = num_known - sequence.num_prompt_tokens
        if matcher is not None and (matcher.ended or matcher.failure):
            return "stop" if matcher.ended else "length"
        if num_output > sampling.min_tokens:
            is_eos = token_id in self._eos_token_ids and not sampling.ignore_eos
            if is_eos or token_id in sampling.stop_token_ids:
                return "stop"
        if num_output >= sequence.limit or num_known >= self._context_tokens:
            return "length"
        return ""
