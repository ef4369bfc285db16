"""Random walks over scheduler, block pool, prefix cache and adapter pool together, through the real Engine.

After each operation every invariant is checked; the runner checks each block, slot and position it is given; at the
end each request has ended once, with the tokens of its solo run.
"""

import random
from collections import Counter
from functools import cache

from engine import wire
from engine.engine import Engine
from engine.errors import Busy, TooLong
from engine.sequence import choice_seed
from tests.arithmetic_peer import (
    VOCAB_SIZE,
    ArithmeticRunner,
    Driver,
    Outcome,
    Weights,
    expected_output,
    expected_scores,
    make_engine,
    submit,
)

NUM_OPERATIONS = 2_000
CLASSES = ("interactive", "standard", "batch")
ADAPTERS = ("", "", "adapter-a", "adapter-b", "adapter-c", "adapter-d")
SIZES = (
    {"num_blocks": 16, "adapter_slots": 2, "max_running": 8},
    {"num_blocks": 40, "adapter_slots": 1, "max_running": 6, "max_step_tokens": 7, "host_adapter_bytes": 150},
    {"num_blocks": 96, "adapter_slots": 3, "max_running": 24, "max_step_tokens": 64, "host_adapter_bytes": 250},
    {"num_blocks": 12, "adapter_slots": 4, "max_running": 4, "max_backfill": 2, "max_overtakes": 2},
)


