"""Spend windows in quota.lua: exact sums of money, reserved before the work, on a real Valkey."""

import asyncio
import json
import random
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass, field, replace

import pytest
from redis.asyncio import Redis

from tenants.errors import SpendUnknown
from tenants.periods import Period
from tenants.quota.budgets import Spend, Window
from tenants.quota.quota import LEASE_MS, Admitted, Limits, Quota, Refused, Reservation

START_MS = 1_800_000_000_000
MONTH = Period(START_MS * 10**6, (START_MS + 30 * 86_400_000) * 10**6, "2027-01-01")
NEXT = Period(MONTH.end_unix_ns, MONTH.end_unix_ns + 30 * 86_400 * 10**9, "2027-02-01")
HUGE = 2**63 - 1


class Clock:
    def __init__(self) -> None:
        self.now_ms = START_MS

    def __call__(self) -> int:
        return self.now_ms


def windows(*limits: int | None, stamp: int = 7, period: Period = MONTH) -> tuple[Window, ...]:
    names = ("tenant", "key:k1", "key:k1:model:tiny")
    return tuple(
        Window(f"{name}@{period.label}", limit, stamp, period) for name, limit in zip(names, limits, strict=False)
    )


def spending(number: int, picousd: int, of: tuple[Window, ...], *rates: Limits) -> Reservation:
    scopes = tuple(zip(("tenant", "key:k1"), rates, strict=False))
    return Reservation(f"request-{number}", 0, "ten_a", "k1", 1, scopes, Spend(picousd, of))


async def known(quota: Quota, of: tuple[Window, ...], *sums: int) -> None:
    """Opens the windows with what the ledger has: 0 unless told."""
    await quota.mark("ten_a", "mark")
    told = {window.name: sums[i] if i < len(sums) else 0 for i, window in enumerate(of)}
    assert await quota.open(spending(0, 0, of), told, (), "mark")


async def sum_of(redis: Redis, window: Window) -> int:
    saved = await redis.hget(f"tn:q2:{{ten_a}}:s:{window.name}", "n")
    assert saved is not None
    return int(saved)


@pytest.fixture
def with_quota(with_redis):
    def run(scenario):
        async def body(redis):
            clock = Clock()
            with closing(Quota(redis, 30.0, clock_ms=clock)) as quota:
                return await scenario(quota, clock, redis)

        return with_redis(body)

    return run


@pytest.mark.parametrize("limit", [1, 10**9 - 1, 10**9, 2**53 + 1, HUGE])
def test_a_window_holds_its_limit_to_the_last_picousd(with_quota, limit):
    of = windows(limit)

    async def scenario(quota, clock, redis):
        await known(quota, of)
        assert isinstance(await quota.reserve(spending(1, limit - 1, of)), Admitted)
        assert isinstance(await quota.reserve(spending(2, 2, of)), Refused)
        assert isinstance(await quota.reserve(spending(3, 1, of)), Admitted)
        assert isinstance(await quota.reserve(spending(4, 1, of)), Refused)
        assert await sum_of(redis, of[0]) == limit

    with_quota(scenario)


def test_a_sum_that_is_far_over_bigint_refuses_and_stays_exact(with_quota):
    of, spent = windows(HUGE), 12_345_678_901_234_567_890_123

    async def scenario(quota, clock, redis):
        await known(quota, of, spent)
        assert isinstance(await quota.reserve(spending(1, 1, of)), Refused)
        assert await quota.book(spending(2, HUGE, of), 0) is True
        assert await sum_of(redis, of[0]) == spent + HUGE

    with_quota(scenario)


def test_the_refusal_names_the_window_and_when_its_period_ends(with_quota):
    of = windows(None, 5, 9)

    async def scenario(quota, clock, redis):
        await known(quota, of)
        refused = await quota.reserve(spending(1, 6, of))
        assert (refused.limit, refused.scope, refused.retry_after_ms) == ("spend", "key:k1@2027-01-01", None)
        assert refused.end_unix_ms * 10**6 == MONTH.end_unix_ns

    with_quota(scenario)


def test_a_refusal_by_money_takes_no_rate_and_one_by_rate_takes_no_money(with_quota):
    of = windows(100)
    rates = Limits(requests_per_minute=3, tokens_per_minute=100, concurrent_requests=2)

    async def scenario(quota, clock, redis):
        await known(quota, of)
        for number in range(9):
            assert (await quota.reserve(spending(number, 101, of, rates))).limit == "spend"
        admitted = await quota.reserve(spending(10, 1, of, rates))
        assert admitted.headroom.remaining_requests == 2
        refused = await quota.reserve(replace(spending(11, 1, of, rates), tokens=500))
        assert refused.limit == "tokens_per_minute"
        assert await sum_of(redis, of[0]) == 1

    with_quota(scenario)


