"""A runner without a model: its "keys and values" are numbers, and it distrusts everything it is given.

Each position of each block remembers the namespace and the adapter it was written under, and a number chained over
all tokens before it, read through the block table as attention would. A wrong block, a stale slot, a position out
of order or a hit across namespaces fails an assertion here, and would change the tokens besides.
"""

from dataclasses import dataclass, field
from itertools import pairwise

from engine import wire
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import InvalidAdapter
from engine.flight import Computed
from engine.metering.device_counters import DeviceCounters
from engine.scheduler import Chunk, ChunkResult, StepPlan
from engine.sequence import PENDING, Sequence

VOCAB_SIZE = 61
EOS = 0
PRIME = (1 << 61) - 1


@dataclass
class Model:
    vocab_size: int = VOCAB_SIZE
    eos_token_ids: tuple[int, ...] = (EOS,)


@dataclass
class Weights:
    key: str
    num_bytes: int = 100
    fits: bool = True
    has_experts: bool = False


@dataclass
class Clock:
    """Every reading is a little later; a forward takes as long as its tokens."""

    now_ns: int = 1_000

    def __call__(self) -> int:
        self.now_ns += 7
        return self.now_ns


@dataclass
class Cell:
    namespace: bytes
    adapter: str
    digest: int


@dataclass
class ArithmeticRunner:
    """The contract of ``engine.runner.Runner``, checked from the other side. With ``overlaps`` it tells what a step
    has drawn when it is asked, and by then the next one may have been launched."""

    config: EngineConfig
    clock: Clock = field(default_factory=Clock)
    model_info: Model = field(default_factory=Model)
    expert_load: None = None
    device_counters: DeviceCounters | None = None
    overlaps: bool = False

    def __post_init__(self) -> None:
        self.cells: dict[tuple[int, int], Cell] = {}
        self.slots: list[Weights | None] = [None] * self.config.adapter_slots
        self.generations: dict[tuple[int, int], str] = {}
        self.plans: list[StepPlan] = []
        self.num_loads = 0
        self._launched: list[tuple[int, ...]] = []  # sequence, end, tokens, slot, its generation
        self.drawn: dict[tuple[int, int], int] = {}  # by sequence and position

    def launch(self, plan: StepPlan) -> Computed:
        self.plans.append(plan)
        self._check_plan(plan)
        self._check_next(plan)
        for chunk in plan.chunks:
            self._check_context(chunk, chunk.start)
        written: set[tuple[int, int]] = set()
        for chunk in plan.chunks:
            self._write(chunk, written)
        for chunk in plan.chunks:  # nobody's write has hit somebody else's context
            self._check_context(chunk, chunk.start + chunk.num_tokens)
        self.clock.now_ns += 1_000 + 13 * plan.num_tokens
        results = [self._result(chunk) for chunk in plan.chunks]
        for chunk, result in zip(plan.chunks, results, strict=True):
            self.drawn[chunk.sequence.seq_id, chunk.end] = result.token_id
        return Computed(results)

    def load_slot(self, slot: int, weights: Weights) -> None:
        assert self.slots[slot] is None, f"slot {slot} was not cleared"
        self.clock.now_ns += 500
        if not weights.fits:
            raise InvalidAdapter("rank 128, 64 fit")
        self.slots[slot] = weights
        self.num_loads += 1

    def clear_slot(self, slot: int) -> None:
        self.slots[slot] = None

    def _check_plan(self, plan: StepPlan) -> None:
        assert plan.num_tokens == sum(chunk.num_tokens for chunk in plan.chunks) <= self.config.max_step_tokens
        assert len({chunk.sequence.seq_id for chunk in plan.chunks}) == len(plan.chunks), "a sequence runs twice"
        for chunk in plan.chunks:
            sequence, end = chunk.sequence, chunk.start + chunk.num_tokens
            assert chunk.num_tokens > 0
            assert chunk.start == sequence.num_computed_tokens, f"{sequence} is computed out of order"
            assert end <= len(sequence.token_ids), f"{sequence} computes tokens that nobody knows"
            assert chunk.samples == (end == len(sequence.token_ids) and sequence.limit > 0)
            assert end <= len(sequence.block_table) * self.config.block_size
            assert (sequence.adapter_slot < 0) == (not sequence.adapter_key)
            assert not (sequence.needs_history and sequence.is_pending), f"{sequence} is drawn without its history"
            assert self.overlaps or not sequence.is_pending, "a step is launched before its tokens are known"
            if sequence.adapter_key:
                self._check_slot(sequence)

    def _check_next(self, plan: StepPlan) -> None:
        before, now = self._launched, [(chunk, chunk.sequence) for chunk in plan.chunks]
        self._launched = [
            (sequence.seq_id, chunk.end, chunk.num_tokens, sequence.adapter_slot, sequence.slot_generation)
            for chunk, sequence in now
        ]
        if plan.is_next:
            further = [(seq_id, end + 1, 1, *slot) for seq_id, end, _, *slot in before]
            assert further == self._launched, "a plan is not the one before, a token later"
            assert {num_tokens for _, _, num_tokens, *_ in before} == {1}

    def _check_slot(self, sequence: Sequence) -> None:
        weights = self.slots[sequence.adapter_slot]
        assert weights is not None, f"{sequence} runs on an empty slot"
        assert weights.key == sequence.adapter_key, f"{sequence} runs on the weights of {weights.key}"
        name = (sequence.adapter_slot, sequence.slot_generation)
        assert self.generations.setdefault(name, weights.key) == weights.key, "a generation has two contents"

    def _check_context(self, chunk: Chunk, end: int) -> None:
        sequence, digest = chunk.sequence, 0
        for position in range(end):
            cell = self.cells.get(self._place(sequence, position))
            assert cell is not None, f"{sequence} reads position {position}, which was never written"
            digest = advance(digest, self._token(sequence, position), sequence.adapter_key)
            assert cell.namespace == sequence.request.submit.cache_namespace, f"{sequence} reads another namespace"
            assert cell.adapter == sequence.adapter_key, f"{sequence} reads what another adapter computed"
            assert cell.digest == digest, f"{sequence} reads other tokens at position {position}"

    def _write(self, chunk: Chunk, written: set[tuple[int, int]]) -> None:
        sequence = chunk.sequence
        digest = self.cells[self._place(sequence, chunk.start - 1)].digest if chunk.start else 0
        weights = self.slots[sequence.adapter_slot] if sequence.adapter_slot >= 0 else None
        for position in range(chunk.start, chunk.start + chunk.num_tokens):
            digest = advance(digest, self._token(sequence, position), weights.key if weights else "")
            place = self._place(sequence, position)
            assert place not in written, "two sequences write one place in one step"
            written.add(place)
            namespace = sequence.request.submit.cache_namespace
            self.cells[place] = Cell(namespace, sequence.adapter_key, digest)

    def _result(self, chunk: Chunk) -> ChunkResult:
        sequence, end = chunk.sequence, chunk.start + chunk.num_tokens
        scores = ()
        if chunk.scores:
            positions = range(chunk.start, min(end, sequence.num_prompt_tokens - 1))
            scores = tuple(
                score(self.cells[self._place(sequence, position)].digest, sequence.token_ids[position + 1])
                for position in positions
            )
        if not chunk.samples:
            return ChunkResult(-1, None, scores)
        digest = self.cells[self._place(sequence, end - 1)].digest
        token = draw(digest, sequence.sampling, sequence.seed, sequence.num_output_tokens)
        return ChunkResult(token, score(digest, token) if sequence.sampling.logprobs >= 0 else None, scores)

    def _token(self, sequence: Sequence, position: int) -> int:
        token = sequence.token_ids[position]
        return self.drawn[sequence.seq_id, position] if token == PENDING else token

    def _place(self, sequence: Sequence, position: int) -> tuple[int, int]:
        index, offset = divmod(position, self.config.block_size)
        return sequence.block_table[index], offset