class Walk:
    def __init__(self, seed: int, overlaps: bool = False) -> None:
        self.random = random.Random(seed)
        sizes = SIZES[seed % len(SIZES)]
        self.engine: Engine
        self.runner: ArithmeticRunner
        self.engine, self.runner = make_engine(overlaps, context_tokens=56, max_waiting_requests=40, **sizes)
        self.driver = Driver(self.engine, fetches=False)
        self.requests: dict[str, wire.Submit] = {}
        self.aborted: set[str] = set()
        self.failed: set[str] = set()
        self.granted: dict[str, int] = {}
        self.num_idle_steps = 0

    def operate(self) -> None:
        kind = self.random.random()
        if kind < 0.25:
            self.add()
        elif kind < 0.30:
            self.abort()
        elif kind < 0.33:
            self.grant()
        elif kind < 0.45:
            self.answer_wanted()
        elif kind < 0.47:
            self.engine.forget_adapter(self.random.choice(ADAPTERS[2:]))
        else:
            self.step()
        self.engine.check_invariants()

    def add(self) -> None:
        pick = self.random
        tenant, adapter = pick.choice("xyz"), pick.choice(ADAPTERS)
        shared = [1 + i % 7 for i in range(24)]  # the same for everybody: tempting to reuse across namespaces
        prompts = [
            shared[: pick.choice((0, 3, 4, 8, 9, 16, 24))]
            + [pick.randrange(VOCAB_SIZE) for _ in range(pick.randint(1, 9))]
            for _ in range(pick.choice((1, 1, 1, 2)))
        ]
        max_tokens = pick.choice((0, 1, 2, 5, 12, 40))
        request = submit(
            f"r{len(self.requests)}",
            prompts,
            max_tokens,
            flow=tenant,
            weight=pick.choice((1, 3)),
            flow_class=pick.choice(CLASSES),
            adapter_key=adapter,
            num_choices=pick.choice((1, 1, 2, 3)),
            cache_namespace=f"{tenant}/{adapter}".encode(),
            granted_tokens=pick.choice((max_tokens, max_tokens, (max_tokens + 1) // 2)),
            temperature=pick.choice((0.0, 1.0)),
            seed=pick.choice((5, 6)),
            prompt_logprobs=pick.choice((-1, -1, -1, 0)),
            logprobs=pick.choice((-1, 0)),
            min_tokens=pick.choice((0, 0, 3)),
            ignore_eos=pick.random() < 0.3,
            presence_penalty=pick.choice((0.0,) * 15 + (0.5,)),
        )
        try:
            self.driver.add(request)
        except (Busy, TooLong):
            return
        self.requests[request.request_id] = request
        self.granted[request.request_id] = request.granted_tokens

    def abort(self) -> None:
        name = self.open_request()
        if name:
            self.aborted.add(name)
            self.engine.abort(name, self.random.choice((-1, -1, 0, 1)))

    def grant(self) -> None:
        name = self.open_request()
        if name:
            self.granted[name] += self.random.randint(0, 10)
            self.engine.grant(name, self.granted[name])

    def open_request(self) -> str:
        names = [name for name, outcome in self.driver.outcomes.items() if not outcome.finished]
        return self.random.choice(names) if names else ""

    def answer_wanted(self) -> None:
        if not self.driver.wanted:
            return
        key = self.driver.wanted.pop(self.random.randrange(len(self.driver.wanted)))
        kind = self.random.random()
        if kind < 0.1:
            self.failed.add(key)
            self.engine.adapter_failed(key, "adapter_unavailable", "deleted")
        elif kind < 0.2:
            self.failed.add(key)  # its weights don't fit: found out when they are loaded
            self.engine.adapter_ready(key, Weights(key, fits=False))
        else:
            self.engine.adapter_ready(key, Weights(key))

    def step(self) -> None:
        scheduler = self.engine.scheduler
        stuck = not scheduler.running and len(scheduler.waiting.queue)
        computed = len(self.runner.plans)
        self.driver.step()
        self.num_idle_steps = self.num_idle_steps + 1 if stuck and len(self.runner.plans) == computed else 0
        assert self.num_idle_steps <= 3, "nothing runs while somebody could"

    def drain(self) -> None:
        for _ in range(3_000):
            while self.driver.wanted:
                key = self.driver.wanted.pop()
                self.engine.adapter_ready(key, Weights(key))
            if not self.engine.has_work:
                return
            self.step()
            self.engine.check_invariants()
        raise AssertionError("the walk doesn't come to its end")

    def check_outcome(self, name: str, outcome: Outcome) -> None:
        request = self.requests[name]
        prompts = [wire.unpack_ids(prompt) for prompt in request.prompts]
        assert outcome.finished is not None, f"{name} never ended"
        assert set(outcome.reasons) == set(range(len(prompts) * request.num_choices))
        assert outcome.finished.usage.prompt_tokens == sum(map(len, prompts))
        assert outcome.finished.usage.output_tokens == sum(map(len, outcome.tokens.values()))
        for choice, reason in outcome.reasons.items():
            prompt = prompts[choice // request.num_choices]
            seed = choice_seed(request.sampling.seed or 0, choice % request.num_choices)
            expected = expected_output(prompt, request.adapter_key, request.sampling, seed)
            tokens = outcome.tokens[choice]
            assert tokens == expected[: len(tokens)], f"{name}/{choice} isn't its solo run"
            self.check_reason(name, reason, tokens, prompt, expected)
        for index, scores in outcome.scores.items():
            assert scores == expected_scores(prompts[index], request.adapter_key)

    def check_reason(self, name: str, reason: str, tokens: list[int], prompt: list[int], expected: list[int]) -> None:
        if reason == "abort":
            assert name in self.aborted
        elif reason == "error":
            assert self.requests[name].adapter_key in self.failed
        elif reason == "stop":
            assert tokens == expected
            assert tokens[-1] == 0
        else:
            config = self.engine.config
            bounds = (
                self.granted[name],
                self.requests[name].granted_tokens,
                self.requests[name].sampling.max_tokens,
                config.context_tokens - len(prompt),
            )
            filled = len(prompt) + len(tokens) > config.pool_tokens
            assert reason == "length"
            assert min(bounds) <= len(tokens) <= self.requests[name].sampling.max_tokens or filled


@cache
def walked(seed: int, overlaps: bool) -> Walk:
    """One that has come to its end."""
    walk = Walk(seed, overlaps)
    for _ in range(NUM_OPERATIONS):
        walk.operate()
    walk.drain()
    return walk


def check_end(walk: Walk) -> None:
    """Every request ended once, as its solo run, and nothing leaks."""
    scheduler = walk.engine.scheduler
    assert len(walk.requests) > 150
    for name, outcome in walk.driver.outcomes.items():
        walk.check_outcome(name, outcome)
    assert scheduler.pool.num_used == 0
    assert walk.engine.adapters.num_free + walk.engine.adapters.num_idle == walk.engine.adapters.num_slots
    assert sum(scheduler.waiting.num_sequences.values()) == scheduler.waiting.num_tokens == 0
    assert not scheduler.waiting.num_of_adapter
    walk.engine.forget_adapter(ADAPTERS[2])
    assert ADAPTERS[2] not in walk.engine.adapters.residency()


def check_accounts(walk: Walk) -> None:
    """Every nanosecond of every step is paid by a request or by a named account."""
    finished = [outcome.finished for outcome in walk.driver.outcomes.values() if outcome.finished]
    accounts = walk.engine.stats.account_ns
    assert sum(item.usage.gpu_ns for item in finished) == accounts["attributed"] > 0
    run = ("attributed", "recompute", "lost")
    assert sum(walk.engine.stats.phase_ns.values()) == sum(accounts[name] for name in run)
    assert sum(item.usage.recompute_ns for item in finished) <= accounts["recompute"]
    assert sum(item.usage.load_ns for item in finished) == accounts["load"]


def met(walk: Walk) -> Counter[str]:
    """What it went through."""
    plans = walk.runner.plans
    return Counter(
        preempted=walk.engine.scheduler.num_preemptions,
        exhausted=sum(len(plan.exhausted) for plan in plans),
        reused=walk.engine.scheduler.pool.num_reused,
        loads=walk.runner.num_loads,
        next=sum(plan.is_next for plan in plans),
        mixed=sum(len({chunk.num_tokens for chunk in plan.chunks}) > 1 for plan in plans),
    )