@pytest.mark.parametrize(
    ("kind", "price", "left"), [("exact", 30, 30), ("exact", 95, 95), ("at_least", 30, 80), ("at_least", 95, 95),
                                ("void", 0, 0), ("void", 30, 0)]
)  # fmt: skip
def test_each_kind_of_settlement_leaves_what_it_says_and_once(with_quota, kind, price, left):
    of = windows(100)

    async def scenario(quota, clock, redis):
        await known(quota, of)
        one = spending(1, 80, of)
        await quota.reserve(one)
        for again in (price, 0, 7):
            await quota.settle(one, 1, kind, again, 0)
        assert await sum_of(redis, of[0]) == left

    with_quota(scenario)


def test_an_extension_reserves_more_and_a_refused_one_takes_nothing(with_quota):
    of = windows(100)

    async def scenario(quota, clock, redis):
        await known(quota, of)
        one = spending(1, 80, of)
        await quota.reserve(one)
        assert await quota.extend(one, 1, 21) is False
        assert await sum_of(redis, of[0]) == 80
        assert await quota.extend(one, 1, 20) is True
        assert await sum_of(redis, of[0]) == 100

    with_quota(scenario)


def test_a_window_that_nobody_knows_refuses_until_it_is_counted(with_quota):
    of = windows(100)

    async def scenario(quota, clock, redis):
        one = spending(1, 60, of)
        with pytest.raises(SpendUnknown):
            await quota.reserve(one)
        await known(quota, of, 41)
        assert isinstance(await quota.reserve(one), Refused)
        await redis.flushall()
        with pytest.raises(SpendUnknown):
            await quota.reserve(one)
        await known(quota, of, 40)
        assert isinstance(await quota.reserve(one), Admitted)

    with_quota(scenario)


def test_a_limit_that_is_younger_than_the_sum_has_it_counted_anew(with_quota):
    old, young = windows(100), windows(100, stamp=8)

    async def scenario(quota, clock, redis):
        await known(quota, old, 50)
        with pytest.raises(SpendUnknown):
            await quota.reserve(spending(1, 10, young))
        await known(quota, young, 95)
        assert isinstance(await quota.reserve(spending(1, 10, young)), Refused)
        assert isinstance(await quota.reserve(spending(1, 10, old)), Refused)  # who has not heard of it yet

    with_quota(scenario)


def test_what_began_before_midnight_is_settled_where_it_began(with_quota):
    before, after = windows(100), windows(100, period=NEXT)

    async def scenario(quota, clock, redis):
        await known(quota, before)
        await known(quota, after)
        one = spending(1, 80, before)
        await quota.reserve(one)
        clock.now_ms = NEXT.start_unix_ns // 10**6 + 5
        assert isinstance(await quota.reserve(spending(2, 100, after)), Admitted)
        await quota.settle(one, 1, "exact", 90, 0)
        assert (await sum_of(redis, before[0]), await sum_of(redis, after[0])) == (90, 100)

    with_quota(scenario)


def test_a_lease_that_ran_out_frees_its_place_but_its_spend_waits_for_the_record(with_quota):
    of, rates = windows(100), Limits(concurrent_requests=1)

    async def scenario(quota, clock, redis):
        await known(quota, of)
        dead = spending(1, 80, of, rates)
        await quota.reserve(dead)
        clock.now_ms += LEASE_MS + 1
        assert (await quota.reserve(spending(2, 21, of, rates))).limit == "spend"
        assert await quota.book(spending(1, 0, of), 0) is True  # it was lost
        assert isinstance(await quota.reserve(spending(2, 21, of, rates)), Admitted)

    with_quota(scenario)


def test_the_record_has_the_last_word_and_is_heard_once(with_quota):
    of = windows(1000)

    async def scenario(quota, clock, redis):
        await known(quota, of)
        one = spending(1, 80, of)
        await quota.reserve(one)
        await quota.settle(one, 1, "at_least", 30, 0)
        for _ in range(3):
            assert await quota.book(spending(1, 44, of), 0) is True
        await quota.settle(one, 1, "exact", 7, 0)
        assert await sum_of(redis, of[0]) == 44
        assert await quota.book(spending(2, 11, of), 0) is True  # of which nothing was known
        assert await quota.book(spending(2, 11, of), 0) is True
        assert await sum_of(redis, of[0]) == 55

    with_quota(scenario)


def test_a_first_attempt_that_was_lost_frees_nothing_of_a_request_that_goes_on(with_quota):
    of = windows(100)

    async def scenario(quota, clock, redis):
        await known(quota, of)
        one = spending(1, 80, of)
        await quota.reserve(one)
        assert await quota.book(spending(1, 0, of), 0) is False
        assert await sum_of(redis, of[0]) == 80
        await quota.settle(one, 1, "exact", 50, 1)
        assert await quota.book(spending(1, 0, of), 0) is False
        assert await quota.book(spending(1, 50, of), 1) is True
        assert await sum_of(redis, of[0]) == 50

    with_quota(scenario)


