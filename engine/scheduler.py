"""Which sequences run in a step, how many tokens each, and who gives way. Pure: no torch, no clock."""

from bisect import insort

from msgspec import Struct

from engine import wire
from engine.adapter_pool import AdapterPool
from engine.block_pool import BlockPool
from engine.config import EngineConfig
from engine.prefix_cache import PrefixCache
from engine.sequence import CLASS_RANK, PENDING, Sequence, SequenceStatus
from engine.waiting import WaitingRoom


class Chunk(Struct, frozen=True, gc=False):  # hundreds a step, and in no cycle
    """What one sequence computes in a step: positions ``start`` .. ``start + num_tokens``.

    ``samples``: the chunk reaches the last known token, and a next token is drawn. ``scores``: wanted are the
    log-probabilities of the prompt tokens that this chunk's positions predict, that is of the tokens at
    ``start + 1`` .. ``min(start + num_tokens, num_prompt_tokens - 1)`` inclusive, in that order. ``num_preemptions``
    is the sequence's when it was planned. The first ``num_recomputed`` tokens had been computed before a preemption.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool
    scores: bool
    num_preemptions: int = 0
    num_recomputed: int = 0

    @property
    def end(self) -> int:
        """The position behind it: where the token that it draws stands."""
        return self.start + self.num_tokens


class ChunkResult(Struct, frozen=True):
    """What the runner gives for a chunk. ``token_id`` is -1 when none was drawn."""

    token_id: int
    logprobs: wire.TokenLogprobs | None = None
    scores: tuple[wire.TokenLogprobs, ...] = ()


class StepPlan(Struct, frozen=True):
    """Prefill chunks and decodes of one step together, adapter slots assigned and pinned.

    ``preempted`` gave their blocks back and wait again; ``exhausted`` have filled the pool and end. ``is_next``: the
    chunks are those of the plan before, each of one token then and now, each a token further, in the same slots.
    """

    chunks: tuple[Chunk, ...]
    preempted: tuple[Sequence, ...]
    num_tokens: int
    exhausted: tuple[Sequence, ...] = ()
    is_next: bool = False


NOTHING = StepPlan((), (), 0)


class _Draft:
    """A plan in the making."""

    def __init__(self, most_tokens: int) -> None:
        self.budget = self._most_tokens = most_tokens
        self.chunks: list[Chunk] = []
        self.preempted: list[Sequence] = []
        self.exhausted: list[Sequence] = []

    def add(self, sequence: Sequence, start: int, num_tokens: int) -> None:
        samples = start + num_tokens == len(sequence.token_ids) and sequence.limit > 0
        scores = start < sequence.num_prompt_tokens - 1 and sequence.wants_scores
        again = sequence.num_given_back  # positions; 0 for nearly all
        again = min(again - start, num_tokens) if again > start else 0
        self.chunks.append(Chunk(sequence, start, num_tokens, samples, scores, sequence.num_preemptions, again))
        self.budget -= num_tokens

    def add_prefills(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            if self.budget == 0:
                return
            if sequence.status is SequenceStatus.RUNNING:  # none of those that gave way meanwhile
                self.add_prefill(sequence)

    def add_prefill(self, sequence: Sequence) -> None:
        start = sequence.num_computed_tokens
        self.add(sequence, start, min(len(sequence.token_ids) - start, self.budget))

    def plan(self, *, is_next: bool) -> StepPlan:
        num_tokens = self._most_tokens - self.budget
        return StepPlan(tuple(self.chunks), tuple(self.preempted), num_tokens, tuple(self.exhausted), is_next)


class Scheduler:
    """Owns every unfinished sequence and all blocks and slots that it holds.

    ``running`` is ordered by seniority: class, then age. Its last one gives way when blocks run out, its first one
    never does, so that there is always progress. A sequence gets the blocks of all its known tokens when it is
    admitted, so that only decodes ask for more.

    ``schedule`` may be called while the plan before it is on the device (``launched``, not yet ``commit``): the last
    token of a sequence may then be PENDING. What a plan in the air writes comes before all that a later one does, so
    that blocks and slots may change hands meanwhile.
    """

    def __init__(self, config: EngineConfig, adapters: AdapterPool) -> None:
        self.config = config
        self.adapters = adapters
        self.waiting = WaitingRoom(adapters)
        self.pool = BlockPool(config.num_blocks)
        self.cache = PrefixCache(self.pool, config.block_size)
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._num_steady = -1  # plans since somebody came or left that were a decode of each that runs, less one
        self._num_needing_history = 0
        self.num_cache_hits = 0  # prompt tokens of leaders that were found at first admission,
        self.num_cache_misses = 0  # and that were not

    @property
    def has_work(self) -> bool:
        return bool(self.running) or self.waiting.can_move

    @property
    def needs_tokens(self) -> bool:
        """A running sequence's next token depends on the values of those before it, on the host."""
        return self._num_needing_history > 0

    def add(self, sequences: list[Sequence]) -> None:
        """All choices of a request, each leader before its followers."""
        self.waiting.add(sequences)

    def finish(self, sequence: Sequence) -> None:
        """Takes an unfinished sequence out, wherever it is, and gives back what it holds."""
        if sequence.status is SequenceStatus.RUNNING:
            self._stop(sequence)
            self.waiting.queue.leave(sequence)
        else:
            self.waiting.drop(sequence)
        sequence.drop_pending()
        sequence.status = SequenceStatus.FINISHED
        self.waiting.free_followers(sequence)

    def schedule(self) -> StepPlan:
        """The next step: decodes, then prefill of what runs, then whose turn it is. Takes blocks and slots;
        ``exhausted`` sequences are finished already."""
        draft = _Draft(self.config.max_step_tokens)
        prefills = self._plan_decodes(draft)
        num_decodes = len(draft.chunks)
        draft.add_prefills(prefills)
        self._admit_waiting(draft)
        is_plain = num_decodes == len(draft.chunks) == len(self.running)
        self._num_steady = self._num_steady + 1 if is_plain else -1
        return draft.plan(is_next=self._num_steady > 0)

    def launched(self, plan: StepPlan) -> None:
        """The plan is on the device: what is planned next comes after it."""
        for chunk in plan.chunks:
            chunk.sequence.num_computed_tokens = chunk.end
            if chunk.samples:
                chunk.sequence.token_ids.append(PENDING)

    def commit(self, plan: StepPlan) -> None:
        """The plan has run: full blocks can be found, followers may start. Not for those that gave way or ended
        meanwhile."""
        block_size, has_followers = self.config.block_size, self.waiting.has_followers
        running = SequenceStatus.RUNNING
        for chunk in plan.chunks:  # no calls that can be spared here either
            sequence, end = chunk.sequence, chunk.start + chunk.num_tokens
            if sequence.status is not running or sequence.num_preemptions != chunk.num_preemptions:
                continue
            if sequence.adapter_slot >= 0:
                generation = self.adapters.generation(sequence.adapter_slot)
                assert generation == sequence.slot_generation, f"{sequence} ran on another adapter's slot"
            if end // block_size > sequence.num_published_blocks:
                self.cache.publish(sequence, end)
            if has_followers and end >= sequence.num_prompt_tokens:
                self.waiting.free_followers(sequence)

    def check_invariants(self) -> None:
        """Asserts what holds between steps, over all pools."""
        self.pool.check_invariants(sequence.block_table for sequence in self.running)
        self.cache.check_invariants()
        self.waiting.queue.check_invariants()
        pins: dict[int, int] = {}
        for sequence in self.running:
            _check_running(sequence, self.config.block_size)
            if sequence.adapter_slot >= 0:
                pins[sequence.adapter_slot] = pins.get(sequence.adapter_slot, 0) + 1
        self.adapters.check_invariants(pins)
        assert self.running == sorted(self.running, key=_seniority), "running is out of order"
        assert len(self.running) <= self.config.max_sequences
        elsewhere = list(self.waiting.sequences())
        assert all(not sequence.block_table and sequence.adapter_slot < 0 for sequence in elsewhere)
        assert len(elsewhere) + len(self.waiting.queue) == sum(self.waiting.num_sequences.values())
        assert self.waiting.queue.num_members == len(self.waiting.queue) + len(self.running), "work is counted wrongly"

    # ── planning ─────────────────────────────────────────────────────────────────────────────────

    def _plan_decodes(self, draft: _Draft) -> list[Sequence]:
        """Plans all that lack one token only, as ``add`` would, and gives those that lack more. (Runs for every running
        sequence in every step: no calls that can be spared.)"""
        prefills: list[Sequence] = []
        charged: list[Sequence] = []
        chunks, block_size, context_tokens = draft.chunks, self.config.block_size, self.config.context_tokens
        for sequence in self.running:  # whoever leaves it meanwhile stands at its end
            start, token_ids = sequence.num_computed_tokens, sequence.token_ids
            if len(token_ids) != start + 1:
                if len(token_ids) > start:  # else it only waits for the scores of its prompt
                    prefills.append(sequence)
            elif token_ids[-1] == PENDING and _is_last(sequence, context_tokens):
                pass
            elif start < len(sequence.block_table) * block_size or self._has_next_block(sequence, draft):
                samples, again = sequence.limit > 0, 1 if sequence.num_given_back > start else 0
                chunks.append(Chunk(sequence, start, 1, samples, False, sequence.num_preemptions, again))
                if sequence.num_charged_tokens <= start:
                    sequence.num_charged_tokens = start + 1
                    charged.append(sequence)
        draft.budget -= len(chunks)
        self.waiting.queue.charge_each(charged)
        return prefills

    def _admit_waiting(self, draft: _Draft) -> None:
        passed: list[Sequence] = []
        while draft.budget > 0 and len(self.running) < self.config.max_sequences:
            sequence = self.waiting.pop()
            if sequence is None:
                break
            if self._admit(sequence, draft):
                for other in passed:
                    other.num_overtaken += 1
            elif not self._park_or_end(sequence, draft):
                passed.append(sequence)
                if self._holds_back(sequence) or len(passed) >= self.config.max_backfill:
                    break
        self.waiting.push_back(passed)

    def _holds_back(self, sequence: Sequence) -> bool:
        """What becomes free is kept for one that gave way before, or that has let enough others pass."""
        return sequence.num_preemptions > 0 or sequence.num_overtaken >= self.config.max_overtakes

    def _park_or_end(self, sequence: Sequence, draft: _Draft) -> bool:
        """Whether a sequence that can't be admitted is one that no waiting would help."""
        if sequence.adapter_key and not self.adapters.is_resident(sequence.adapter_key):
            self.waiting.park(sequence)
            return True
        if self._num_blocks(sequence) > self.config.num_blocks and not sequence.is_pending:  # it filled the pool
            self.finish(sequence)
            draft.exhausted.append(sequence)
            return True
        return False

    def _admit(self, sequence: Sequence, draft: _Draft) -> bool:
        """False: it doesn't fit now."""
        key, num_blocks = sequence.adapter_key, self._num_blocks(sequence)
        if key and not (self.adapters.is_resident(key) and self.adapters.has_room(key)):
            return False
        found = self.cache.match(sequence)
        needed = num_blocks - len(found) + self.pool.num_idle(found)
        if needed + len(self.running) > self.pool.num_available:  # each running one's next block is kept for it
            return False
        self._start(sequence, found, num_blocks)
        draft.add_prefill(sequence)
        return True

    def _start(self, sequence: Sequence, found: list[int], num_blocks: int) -> None:
        self._num_steady = -1
        for block in found:
            self.pool.retain(block)
        sequence.block_table = found + self.pool.allocate(num_blocks - len(found))
        sequence.num_published_blocks = len(found)
        sequence.num_computed_tokens = len(found) * self.config.block_size
        if sequence.adapter_key:
            sequence.adapter_slot, sequence.slot_generation = self.adapters.acquire(sequence.adapter_key)
        if sequence.num_preemptions == 0 and sequence.is_leader:
            sequence.num_cached_tokens = sequence.num_computed_tokens
            self.num_cache_hits += sequence.num_cached_tokens
            self.num_cache_misses += sequence.num_prompt_tokens - sequence.num_cached_tokens
        sequence.num_overtaken = 0
        self._num_needing_history += sequence.needs_history
        self.waiting.admit(sequence)
        insort(self.running, sequence, key=_seniority)
        self._charge(sequence)

    def _num_blocks(self, sequence: Sequence) -> int:
        """Blocks for all known tokens."""
        return -(-len(sequence.token_ids) // self.config.block_size)

    def _charge(self, sequence: Sequence) -> None:
        """Each position is charged once, when it is first going to be computed: the prompt at admission (what was
        found in the cache is free), an output token in its step; recomputing after a preemption is free."""
        begin, end = max(sequence.num_charged_tokens, sequence.num_computed_tokens), len(sequence.token_ids)
        if end > begin:
            self.waiting.queue.charge(sequence, end - begin)
            sequence.num_charged_tokens = end

    # ── giving way ───────────────────────────────────────────────────────────────────────────────

    def _has_next_block(self, sequence: Sequence, draft: _Draft) -> bool:
        """Finds one more block, for the next token. The most junior ones give way for it, itself at last; one that has
        filled the pool alone ends, once its token in the air has landed. False: there is none."""
        while self.pool.num_available == 0:
            if len(self.running) == 1:
                if sequence.is_pending:
                    return False
                self.finish(sequence)
                draft.exhausted.append(sequence)
                return False
            victim = self.running[-1]
            self._preempt(victim, draft)
            if victim is sequence:
                return False
        sequence.block_table += self.pool.allocate(1)
        return True

    def _preempt(self, sequence: Sequence, draft: _Draft) -> None:
        """Recompute later: its blocks go back, and often stay in the prefix cache for it. Each time it gains a
        class of seniority, so that it isn't always the same one."""
        sequence.num_given_back = max(sequence.num_given_back, sequence.num_computed_tokens)
        self._stop(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        rank = CLASS_RANK[sequence.request.submit.flow.flow_class]
        sequence.key = (max(0, rank - sequence.num_preemptions), sequence.seq_id)
        self.waiting.give_way(sequence)
        draft.preempted.append(sequence)

    def _stop(self, sequence: Sequence) -> None:
        """Takes a running sequence out and gives back its blocks and its slot."""
        self._num_steady = -1
        self.running.remove(sequence)
        self._num_needing_history -= sequence.needs_history
        self.pool.release(sequence.block_table)
        if sequence.adapter_slot >= 0:
            self.adapters.release(sequence.adapter_slot, sequence.slot_generation)
        sequence.block_table = []
        sequence.num_computed_tokens = sequence.num_published_blocks = 0
        sequence.adapter_slot = sequence.slot_generation = -1


def _seniority(sequence: Sequence) -> tuple[int, int]:
    return sequence.key


def _is_last(sequence: Sequence, context_tokens: int) -> bool:
    """The token in the air ends it whatever it is, unless a grant comes meanwhile."""
    known = len(sequence.token_ids)
    return known - sequence.num_prompt_tokens >= sequence.limit or known >= context_tokens


def _check_running(sequence: Sequence, block_size: int) -> None:
    assert sequence.status is SequenceStatus.RUNNING
    assert (sequence.adapter_slot >= 0) == bool(sequence.adapter_key), f"{sequence} and its slot disagree"
    room = len(sequence.block_table) * block_size
    assert sequence.num_computed_tokens <= room, f"{sequence} computed beyond its blocks"
    assert len(sequence.token_ids) <= room + 1, f"{sequence} lacks blocks"
    assert sequence.num_published_blocks * block_size <= sequence.num_computed_tokens
    assert sequence.num_remaining_tokens >= 0, f"{sequence} computed more than it knows"
    assert PENDING not in sequence.token_ids[:-1], f"{sequence} waits for a token that it has passed"
