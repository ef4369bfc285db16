"""The step loop: schedule → launch → land. One thread calls everything here.

On a device that computes beside the host, a step is launched before the one ahead of it has landed: its decodes are
fed on the device with tokens that the host does not know yet. A choice that ends by its last token then has one row
too many in the air; what that row gives is dropped, told to nobody and billed to nobody.
"""

import secrets
import time
from collections import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from engine import wire
from engine.adapter_pool import AdapterPool, HostTier, HostWeights
from engine.config import EngineConfig
from engine.errors import Busy, InvalidAdapter, InvalidRequest
from engine.experts import ExpertLoad
from engine.flight import Flight, StepHandle
from engine.intake import Grammar, ModelInfo, make_sequences, read_prompts
from engine.metering.attribution import Attribution
from engine.metering.device_counters import DeviceCounters
from engine.metering.stats import NO_BILL, EngineStats, StepBill, StepStats, StepTimes
from engine.outbox import Outbox
from engine.scheduler import NOTHING, ChunkResult, Scheduler, StepPlan
from engine.sequence import Request, Sequence, SequenceStatus


class StepRunner(Protocol):
    """What runs a plan: ``engine.runner.Runner``. ``load_slot`` raises InvalidAdapter for weights that don't fit.

    ``overlaps``: a handle's results may still be computed while the next plan is launched; everything that is asked
    of a runner happens in the order of the calls.
    """

    @property
    def model_info(self) -> ModelInfo: ...
    @property
    def expert_load(self) -> ExpertLoad | None: ...
    @property
    def device_counters(self) -> DeviceCounters | None: ...
    @property
    def overlaps(self) -> bool: ...
    def launch(self, plan: StepPlan) -> StepHandle: ...
    def prepare(self, weights: Any) -> HostWeights: ...
    def load_slot(self, slot: int, weights: Any) -> None: ...
    def clear_slot(self, slot: int) -> None: ...


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step (and the aborts before it) has to tell. ``wanted``: adapter keys to fetch, each once a need;
    ``stats`` are those of the step that landed; ``in_flight``: another is on the device."""

    deltas: list[wire.Delta]
    scores: list[wire.PromptScores]
    finished: list[wire.Finished]
    wanted: list[str]
    stats: StepStats
    in_flight: bool = False


def random_seed() -> int:
    """63 bits from the operating system."""
    return secrets.randbits(63)


class Engine:
    """Requests in, events out. Every added request ends in exactly one ``Finished``, after exactly one ``Delta``
    with a finish reason for each of its choices.

    ``clock`` gives monotonic ns; ``seed_source`` draws the seed of a choice whose request has none.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: StepRunner,
        *,
        clock: Callable[[], int] = time.monotonic_ns,
        seed_source: Callable[[], int] = random_seed,
    ) -> None:
        self.config = config
        self.adapters = AdapterPool(
            config.adapter_slots, HostTier(config.host_adapter_bytes), config.expert_adapter_slots
        )
        self.scheduler = Scheduler(config, self.adapters)
        self._attribution = Attribution(config.adapter_slots)
        self.stats = EngineStats(
            self.scheduler, clock, self._attribution.fit, runner.expert_load, runner.device_counters
        )
        self._runner = runner
        self._clock = clock
        self._seed_source = seed_source
        self._requests: dict[str, Request] = {}
        self._unstarted: set[str] = set()
        self._num_sequences = 0
        self._flight: Flight | None = None
        self._landed_ns = 0
        self._outbox = Outbox(config.context_tokens, runner.model_info.eos_token_ids)

    @property
    def has_work(self) -> bool:
        """A step would do or tell something. False while all that is left waits for adapters."""
        return self.scheduler.has_work or bool(self._outbox) or self._flight is not None or self.adapters.has_clears

    def step(self) -> StepResult:
        """One forward over everything that is due is launched, one lands (the one ahead, if there is one in the air);
        all events since the last step."""
        ahead = self._flight
        plan, load_times_ns = self._next_plan()
        self._flight = self._launch(plan)
        landing = ahead or self._take_back()
        run_ns, bill = self._land(landing) if landing else (0, NO_BILL)
        return self._collect(landing, StepTimes(run_ns, bill, load_times_ns, is_beside=ahead is not None))

    # ── between steps ────────────────────────────────────────────────────────────────────────────

    def add(self, submit: wire.Submit, grammar: Grammar | None = None) -> None:
        """``grammar`` is the submit's, compiled. Raises Busy, TooLong or InvalidRequest; nothing of the request is kept
        then."""
        if submit.request_id in self._requests:
            raise InvalidRequest("this request id is in use")
        if bool(submit.sampling.grammar) != (grammar is not None):
            raise InvalidRequest("a grammar comes compiled, or not at all")
        prompts = read_prompts(submit, self.config, self._runner.model_info)
        num_tokens = submit.num_choices * sum(map(len, prompts))
        full = len(self._unstarted) >= self.config.max_waiting_requests
        if full or self.scheduler.waiting.num_tokens + num_tokens > self.config.max_waiting_tokens:
            raise Busy("the waiting queue is full")
        request = Request(submit, self._clock())
        request.sequences = make_sequences(request, prompts, self._num_sequences, self._seed_source)
        if grammar is not None:
            for sequence in request.sequences:
                sequence.matcher = grammar.matcher()
        request.num_unfinished = len(request.sequences)
        self._num_sequences += len(request.sequences)
        self._requests[submit.request_id] = request
        self._unstarted.add(submit.request_id)
        self.scheduler.add(request.sequences)

    def abort(self, request_id: str, choice: int = -1) -> None:
        """Ends one choice, or all (-1), now; the events come with the next step. Unknown ones are ignored."""
        request = self._requests.get(request_id)
        for sequence in request.sequences if request else []:
            if choice in (-1, sequence.choice) and sequence.status is not SequenceStatus.FINISHED:
                self._end(sequence, "abort")

    def grant(self, request_id: str, granted_tokens: int) -> None:
        """Raises the output tokens allowed per choice, up to max_tokens; never lowers them."""
        request = self._requests.get(request_id)
        for sequence in request.sequences if request else []:
            sequence.limit = max(sequence.limit, min(sequence.sampling.max_tokens, granted_tokens))

    def prepare_adapter(self, weights: Any) -> HostWeights:
        """Weights as read from a file in the form that loads fastest. From any thread, beside the steps."""
        return self._runner.prepare(weights)

    def adapter_ready(self, key: str, weights: HostWeights) -> None:
        """A host copy has come; who waits for it gets its turn."""
        self.adapters.host.put(key, weights)
        self.scheduler.waiting.adapter_ready(key)

    def adapter_failed(self, key: str, code: str, message: str) -> None:
        """There is no such copy: requests that wait for it finish with ``code``."""
        for sequence in self.scheduler.waiting.parked(key):
            self._fail(sequence.request, code, message)

    def forget_adapter(self, key: str) -> None:
        """A deleted version: gone from host memory and its slot with the last sequence that was here before, running,
        queued or preempted. The slot is zeroed by a step to come."""
        self.adapters.retire(key)
        self._drop_retired()

    def check_invariants(self) -> None:
        """Asserts what holds between steps."""
        self.scheduler.check_invariants()
        waiting = running = 0
        for request in self._requests.values():
            unfinished = [sequence for sequence in request.sequences if sequence.status is not SequenceStatus.FINISHED]
            assert len(unfinished) == request.num_unfinished > 0, f"{request.request_id} should have finished"
            running += sum(sequence.status is SequenceStatus.RUNNING for sequence in unfinished)
            waiting += sum(sequence.status is SequenceStatus.WAITING for sequence in unfinished)
        assert running == len(self.scheduler.running), "a running sequence belongs to no request"
        assert waiting == sum(self.scheduler.waiting.num_sequences.values()), "a waiting sequence is lost"
        assert self._unstarted <= self._requests.keys()

    # ── parts of a step ──────────────────────────────────────────────────────────────────────────

    def _next_plan(self) -> tuple[StepPlan, tuple[int, ...]]:
        """What is due, its adapters loaded; nothing while it depends on tokens that are in the air."""
        if self._flight is not None and self.scheduler.needs_tokens:
            return NOTHING, ()
        plan, load_times_ns = self._load_adapters(self.scheduler.schedule())
        for sequence in plan.exhausted:
            self._tell_end(sequence, "length")
        return plan, load_times_ns

    def _launch(self, plan: StepPlan) -> Flight | None:
        if not plan.chunks:
            return None
        parts = self._attribution.weigh(plan)
        started_ns = self._clock()
        for chunk in plan.chunks:
            request = chunk.sequence.request
            if not request.scheduled_ns:
                request.scheduled_ns = started_ns
                self._unstarted.discard(request.request_id)
        flight = Flight(plan, parts, self._runner.launch(plan), started_ns)
        self.scheduler.launched(plan)
        return flight

    def _take_back(self) -> Flight | None:
        """The step just launched, if it has to land before another is planned."""
        if self._runner.overlaps and not self.scheduler.needs_tokens:
            return None
        flight, self._flight = self._flight, None
        return flight

    def _land(self, flight: Flight) -> tuple[int, StepBill]:
        """Takes in what a step has computed → the ns that it had the device for itself, and who doesn't pay them."""
        results = flight.handle.results()
        began_ns, self._landed_ns = max(flight.started_ns, self._landed_ns), self._clock()
        run_ns = self._landed_ns - began_ns
        bill = self._attribution.share(flight.plan, flight.parts, flight.handle.expert_parts(), run_ns)
        self._commit(flight.plan, results, self._landed_ns)
        return run_ns, bill

    def _load_adapters(self, plan: StepPlan) -> tuple[StepPlan, tuple[int, ...]]:
        """Moves the weights that the plan needs; requests whose weights don't fit fail and leave the plan. A step that
        loads nothing zeroes a slot, if there is one to be zeroed."""
        self._drop_retired()
        failed: dict[str, InvalidAdapter] = {}
        times_ns = []
        loads = self.adapters.take_loads()
        if not loads and (slot := self.adapters.take_clear()) >= 0:
            self._runner.clear_slot(slot)
        for load in loads:
            begin_ns = self._clock()
            if load.replaces:
                self._runner.clear_slot(load.slot)
            try:
                self._runner.load_slot(load.slot, load.weights)
            except InvalidAdapter as error:
                failed[load.key] = error
            times_ns.append(self._clock() - begin_ns)
            self._attribution.loaded(load, plan, 0 if self._flight else times_ns[-1])
        return (self._without(plan, failed) if failed else plan), tuple(times_ns)

    def _without(self, plan: StepPlan, failed: dict[str, InvalidAdapter]) -> StepPlan:
        for key in failed:
            self.adapters.forget(key)
        for chunk in plan.chunks:
            error = failed.get(chunk.sequence.adapter_key)
            if error is not None:
                self._fail(chunk.sequence.request, error.code, str(error))
        chunks = tuple(chunk for chunk in plan.chunks if chunk.sequence.status is SequenceStatus.RUNNING)
        return StepPlan(chunks, plan.preempted, sum(chunk.num_tokens for chunk in chunks), plan.exhausted)

    def _commit(self, plan: StepPlan, results: abc.Sequence[ChunkResult], now_ns: int) -> None:
        assert len(results) == len(plan.chunks), "the runner answers each chunk once"
        self.scheduler.commit(plan)
        for chunk, result in zip(plan.chunks, results, strict=True):
            sequence = chunk.sequence
            if sequence.status is SequenceStatus.FINISHED:  # while this was in the air
                continue
            if sequence.sampling.prompt_logprobs >= 0 and sequence.is_leader:
                self._outbox.add_scores(chunk, result)
            if chunk.samples and sequence.matcher is not None and sequence.matcher.failure:
                self._end(sequence, "length")  # without the token: no mask stood before it
            elif chunk.samples:
                reason = self._outbox.add_token(chunk, result, now_ns)
                if reason:
                    self.scheduler.finish(sequence)
                    self._close(sequence, reason)
            elif sequence.limit == 0 and chunk.end == len(sequence.token_ids):
                self._end(sequence, "length")

    def _collect(self, landed: Flight | None, times: StepTimes) -> StepResult:
        self._drop_retired()
        events = self._outbox.take()
        wanted = self.scheduler.waiting.take_wanted()
        # what comes after it belongs to the step in the air
        until_ns = max(self._flight.started_ns, self._landed_ns) if self._flight else self._clock()
        stats = self.stats.record(landed.plan if landed else NOTHING, times, until_ns)
        in_flight = self._flight is not None
        return StepResult(events.deltas, events.scores, events.finished, wanted, stats, in_flight)

    # ── ends ─────────────────────────────────────────────────────────────────────────────────────

    def _fail(self, request: Request, code: str, message: str) -> None:
        if not request.error_code:
            request.error_code, request.error_message = code, message
        for sequence in request.sequences:
            if sequence.status is not SequenceStatus.FINISHED:
                self._end(sequence, "error")

    def _end(self, sequence: Sequence, reason: wire.FinishReason) -> None:
        self.scheduler.finish(sequence)
        self._tell_end(sequence, reason)

    def _tell_end(self, sequence: Sequence, reason: wire.FinishReason) -> None:
        self._outbox.add_end(sequence, reason)
        self._close(sequence, reason)

    def _close(self, sequence: Sequence, reason: wire.FinishReason) -> None:
        request = self._outbox.close(sequence, reason, self._clock())
        if request is not None:
            del self._requests[request.request_id]
            self._unstarted.discard(request.request_id)

    def _drop_retired(self) -> None:
        self.adapters.drop_retired(self.scheduler.waiting.num_of_adapter)