def test_a_new_count_has_what_is_held_and_not_in_the_ledger(with_quota):
    of = windows(1000, 1000)

    async def scenario(quota, clock, redis):
        running, ended, booked, other = (spending(number, 10**number, of) for number in (0, 1, 2, 3))
        await quota.mark("ten_a", "m")
        await quota.renew([running, booked, replace(other, spend=Spend(7, windows(5, period=NEXT)))])
        await quota.announce_ended([(ended, 0)])
        held = await quota.held("ten_a")
        assert {name: json.loads(hold)["amount"] for name, hold in held.items()} == {
            "request-0": "1", "request-1": "10", "request-2": "100", "request-3": "7"
        }  # fmt: skip
        sums = {of[0].name: 300, of[1].name: 200}
        assert await quota.open(spending(9, 0, of), sums, ["request-2"], "m")
        assert (await sum_of(redis, of[0]), await sum_of(redis, of[1])) == (311, 211)

    with_quota(scenario)


def test_a_count_during_which_the_store_was_lost_is_thrown_away(with_quota):
    of = windows(100)

    async def scenario(quota, clock, redis):
        await quota.mark("ten_a", "m")
        await quota.renew([spending(1, 80, of)])
        await redis.flushall()
        assert await quota.open(spending(9, 0, of), {of[0].name: 0}, (), "m") is False
        with pytest.raises(SpendUnknown):
            await quota.reserve(spending(2, 50, of))

    with_quota(scenario)


# ── against a model ──────────────────────────────────────────────────────────────────────────────


@dataclass
class Oracle:
    """The promise in plain integers: a ledger, and for each request what it still stands for."""

    limits: dict[str, int]
    booked: dict[str, int] = field(default_factory=dict)
    held: dict[str, tuple[int, tuple[Window, ...]]] = field(default_factory=dict)
    periods: dict[str, tuple[Window, ...]] = field(default_factory=dict)

    def sum(self, name: str) -> int:
        held = sum(amount for amount, of in self.held.values() if any(window.name == name for window in of))
        done = (amount for one, amount in self.booked.items() if any(w.name == name for w in self.periods[one]))
        return held + sum(done)

    def fits(self, more: int, of: tuple[Window, ...]) -> bool:
        return all(self.sum(w.name) + more <= w.limit_picousd for w in of if w.limit_picousd is not None)


class Walk:
    """Random operations on a quota, each told to the oracle too; the windows that one took from are its answer."""

    OPERATIONS = ("reserve", "reserve", "extend", "settle", "book", "wait", "flush")

    def __init__(self, seed: int, quota: Quota, clock: Clock, redis: Redis) -> None:
        self.rng = random.Random(seed)
        self.scale = scale = 10 ** self.rng.choice([1, 9, 15])
        self.choices = [windows(900 * scale, 700 * scale, 500 * scale, period=period) for period in (MONTH, NEXT)]
        self.choices += [windows(900 * scale, None, None, period=MONTH)]
        self.oracle = Oracle({})
        self.quota, self.clock, self.redis = quota, clock, redis
        self.made: dict[str, Reservation] = {}
        self.running: set[str] = set()

    async def run(self, num_steps: int) -> None:
        await self.recount()
        every = {window.name: window for of in self.choices for window in of}.values()
        for number in range(num_steps):
            operation = self.rng.choice(self.OPERATIONS)
            took = await getattr(self, operation)(number)
            for window in every:
                assert await sum_of(self.redis, window) == self.oracle.sum(window.name), (
                    number,
                    operation,
                    window.name,
                )
            for window in took or ():
                assert window.limit_picousd is None or self.oracle.sum(window.name) <= window.limit_picousd

    async def recount(self) -> None:
        oracle, made = self.oracle, self.made
        await self.quota.mark("ten_a", "m")
        held = {one: replace(made[one], spend=Spend(*oracle.held[one])) for one in oracle.held}
        await self.quota.renew([held[one] for one in self.running])
        await self.quota.announce_ended([(one, 0) for name, one in held.items() if name not in self.running])
        for of in self.choices:
            sums = {
                w.name: sum(p for one, p in oracle.booked.items() if w.name in {v.name for v in oracle.periods[one]})
                for w in of
            }
            await self.quota.mark("ten_a", "m")
            assert await self.quota.open(spending(0, 0, of), sums, list(oracle.booked), "m")

    async def reserve(self, number: int) -> tuple[Window, ...]:
        of, price = self.rng.choice(self.choices), self.rng.randint(1, 300 * self.scale)
        one = spending(number, price, of)
        fits = self.oracle.fits(price, of)
        assert isinstance(await self.quota.reserve(one), Admitted) == fits
        if not fits:
            return ()
        self.made[one.request_id] = one
        self.running.add(one.request_id)
        self.oracle.held[one.request_id], self.oracle.periods[one.request_id] = (price, of), of
        return of

    async def extend(self, number: int) -> tuple[Window, ...]:
        if not self.running:
            return ()
        name, more = self.rng.choice(sorted(self.running)), self.rng.randint(1, 100 * self.scale)
        amount, of = self.oracle.held[name]
        fits = self.oracle.fits(more, of)
        assert await self.quota.extend(self.made[name], 1, more) == fits
        if not fits:
            return ()
        self.made[name] = self.made[name].grown(1, more)
        self.oracle.held[name] = (amount + more, of)
        return of

    async def settle(self, number: int) -> None:
        if not self.running:
            return
        name, kind = self.rng.choice(sorted(self.running)), self.rng.choice(["exact", "at_least", "void"])
        amount, of = self.oracle.held.pop(name)
        price = self.rng.randint(0, amount + 5)
        self.running.remove(name)
        if kind != "void":
            self.oracle.held[name] = max(amount, price) if kind == "at_least" else price, of
        for _ in range(self.rng.choice([1, 2])):
            await self.quota.settle(self.made[name], 1, kind, price, 0)

    async def book(self, number: int) -> None:
        ended = sorted(self.oracle.held.keys() - self.running)
        if not ended:
            return
        name = self.rng.choice(ended)
        amount, of = self.oracle.held.pop(name)
        self.oracle.booked[name] = self.rng.choice([0, amount, amount])
        for _ in range(self.rng.choice([1, 2])):
            await self.quota.book(replace(self.made[name], spend=Spend(self.oracle.booked[name], of)), 0)

    async def wait(self, number: int) -> None:
        self.clock.now_ms += self.rng.choice([1, 5_000, 70_000])

    async def flush(self, number: int) -> None:
        if self.rng.random() < 0.2:
            await self.redis.flushall()
            await self.recount()


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_random_walk_agrees_with_the_oracle_and_never_passes_a_limit(with_quota, seed):
    """Over three scopes and two periods: reserve, extend, settle in three kinds, record, flush and count anew."""
    with_quota(lambda quota, clock, redis: Walk(seed, quota, clock, redis).run(500))


