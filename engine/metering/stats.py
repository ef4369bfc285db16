"""What the engine counts, and how it is told: metric families as plain numbers, without a model label."""

import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

from engine.experts import ExpertLoad
from engine.metering.device_counters import DeviceCounters
from engine.scheduler import Scheduler, StepPlan
from engine.sequence import CLASS_RANK
from engine.wire import Family

STEP_BUCKETS = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.024, 2.048, 4.096)
LOAD_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
SIZE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
UTILIZATION_WINDOW_NS = 10_000_000_000
MAX_LISTED_ADAPTERS = 32
RESIDENT_FAMILY = "tenora_adapters_resident"  # the server adds the disk tier's sample

ACCOUNTS = ("attributed", "load", "recompute", "lost", "idle", "overhead")

Labels = dict[str, str]


@dataclass(frozen=True, slots=True)
class StepBill:
    """The parts of a step's ns that no request pays: computing anew what a preemption threw away, and what was computed
    for those who had ended before it was there."""

    recompute_ns: int = 0
    lost_ns: int = 0


NO_BILL = StepBill()


class StepModel(Protocol):
    """What predicts a step's time, and how wrong it was: ``engine.metering.cost_fit.CostFit``."""

    @property
    def error_ratio(self) -> float: ...
    @property
    def r_squared(self) -> float: ...
    def families(self) -> Iterable[Family]: ...


@dataclass(frozen=True, slots=True)
class StepStats:
    """One step: what it computed, and where its time went (ns). ``run_ns`` is the forward, attributed to requests but
    for what is in ``bill``; ``load_ns`` is moving adapters; the rest of the step is ``overhead_ns``."""

    num_sequences: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    run_ns: int = 0
    load_ns: int = 0
    overhead_ns: int = 0
    prefill_ns: int = 0  # run_ns shared by tokens between the two phases
    decode_ns: int = 0
    load_times_ns: tuple[int, ...] = ()
    bill: StepBill = NO_BILL

    @property
    def num_tokens(self) -> int:
        return self.num_prefill_tokens + self.num_decode_tokens

    @property
    def kind(self) -> str:
        if self.num_prefill_tokens and self.num_decode_tokens:
            return "mixed"
        return "prefill" if self.num_prefill_tokens else "decode"


@dataclass(frozen=True, slots=True)
class StepTimes:
    """``run_ns`` of the step that landed, and how long each adapter load took; ``is_beside``: these loads went on
    while that step was on the device, so that their time is in its own."""

    run_ns: int
    bill: StepBill
    load_times_ns: tuple[int, ...]
    is_beside: bool


def _measure(plan: StepPlan, times: StepTimes, span_ns: int) -> StepStats:
    """The numbers of a step and of the ``span_ns`` that it ends. Recomputing after a preemption is prefill."""
    num_decode = sum(chunk.num_tokens == 1 and chunk.start >= chunk.sequence.num_prompt_tokens for chunk in plan.chunks)
    decode_ns = times.run_ns * num_decode // plan.num_tokens if plan.num_tokens else 0
    load_ns = 0 if times.is_beside else sum(times.load_times_ns)
    return StepStats(
        num_sequences=len(plan.chunks),
        num_prefill_tokens=plan.num_tokens - num_decode,
        num_decode_tokens=num_decode,
        run_ns=times.run_ns,
        load_ns=load_ns,
        overhead_ns=span_ns - times.run_ns - load_ns,
        prefill_ns=times.run_ns - decode_ns,
        decode_ns=decode_ns,
        load_times_ns=times.load_times_ns,
        bill=times.bill,
    )