def advance(digest: int, token: int, adapter: str) -> int:
    salt = int.from_bytes(adapter.encode()[:7], "little")
    return (digest * 1_000_003 + token * 7_919 + salt + 1) % PRIME


def score(digest: int, token: int) -> wire.TokenLogprobs:
    return wire.TokenLogprobs(token, -float((digest ^ token) % 1_000) / 100)


def draw(digest: int, sampling: wire.SamplingParams, seed: int, num_output: int) -> int:
    """Greedy looks at the context only; otherwise the seed has its say. No end before ``min_tokens``."""
    mixed = digest if sampling.temperature == 0 else digest ^ (seed % PRIME)
    token = mixed * 31 // 7 % VOCAB_SIZE
    barred = sampling.ignore_eos or num_output < sampling.min_tokens
    return EOS + 1 if token == EOS and barred else token


def expected_output(prompt: list[int], adapter: str, sampling: wire.SamplingParams, seed: int = 0) -> list[int]:
    """What a sequence gives when it is alone and nothing ever runs short."""
    digest, output = 0, []
    for token in prompt:
        digest = advance(digest, token, adapter)
    while len(output) < sampling.max_tokens:
        token = draw(digest, sampling, seed, len(output))
        output.append(token)
        if token == EOS and not sampling.ignore_eos:
            break
        digest = advance(digest, token, adapter)
    return output


