"""The engine's state of a request and of each of its choices. Plain data; the scheduler and the engine write it."""

import hashlib
from enum import Enum
from typing import Protocol

from engine import wire

PENDING = -1  # in place of a token that the device has drawn, or is drawing, and the host has not seen


class SequenceStatus(Enum):
    WAITING = "waiting"  # queued, behind its leader, or without its adapter: holds no block and no slot
    RUNNING = "running"
    FINISHED = "finished"


class Matcher(Protocol):
    """A choice's place in its grammar: ``engine.grammar.Matcher``."""

    @property
    def failure(self) -> str: ...
    @property
    def ended(self) -> bool: ...
    def mask(self) -> bytes: ...
    def advance(self, token_id: int) -> None: ...


class Sequence:
    """One choice: its tokens, how many of them are computed, and what it holds while it runs.

    ``token_ids`` is prompt + output. ``num_computed_tokens`` counts tokens whose keys and values stand in
    ``block_table``; at most the last known token is not among them when a step draws the next. ``adapter_slot``
    is -1 for the base model and while waiting. ``seed`` is always set: two choices of one request differ in it.
    ``needs_history``: the draw of a token depends on the values of the tokens before it.
    """

    __slots__ = (
        "adapter_key",
        "adapter_slot",
        "block_hashes",
        "block_table",
        "choice",
        "finish_reason",
        "key",
        "limit",
        "matcher",
        "needs_history",
        "num_cached_tokens",
        "num_charged_tokens",
        "num_computed_tokens",
        "num_given_back",
        "num_overtaken",
        "num_preemptions",
        "num_prompt_tokens",
        "num_published_blocks",
        "prompt_index",
        "prompt_scores",
        "request",
        "sampling",
        "scores_sent",
        "seed",
        "seq_id",
        "slot_generation",
        "status",
        "token_ids",
    )

    def __init__(self, seq_id: int, request: "Request", choice: int, prompt: list[int], seed: int) -> None:
        submit = request.submit
        self.seq_id = seq_id
        self.request = request
        self.choice = choice
        self.prompt_index = choice // submit.num_choices
        self.token_ids: list[int] = prompt
        self.num_prompt_tokens = len(prompt)
        self.sampling: wire.SamplingParams = submit.sampling
        self.seed = seed
        penalties = (self.sampling.presence_penalty, self.sampling.frequency_penalty, self.sampling.repetition_penalty)
        self.needs_history = penalties != (0.0, 0.0, 1.0) or bool(self.sampling.grammar)
        self.limit = min(submit.sampling.max_tokens, submit.granted_tokens)  # output tokens allowed so far
        self.adapter_key = submit.adapter_key
        self.matcher: Matcher | None = None  # stands behind the last known token, also while waiting
        self.status = SequenceStatus.WAITING
        self.finish_reason: wire.FinishReason = ""
        # what it holds while it runs
        self.num_computed_tokens = 0
        self.block_table: list[int] = []
        self.block_hashes: list[bytes] = []  # chain over full blocks of token_ids; stays valid when blocks go
        self.num_published_blocks = 0
        self.adapter_slot = -1
        self.slot_generation = -1
        # what is remembered over preemptions
        self.num_cached_tokens = 0  # found in the prefix cache at first admission
        self.num_charged_tokens = 0  # positions that the fair queue has charged
        self.num_preemptions = 0
        self.num_given_back = 0  # positions that had been computed when it gave way
        self.num_overtaken = 0
        self.prompt_scores: list[wire.TokenLogprobs] = []  # of positions 1, 2, …
        self.scores_sent = False
        self.key = (CLASS_RANK[submit.flow.flow_class], seq_id)  # seniority: smaller is preempted later

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_remaining_tokens(self) -> int:
        """Known tokens that are not computed."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_pending(self) -> bool:
        """Its last token is not known yet."""
        return self.token_ids[-1] == PENDING

    def drop_pending(self) -> None:
        """It ends: what is in the air for it is surplus."""
        while self.token_ids[-1] == PENDING:
            self.token_ids.pop()

    @property
    def is_leader(self) -> bool:
        """The choice that computes its prompt first; the others of that prompt reuse its blocks."""
        return self.choice % self.request.submit.num_choices == 0

    @property
    def wants_scores(self) -> bool:
        """Prompt log-probabilities are asked for and not yet complete. Only a leader gives them."""
        wanted = self.sampling.prompt_logprobs >= 0 and self.is_leader
        return wanted and len(self.prompt_scores) < self.num_prompt_tokens - 1

    def __repr__(self) -> str:  # never token ids: they are a tenant's text
        return f"Sequence({self.seq_id}, {self.request.request_id}/{self.choice}, {self.status.value})"


class Request:
    """One Submit: its choices, its counters, and when what happened (ns of the engine's clock, 0 = not yet)."""

    __slots__ = (
        "arrived_ns",
        "error_code",
        "error_message",
        "finished_ns",
        "first_token_ns",
        "gpu_ns",
        "last_token_ns",
        "load_ns",
        "num_unfinished",
        "recompute_ns",
        "request_id",
        "scheduled_ns",
        "sequences",
        "submit",
    )

    def __init__(self, submit: wire.Submit, arrived_ns: int) -> None:
        self.request_id = submit.request_id
        self.submit = submit
        self.sequences: list[Sequence] = []
        self.num_unfinished = 0
        self.arrived_ns = arrived_ns
        self.scheduled_ns = 0
        self.first_token_ns = 0
        self.last_token_ns = 0
        self.finished_ns = 0
        self.gpu_ns = 0
        self.load_ns = 0
        self.recompute_ns = 0
        self.error_code = ""
        self.error_message = ""

    def usage(self) -> wire.Usage:
        """Counts and durations; valid once finished. The durations sum to the time until the last token, or
        until the end of a request without one."""
        end = self.last_token_ns or self.finished_ns
        scheduled = self.scheduled_ns or end
        first = self.first_token_ns or end
        leaders = [sequence for sequence in self.sequences if sequence.is_leader]
        return wire.Usage(
            prompt_tokens=sum(leader.num_prompt_tokens for leader in leaders),
            cached_tokens=sum(leader.num_cached_tokens for leader in leaders),
            output_tokens=sum(sequence.num_output_tokens for sequence in self.sequences),
            queue_ns=scheduled - self.arrived_ns,
            prefill_ns=first - scheduled,
            decode_ns=end - first,
            gpu_ns=self.gpu_ns,
            load_ns=self.load_ns,
            recompute_ns=self.recompute_ns,
        )


CLASS_RANK: dict[str, int] = {"interactive": 0, "standard": 1, "batch": 2}


def choice_seed(seed: int, index: int) -> int:
    """The seed of choice ``index`` of a prompt, 63 bits; a prompt gives the same alone and among others."""
    digest = hashlib.sha256(b"tenora-seed-1" + seed.to_bytes(16, "little", signed=True) + index.to_bytes(4, "little"))
    return int.from_bytes(digest.digest()[:8], "little") >> 1