class Histogram:
    """Counts by upper bound; ``samples`` gives them cumulative."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def samples(self, labels: Labels) -> list[tuple[str, Labels, float]]:
        samples: list[tuple[str, Labels, float]] = []
        total = 0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            samples.append(("_bucket", {**labels, "le": bound}, total))
        return [*samples, ("_sum", labels, self._sum), ("_count", labels, total)]


_NO_COLLECTIVES = Histogram(STEP_BUCKETS)  # an engine has one device


class EngineStats:
    """Adds up steps. Every nanosecond since the start is in one account: attributed to a request, adapter load,
    recompute (after preemptions) and lost (computed for who had ended), which no request pays, idle (as the step thread
    says), or overhead: scheduling, and what else lies between two forwards."""

    def __init__(
        self,
        scheduler: Scheduler,
        clock: Callable[[], int],
        fit: StepModel,
        experts: ExpertLoad | None = None,
        device: DeviceCounters | None = None,
    ) -> None:
        self.account_ns = dict.fromkeys(ACCOUNTS, 0)
        self.phase_ns = {"prefill": 0, "decode": 0}
        self._scheduler = scheduler
        self._clock = clock
        self.fit = fit
        self._experts = experts
        self._device = device
        self._num_bytes = 0
        self.started_ns = self._ended_ns = clock()
        self._recent: deque[tuple[int, int, int]] = deque()  # (end, busy ns, bytes) of the steps in the window
        self._step_seconds = {kind: Histogram(STEP_BUCKETS) for kind in ("prefill", "decode", "mixed")}
        self._batch_tokens = {"prefill": Histogram(SIZE_BUCKETS), "decode": Histogram(SIZE_BUCKETS)}
        self._batch_sequences = Histogram(SIZE_BUCKETS)
        self._load_seconds = Histogram(LOAD_BUCKETS)

    def idle(self, idle_ns: int) -> None:
        """The step thread has waited since the last step."""
        self.account_ns["idle"] += idle_ns
        self._ended_ns += idle_ns

    def record(self, plan: StepPlan, times: StepTimes, until_ns: int) -> StepStats:
        """A step that landed, and all time up to ``until_ns`` that is in no account yet."""
        step = _measure(plan, times, until_ns - self._ended_ns)
        accounts = self.account_ns
        accounts["attributed"] += step.run_ns - step.bill.recompute_ns - step.bill.lost_ns
        accounts["recompute"] += step.bill.recompute_ns
        accounts["lost"] += step.bill.lost_ns
        accounts["load"] += step.load_ns
        accounts["overhead"] += step.overhead_ns
        self._ended_ns = until_ns
        for load_ns in step.load_times_ns:
            self._load_seconds.observe(load_ns / 1e9)
        if step.num_sequences:
            self._record_batch(step)
        return step

    def families(self) -> list[Family]:
        """Everything as of now. From another thread, numbers may be one step apart."""
        return [
            *self._time_families(),
            *self._batch_families(),
            *_queue_families(self._scheduler),
            *_block_families(self._scheduler),
            *_adapter_families(self._scheduler),
            *self._expert_families(),
            *self._device_families(),
            *self.fit.families(),
            _histogram("tenora_adapter_load_seconds", "Moving an adapter into its slot", {"": self._load_seconds}),
            _histogram("tenora_collective_seconds", "Exchange between devices", {"": _NO_COLLECTIVES}),
        ]

    def _record_batch(self, step: StepStats) -> None:
        self.phase_ns["prefill"] += step.prefill_ns
        self.phase_ns["decode"] += step.decode_ns
        self._step_seconds[step.kind].observe(step.run_ns / 1e9)
        self._batch_sequences.observe(step.num_sequences)
        for phase, count in (("prefill", step.num_prefill_tokens), ("decode", step.num_decode_tokens)):
            if count:
                self._batch_tokens[phase].observe(count)
        num_bytes = self._device.num_bytes if self._device else 0
        self._recent.append((self._ended_ns, step.run_ns, num_bytes - self._num_bytes))
        self._num_bytes = num_bytes
        while self._recent[0][0] < self._ended_ns - UTILIZATION_WINDOW_NS:
            self._recent.popleft()

    def _time_families(self) -> Iterable[Family]:
        seconds = {name: value / 1e9 for name, value in self.account_ns.items()}
        yield _family("tenora_gpu_seconds", "counter", "Device time by account", "account", seconds)
        phases = {name: value / 1e9 for name, value in self.phase_ns.items()}
        yield _family("tenora_phase_gpu_seconds", "counter", "Forwards' time by phase, by tokens", "phase", phases)
        now_ns = self._clock()
        window_ns = min(UTILIZATION_WINDOW_NS, now_ns - self.started_ns)
        busy_ns = sum(run_ns for _, run_ns, _ in self._in_window(now_ns))
        ratio = min(1.0, busy_ns / window_ns) if window_ns > 0 else 0.0
        yield _single("tenora_gpu_utilization_ratio", "gauge", "Busy / wall time of the last ten seconds", ratio)

    def _batch_families(self) -> Iterable[Family]:
        yield _histogram("tenora_step_seconds", "Forward passes", self._step_seconds, "kind")
        yield _histogram("tenora_batch_sequences", "Sequences of a step", {"": self._batch_sequences})
        yield _histogram("tenora_batch_tokens", "Tokens of a step", self._batch_tokens, "phase")

    def _in_window(self, now_ns: int) -> list[tuple[int, int, int]]:
        return [step for step in tuple(self._recent) if step[0] > now_ns - UTILIZATION_WINDOW_NS]

    def _device_families(self) -> Iterable[Family]:
        if self._device is None:
            return
        steps = self._in_window(self._clock())
        could = sum(run_ns for _, run_ns, _ in steps) / 1e9 * self._device.peak_bytes_s
        ratio = sum(num_bytes for _, _, num_bytes in steps) / could if could else 0.0
        help_text = "Bytes that the steps of the last ten seconds had to move / what the memory could have moved"
        if self._device.peak_bytes_s:
            yield _single("tenora_memory_bandwidth_ratio", "gauge", help_text, ratio)
        yield from self._device.families()

    def _expert_families(self) -> Iterable[Family]:
        if self._experts is None:
            return
        even = self._experts.recent_balancedness(self._clock())
        help_text = "Mean over highest load of an expert in the last minute"
        yield _single("tenora_expert_balancedness", "gauge", help_text, even)
        tokens = [
            ("_total", {"layer": str(layer), "expert": str(expert)}, float(number))
            for (layer, expert), number in self._experts.top().items()
        ]
        yield Family("tenora_expert_tokens", "counter", "Tokens of the most used experts", tokens)


def _queue_families(scheduler: Scheduler) -> Iterable[Family]:
    waiting = dict(scheduler.waiting.num_sequences)
    yield _family("tenora_queue_depth", "gauge", "Waiting sequences", "class", waiting)
    yield _single("tenora_preemptions", "counter", "Sequences that gave their blocks back", scheduler.num_preemptions)
    yield _single("vllm:num_requests_running", "gauge", "Running sequences", len(scheduler.running))
    yield _single("vllm:num_requests_waiting", "gauge", "Waiting sequences", sum(waiting.values()))


def _block_families(scheduler: Scheduler) -> Iterable[Family]:
    pool, running = scheduler.pool, tuple(scheduler.running)
    states = {"free": pool.num_free, "cached": pool.num_cached, "used": pool.num_used}
    yield _family("tenora_kv_blocks", "gauge", "KV blocks by state", "state", states)
    in_use = dict.fromkeys(CLASS_RANK, 0)
    for sequence in running:
        in_use[sequence.request.submit.flow.flow_class] += len(sequence.block_table)
    help_text = "Blocks in the tables of running sequences; a shared one counts for each"
    yield _family("tenora_kv_blocks_in_use", "gauge", help_text, "class", in_use)
    room = sum(in_use.values()) * scheduler.config.block_size
    empty = room - sum(sequence.num_computed_tokens for sequence in running)
    help_text = "Part of the running sequences' blocks that holds nothing yet"
    yield _single("tenora_kv_fragmentation_ratio", "gauge", help_text, max(0.0, empty / room) if room else 0.0)
    yield _single("tenora_kv_block_reuse", "counter", "Blocks taken over from the prefix cache", pool.num_reused)
    tokens = {"hit": scheduler.num_cache_hits, "miss": scheduler.num_cache_misses}
    yield _family("tenora_prefix_cache_tokens", "counter", "Prompt tokens found, and not", "result", tokens)
    usage = pool.num_used / pool.num_blocks
    yield _single("vllm:kv_cache_usage_perc", "gauge", "Used part of the KV blocks, 0 to 1", usage)


def _adapter_families(scheduler: Scheduler) -> Iterable[Family]:
    adapters = scheduler.adapters
    tiers = {"device": adapters.num_resident, "cpu": len(adapters.host)}
    yield _family(RESIDENT_FAMILY, "gauge", "Adapters whose weights are there", "tier", tiers)
    free, idle = adapters.num_free, adapters.num_idle
    states = {"free": free, "idle": idle, "pinned": adapters.num_slots - free - idle}
    yield _family("tenora_adapter_slots", "gauge", "Adapter slots by state", "state", states)
    running = Counter(sequence.adapter_key for sequence in tuple(scheduler.running) if sequence.adapter_key)
    labels = {
        "max_lora": str(adapters.num_slots),
        "running_lora_adapters": _short_keys(running),
        "waiting_lora_adapters": _short_keys(list(scheduler.waiting.num_of_adapter)),
    }
    help_text = "Adapters in use, first 12 hex digits of their keys; the value is when (unix seconds)"
    yield Family("vllm:lora_requests_info", "gauge", help_text, [("", labels, time.time())])


def _short_keys(keys: Iterable[str]) -> str:
    return ",".join(sorted(key[:12] for key in keys)[:MAX_LISTED_ADAPTERS])


def _family(name: str, kind: Literal["counter", "gauge"], text: str, label: str, values: dict) -> Family:
    suffix = "_total" if kind == "counter" else ""
    return Family(name, kind, text, [(suffix, {label: key}, float(value)) for key, value in values.items()])


def _single(name: str, kind: Literal["counter", "gauge"], text: str, value: float) -> Family:
    return Family(name, kind, text, [("_total" if kind == "counter" else "", {}, float(value))])


def _histogram(name: str, text: str, histograms: dict[str, Histogram], label: str = "") -> Family:
    samples = [
        sample for key, histogram in histograms.items() for sample in histogram.samples({label: key} if label else {})
    ]
    return Family(name, "histogram", text, samples)