def expected_scores(prompt: list[int], adapter: str) -> tuple[wire.TokenLogprobs, ...]:
    digest, scores = 0, []
    for token, following in pairwise(prompt):
        digest = advance(digest, token, adapter)
        scores.append(score(digest, following))
    return tuple(scores)


def make_engine(overlaps: bool = False, **sizes: int) -> tuple[Engine, ArithmeticRunner]:
    """A small engine over an arithmetic runner, with the peer's clock and seeds 1000, 1001, …"""
    config = EngineConfig(**{"block_size": 4, "num_blocks": 64, "context_tokens": 128, "max_step_tokens": 16, **sizes})
    runner = ArithmeticRunner(config, overlaps=overlaps)
    seeds = iter(range(1_000, 1_000_000_000))
    return Engine(config, runner, clock=runner.clock, seed_source=lambda: next(seeds)), runner


def submit(name: str, prompt: list[int] | list[list[int]], max_tokens: int = 8, **given) -> wire.Submit:
    """A greedy request of flow "flow" in class standard; ``given`` goes where it fits."""
    prompts = prompt if prompt and isinstance(prompt[0], list) else [prompt]
    flow = wire.Flow(given.pop("flow", "flow"), given.pop("weight", 1), given.pop("flow_class", "standard"))
    outer = {key: given.pop(key) for key in ("num_choices", "adapter_key", "granted_tokens") if key in given}
    namespace = given.pop("cache_namespace", b"namespace of " + outer.get("adapter_key", "").encode())
    outer.setdefault("granted_tokens", max_tokens)
    sampling = wire.SamplingParams(max_tokens, **{"temperature": 0.0, **given})
    ids = [wire.pack_ids(item) for item in prompts]
    return wire.Submit(name, ids, sampling, flow, namespace, **outer)


@dataclass
class Outcome:
    """What the events of one request said, checked for order while they are taken in."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[wire.TokenLogprobs]] = field(default_factory=dict)
    scores: dict[int, tuple[wire.TokenLogprobs, ...]] = field(default_factory=dict)
    first_step: dict[int, int] = field(default_factory=dict)
    finished: wire.Finished | None = None
    finished_step: int = -1


@dataclass
class Driver:
    """Steps an engine and keeps what it tells. Adapters that are wanted come at once, unless ``fetches`` is off."""

    engine: Engine
    fetches: bool = True
    num_steps: int = 0
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    wanted: list[str] = field(default_factory=list)

    def add(self, request: wire.Submit) -> None:
        self.engine.add(request)
        self.outcomes[request.request_id] = Outcome()

    def step(self) -> None:
        result = self.engine.step()
        self.num_steps += 1
        for delta in result.deltas:
            self._take(delta)
        for scores in result.scores:
            outcome = self.outcomes[scores.request_id]
            assert scores.prompt_index not in outcome.scores, "prompt scores come twice"
            outcome.scores[scores.prompt_index] = scores.logprobs
        for finished in result.finished:
            outcome = self.outcomes[finished.request_id]
            assert outcome.finished is None, f"{finished.request_id} finishes twice"
            outcome.finished, outcome.finished_step = finished, self.num_steps
        self.wanted += result.wanted
        while self.fetches and self.wanted:
            key = self.wanted.pop(0)
            self.engine.adapter_ready(key, Weights(key))

    def run(self, max_steps: int = 2_000) -> None:
        """Until there is no more work; fails when that takes too long."""
        for _ in range(max_steps):
            if not self.engine.has_work:
                return
            self.step()
            self.engine.check_invariants()
        raise AssertionError(f"still at work after {max_steps} steps")

    def _take(self, delta: wire.Delta) -> None:
        outcome = self.outcomes[delta.request_id]
        assert outcome.finished is None, f"{delta.request_id} goes on after its end"
        assert delta.choice not in outcome.reasons, f"choice {delta.choice} goes on after its end"
        outcome.tokens.setdefault(delta.choice, []).extend(wire.unpack_ids(delta.token_ids))
        outcome.logprobs.setdefault(delta.choice, []).extend(delta.logprobs)
        if delta.token_ids:
            outcome.first_step.setdefault(delta.choice, self.num_steps)
        if delta.finish_reason:
            outcome.reasons[delta.choice] = delta.finish_reason