def test_fifty_callers_over_two_clients_never_pass_the_limit_by_one(valkey):
    """Also across a flush in the middle: what both hold is announced before the count is opened."""
    limit = 1_000_003
    of = windows(limit)
    held: dict[str, Reservation] = {}
    ended: dict[str, Reservation] = {}  # a gateway remembers them: the store may hear of their records late
    booked: dict[str, int] = {}
    peak = []

    async def caller(number: int, quota: Quota, pause: asyncio.Event) -> None:
        rng = random.Random(number)
        for turn in range(8):
            one = spending(number * 100 + turn, rng.randint(1, 90_000), of)
            try:
                answer = await quota.reserve(one)
            except SpendUnknown:
                await pause.wait()
                continue
            if not isinstance(answer, Admitted):
                continue
            held[one.request_id] = one
            assert one.spend is not None
            peak.append(sum(r.spend.picousd for r in held.values() if r.spend) + sum(booked.values()))
            assert peak[-1] <= limit
            await asyncio.sleep(0.001)
            price = rng.randint(0, one.spend.picousd)
            held[one.request_id] = replace(one, spend=Spend(price, of))
            await quota.settle(one, 1, "exact", price, 0)
            await asyncio.sleep(0.001)
            ended[one.request_id] = held.pop(one.request_id)
            booked[one.request_id] = price
            await quota.book(ended[one.request_id], 0)

    async def main() -> None:
        async with Redis.from_url(valkey.url) as first, Redis.from_url(valkey.url) as second, AsyncExitStack() as stack:
            await first.flushall()
            quotas, pause = (
                tuple(stack.enter_context(closing(Quota(redis, 30.0))) for redis in (first, second)),
                asyncio.Event(),
            )
            await known(quotas[0], of)
            callers = [asyncio.create_task(caller(n, quotas[n % 2], pause)) for n in range(50)]
            while len(booked) < 5:
                await asyncio.sleep(0)
            await first.flushall()
            await quotas[0].mark("ten_a", "m")
            await quotas[0].renew(list(held.values()))
            await quotas[0].announce_ended([(one, 0) for one in ended.values()])
            ledger = dict(booked)
            for name in ledger:
                await quotas[0].book(ended[name], 0)
            assert await quotas[0].open(spending(0, 0, of), {of[0].name: sum(ledger.values())}, list(ledger), "m")
            pause.set()
            await asyncio.gather(*callers)
            assert await sum_of(first, of[0]) == sum(booked.values())

    asyncio.run(main())
    assert len(booked) > 20
    assert max(peak) > limit * 0.8
