"""Which sequences run in a step, how many tokens each, and who gives way. Pure: no torch, no clock."""

from msgspec import Struct

from engine import wire
from engine.sequence import Sequence


class Chunk(Struct, frozen=True):
    """What one sequence computes in a step: positions ``start`` .. ``start + num_tokens``.

    ``samples``: the chunk reaches the last known token, and a next token is drawn. ``scores``: wanted are the
    log-probabilities of the prompt tokens that this chunk's positions predict, that is of the tokens at
    ``start + 1`` .. ``min(start + num_tokens, num_prompt_tokens - 1)`` inclusive, in that order.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool
    scores: bool


class ChunkResult(Struct, frozen=True):
    """What the runner gives for a chunk. ``token_id`` is -1 when none was drawn."""

    token_id: int
    logprobs: wire.TokenLogprobs | None = None
    scores: tuple[wire.TokenLogprobs, ...] = ()


class StepPlan(Struct, frozen=True):
    """Prefill chunks and decodes of one step together, adapter slots assigned and pinned.

    ``preempted`` gave their blocks back and wait again; ``exhausted`` have filled the pool and end.
    """

    chunks: tuple[Chunk, ...]
    preempted: tuple[Sequence, ...]
    exhausted: tuple[Sequence, ...]
    num_tokens: int
