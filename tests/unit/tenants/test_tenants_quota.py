"""quota.lua on a real Valkey, with a clock that tests move."""

import asyncio
import random
from contextlib import closing
from dataclasses import replace
from fractions import Fraction

import pytest
from redis.asyncio import Redis
from stores import valkey_server

from tenants.errors import InvalidValue, ReservationClosed, StoreUnavailable
from tenants.quota.quota import LEASE_MS, Admitted, Headroom, Limits, Quota, Refused, Reservation

MINUTE = 60_000
START_MS = 1_800_000_000_000


class Clock:
    def __init__(self) -> None:
        self.now_ms = START_MS

    def __call__(self) -> int:
        return self.now_ms


def reservation(number: int, tokens: int, *limits: Limits, tenant_id: str = "ten_a", attempt: int = 1) -> Reservation:
    names = ("tenant", "key:k1", "extra")
    scopes = tuple(zip(names, limits, strict=False))
    return Reservation(f"request-{number}", attempt, tenant_id, "k1", tokens, scopes)


def run_with_quota(with_redis, scenario):
    async def body(redis):
        clock = Clock()
        with closing(Quota(redis, 30.0, clock_ms=clock)) as quota:
            return await scenario(quota, clock)

    return with_redis(body)


def test_of_five_requests_at_once_one_is_admitted_and_its_rest_is_given_back(with_redis):
    limits = Limits(tokens_per_minute=100)

    async def scenario(quota, clock):
        wanted = [reservation(number, 80, limits) for number in range(5)]
        answers = await asyncio.gather(*(quota.reserve(item) for item in wanted))
        admitted = [item for item, answer in zip(wanted, answers, strict=True) if isinstance(answer, Admitted)]
        refused = [answer for answer in answers if isinstance(answer, Refused)]
        assert (len(admitted), len(refused)) == (1, 4)
        for answer in refused:
            assert answer.limit == "tokens_per_minute"
            assert answer.scope == "tenant"
            assert answer.retry_after_ms == 36_000  # 60 of 100 tokens are missing
            assert answer.headroom.limit_tokens == 100
            assert answer.headroom.remaining_tokens == 20
        await quota.settle(admitted[0], 30, "exact")
        assert isinstance(await quota.reserve(reservation(9, 70, limits)), Admitted)

    run_with_quota(with_redis, scenario)


def test_a_bucket_refills_continuously_and_never_over_its_limit(with_redis):
    limits = Limits(tokens_per_minute=60)

    async def scenario(quota, clock):
        assert isinstance(await quota.reserve(reservation(1, 60, limits)), Admitted)
        clock.now_ms += 1_499
        assert isinstance(await quota.reserve(reservation(2, 2, limits)), Refused)
        answer = await quota.reserve(reservation(3, 1, limits))
        assert answer.headroom.remaining_tokens == 0
        clock.now_ms += 100 * MINUTE
        answer = await quota.reserve(reservation(4, 0, limits))
        assert answer.headroom.remaining_tokens == 60

    run_with_quota(with_redis, scenario)


def test_a_refusal_takes_nothing_from_any_other_limit(with_redis):
    tenant = Limits(requests_per_minute=10, tokens_per_minute=1000, concurrent_requests=5)
    key = Limits(requests_per_minute=10, tokens_per_minute=50)

    async def scenario(quota, clock):
        for number in range(20):
            answer = await quota.reserve(reservation(number, 51, tenant, key))
            assert isinstance(answer, Refused)
            assert (answer.limit, answer.scope) == ("tokens_per_minute", "key:k1")
        answer = await quota.reserve(reservation(99, 50, tenant, key))
        assert answer == Admitted(
            Headroom(
                limit_requests=10,
                remaining_requests=9,
                reset_requests_ms=6_000,
                limit_tokens=50,
                remaining_tokens=0,
                reset_tokens_ms=MINUTE,
            ),
        )

    run_with_quota(with_redis, scenario)


def test_a_request_larger_than_the_limit_itself_is_told_not_to_wait(with_redis):
    async def scenario(quota, clock):
        answer = await quota.reserve(reservation(1, 101, Limits(tokens_per_minute=100)))
        assert isinstance(answer, Refused)
        assert answer.retry_after_ms is None
        for limits in (Limits(requests_per_minute=0), Limits(concurrent_requests=0)):
            answer = await quota.reserve(reservation(1, 1, limits))
            assert isinstance(answer, Refused)
            assert answer.retry_after_ms is None

    run_with_quota(with_redis, scenario)


def test_waiting_as_long_as_told_is_enough_and_a_millisecond_less_is_not(with_redis):
    limits = Limits(requests_per_minute=7, tokens_per_minute=997)

    async def scenario(quota, clock):
        for number in range(30):
            wanted = reservation(number, 331, limits)
            answer = await quota.reserve(wanted)
            if isinstance(answer, Refused):
                clock.now_ms += answer.retry_after_ms - 1
                assert isinstance(await quota.reserve(wanted), Refused)
                clock.now_ms += 1
                assert isinstance(await quota.reserve(wanted), Admitted)

    run_with_quota(with_redis, scenario)


def test_the_longest_wait_is_the_one_reported(with_redis):
    limits = Limits(requests_per_minute=1, tokens_per_minute=100)

    async def scenario(quota, clock):
        await quota.reserve(reservation(1, 100, limits))
        answer = await quota.reserve(reservation(2, 1, limits))
        assert (answer.limit, answer.retry_after_ms) == ("requests_per_minute", MINUTE)

    run_with_quota(with_redis, scenario)


def test_an_overrun_is_debited_below_zero_and_has_to_refill(with_redis):
    limits = Limits(tokens_per_minute=100)

    async def scenario(quota, clock):
        first = reservation(1, 100, limits)
        await quota.reserve(first)
        await quota.settle(first, 250, "exact")
        clock.now_ms += 90_000  # 150 of the 150 tokens owed
        assert isinstance(await quota.reserve(reservation(2, 1, limits)), Refused)
        clock.now_ms += 600
        assert isinstance(await quota.reserve(reservation(3, 1, limits)), Admitted)

    run_with_quota(with_redis, scenario)


@pytest.mark.parametrize(
    ("kind", "used", "remaining_tokens", "remaining_requests"),
    [
        ("exact", 30, 70, 9),
        ("exact", 100, 0, 9),
        ("at_least", 30, 20, 9),
        ("at_least", 90, 10, 9),
        ("void", 0, 100, 10),
        ("void", 55, 100, 10),
    ],
)
def test_each_kind_of_settlement_gives_back_what_it_says(with_redis, kind, used, remaining_tokens, remaining_requests):
    limits = Limits(requests_per_minute=10, tokens_per_minute=100)

    async def scenario(quota, clock):
        first = reservation(1, 80, limits)
        await quota.reserve(first)
        await quota.settle(first, used, kind)
        answer = await quota.reserve(reservation(2, 0, limits))
        assert answer.headroom.remaining_tokens == remaining_tokens
        assert answer.headroom.remaining_requests == remaining_requests - 1

    run_with_quota(with_redis, scenario)


def test_settling_twice_changes_nothing(with_redis):
    limits = Limits(tokens_per_minute=100, concurrent_requests=1)

    async def scenario(quota, clock):
        first = reservation(1, 80, limits)
        await quota.reserve(first)
        for used in (30, 0, 99):
            await quota.settle(first, used, "exact")
        await quota.settle(first, 0, "void")
        answer = await quota.reserve(reservation(2, 0, limits))
        assert answer.headroom.remaining_tokens == 70

    run_with_quota(with_redis, scenario)


def test_reserving_twice_takes_once_but_another_attempt_takes_again(with_redis):
    limits = Limits(requests_per_minute=10, tokens_per_minute=100, concurrent_requests=2)

    async def scenario(quota, clock):
        first = reservation(1, 30, limits)
        assert await quota.reserve(first) == await quota.reserve(first)
        answer = await quota.reserve(replace(first, attempt=2))
        assert answer.headroom.remaining_tokens == 40
        assert answer.headroom.remaining_requests == 8
        assert isinstance(await quota.reserve(reservation(2, 1, limits)), Refused)

    run_with_quota(with_redis, scenario)


def test_a_reserve_that_comes_after_its_own_settlement_takes_nothing(with_redis):
    limits = Limits(tokens_per_minute=100, concurrent_requests=1)

    async def scenario(quota, clock):
        late = reservation(1, 80, limits)
        await quota.settle(late, 0, "void")
        with pytest.raises(ReservationClosed):
            await quota.reserve(late)
        assert await quota.extend(late, 10) is False
        answer = await quota.reserve(reservation(2, 100, limits))
        assert isinstance(answer, Admitted)

    run_with_quota(with_redis, scenario)


def test_an_extension_is_granted_or_refused_and_settled_with_the_rest(with_redis):
    limits, key = Limits(tokens_per_minute=100), Limits(tokens_per_minute=60)

    async def scenario(quota, clock):
        first = reservation(1, 40, limits, key)
        await quota.reserve(first)
        assert await quota.extend(first, 20) is True
        assert await quota.extend(first, 1) is False
        await quota.settle(first, 45, "exact")
        answer = await quota.reserve(reservation(2, 0, limits, key))
        assert answer.headroom.remaining_tokens == 15
        assert (await quota.reserve(reservation(3, 0, limits))).headroom.remaining_tokens == 55

    run_with_quota(with_redis, scenario)


def test_a_lease_that_is_not_renewed_frees_its_place_and_a_renewed_one_keeps_it(with_redis):
    limits = Limits(concurrent_requests=2)

    async def scenario(quota, clock):
        kept, dropped = reservation(1, 1, limits), reservation(2, 1, limits)
        await quota.reserve(kept)
        await quota.reserve(dropped)
        clock.now_ms += LEASE_MS - 1
        await quota.renew([kept])
        answer = await quota.reserve(reservation(3, 1, limits))
        assert (answer.limit, answer.retry_after_ms) == ("concurrent_requests", 1000)
        clock.now_ms += 1
        assert isinstance(await quota.reserve(reservation(3, 1, limits)), Admitted)
        assert isinstance(await quota.reserve(reservation(4, 1, limits)), Refused)

    run_with_quota(with_redis, scenario)


def test_a_settled_request_is_not_renewed(with_redis):
    limits = Limits(concurrent_requests=1)

    async def scenario(quota, clock):
        first = reservation(1, 1, limits)
        await quota.reserve(first)
        await quota.settle(first, 1, "exact")
        await quota.renew([first])
        assert isinstance(await quota.reserve(reservation(2, 1, limits)), Admitted)

    run_with_quota(with_redis, scenario)


def test_a_running_request_is_counted_again_after_the_store_lost_everything(with_redis):
    limits = Limits(concurrent_requests=1)

    async def body(redis):
        with closing(Quota(redis, 30.0)) as quota:
            first = reservation(1, 1, limits)
            await quota.reserve(first)
            await redis.flushall()
            await quota.renew([first])
            assert isinstance(await quota.reserve(reservation(2, 1, limits)), Refused)
            await quota.settle(first, 1, "exact")
            assert isinstance(await quota.reserve(reservation(2, 1, limits)), Admitted)

    with_redis(body)


def test_a_clock_that_goes_back_an_hour_gives_nothing_and_stops_nothing(with_redis):
    limits = Limits(tokens_per_minute=60)

    async def scenario(quota, clock):
        await quota.reserve(reservation(1, 60, limits))
        clock.now_ms -= 60 * MINUTE
        assert isinstance(await quota.reserve(reservation(2, 1, limits)), Refused)
        await quota.settle(reservation(1, 60, limits), 60, "exact")  # writes the bucket at the new time
        clock.now_ms += 1_000
        assert isinstance(await quota.reserve(reservation(3, 1, limits)), Admitted)

    run_with_quota(with_redis, scenario)


def test_tenants_and_keys_do_not_share_buckets(with_redis):
    limits = Limits(tokens_per_minute=100)

    async def scenario(quota, clock):
        await quota.reserve(reservation(1, 100, limits))
        assert isinstance(await quota.reserve(reservation(2, 100, limits, tenant_id="ten_b")), Admitted)
        other_key = Reservation("request-3", 1, "ten_a", "k2", 100, (("key:k2", limits),))
        assert isinstance(await quota.reserve(other_key), Admitted)

    run_with_quota(with_redis, scenario)


def test_every_key_has_the_layout_version_and_hash_tag_and_vanishes_when_idle(with_redis):
    limits = Limits(requests_per_minute=6, tokens_per_minute=600, concurrent_requests=3)

    async def body(redis):
        with closing(Quota(redis, 30.0)) as quota:
            first, second = reservation(1, 600, limits, limits), reservation(2, 0, limits)
            await quota.reserve(first)
            await quota.reserve(second)
            await quota.settle(second, 5_000, "exact")
            lifetimes = {key.decode(): await redis.pttl(key) for key in await redis.keys("*")}
            assert len(lifetimes) == 6  # two reservations, two buckets, two sets of leases
            assert all(key.startswith("tn:q2:{ten_a}:") for key in lifetimes)
            assert all(lifetime > 0 for lifetime in lifetimes.values())
            # 5 000 tokens below zero at 600 a minute take 500 s to be full again: not forgotten before twice that
            assert lifetimes["tn:q2:{ten_a}:b:tenant"] > 900_000

    with_redis(body)


def test_without_limits_the_store_is_not_asked(tmp_path):
    async def main():
        async with Redis(unix_socket_path=str(tmp_path / "nobody")) as redis:
            with closing(Quota(redis, 0.1)) as quota:
                free = reservation(1, 10**9, Limits(), Limits())
                assert await quota.reserve(free) == Admitted(Headroom())
                assert await quota.extend(free, 1) is True
                await quota.renew([free])
                await quota.settle(free, 1, "exact")
                with pytest.raises(StoreUnavailable):
                    await quota.reserve(reservation(1, 1, Limits(tokens_per_minute=1)))

    asyncio.run(main())


def test_a_store_that_does_not_answer_in_time_is_unavailable():
    import signal

    async def main():
        with valkey_server() as server:
            async with Redis.from_url(server.url) as redis:
                with closing(Quota(redis, 0.25)) as quota:
                    limited = reservation(1, 1, Limits(tokens_per_minute=100))
                    await redis.ping()
                    server.process.send_signal(signal.SIGSTOP)
                    for attempt in (quota.reserve(limited), quota.renew([limited]), quota.settle(limited, 1, "exact")):
                        with pytest.raises(StoreUnavailable):
                            await attempt
                    server.process.send_signal(signal.SIGCONT)
                    with closing(Quota(redis, 30.0)) as patient:
                        assert isinstance(
                            await patient.reserve(reservation(2, 1, Limits(tokens_per_minute=100))), Admitted
                        )

    asyncio.run(main())


def test_replies_are_read_alike_whether_or_not_the_client_decodes(valkey):
    async def main():
        for decode in (True, False):
            async with Redis.from_url(valkey.url, decode_responses=decode) as redis:
                await redis.flushall()
                with closing(Quota(redis, 30.0)) as quota:
                    answer = await quota.reserve(reservation(1, 1, Limits(tokens_per_minute=100)))
                assert answer.headroom.remaining_tokens == 99

    asyncio.run(main())


@pytest.mark.parametrize("value", [-1, True, 1.5, "5", 10**11 + 1])
def test_a_limit_is_null_or_a_bounded_whole_number(value):
    with pytest.raises(InvalidValue):
        Limits(tokens_per_minute=value)


# ── against a model ──────────────────────────────────────────────────────────────────────────────


class Model:
    """The promise in exact fractions: what each scope has left, who holds a lease, what each request reserved."""

    def __init__(self, limits: dict[str, Limits]) -> None:
        self.limits = limits
        self.left = {
            (scope, meter): Fraction(getattr(limit, meter))
            for scope, limit in limits.items()
            for meter in ("requests_per_minute", "tokens_per_minute")
            if getattr(limit, meter) is not None
        }
        self.leases: dict[str, int] = {}  # request → expiry; every scope has the same holders
        self.open: dict[str, int] = {}

    def advance(self, elapsed_ms: int) -> None:
        for (scope, meter), left in self.left.items():
            limit = getattr(self.limits[scope], meter)
            self.left[scope, meter] = min(Fraction(limit), left + Fraction(elapsed_ms * limit, MINUTE))

    def fits(self, requests: int, tokens: int) -> bool:
        return all(left >= (requests if meter.startswith("req") else tokens) for (_, meter), left in self.left.items())

    def take(self, requests: int, tokens: int) -> None:
        for (scope, meter), left in self.left.items():
            limit = getattr(self.limits[scope], meter)
            count = requests if meter.startswith("req") else tokens
            self.left[scope, meter] = min(Fraction(limit), left - count)

    def running(self, now_ms: int) -> int:
        return sum(expiry > now_ms for expiry in self.leases.values())

    def places(self) -> int:
        return min(limit.concurrent_requests for limit in self.limits.values() if limit.concurrent_requests is not None)


async def check_walk(redis, clock, model: Model, took_something: bool) -> None:
    for (scope, meter), left in model.left.items():
        saved = await redis.hmget(f"tn:q2:{{ten_a}}:b:{scope}", "at", meter.split("_")[0])
        limit = getattr(model.limits[scope], meter)
        units = limit * MINUTE if saved[1] is None else int(saved[1]) + (clock() - int(saved[0])) * limit
        assert min(units, limit * MINUTE) == left * MINUTE  # exactly, after any number of refills
        assert left <= limit
        assert left >= 0 or not took_something  # what was admitted fitted: used + reserved ≤ limit
    assert model.running(clock()) <= model.places()


def test_a_random_walk_of_2000_operations_agrees_with_the_model(with_redis):
    limits = {
        "tenant": Limits(requests_per_minute=37, tokens_per_minute=1013, concurrent_requests=6),
        "key:k1": Limits(requests_per_minute=29, tokens_per_minute=777, concurrent_requests=None),
    }
    rng = random.Random(20260401)
    model = Model(limits)

    async def body(redis):
        clock = Clock()
        with closing(Quota(redis, 30.0, clock_ms=clock)) as quota:
            made: dict[str, Reservation] = {}
            for number in range(2_000):
                operation = rng.choice(["reserve", "reserve", "extend", "settle", "renew", "wait"])
                name = rng.choice(sorted(model.open)) if model.open else None
                fits = False
                if operation == "wait" or (name is None and operation != "reserve"):
                    elapsed = rng.choice([1, 17, 400, 2_000, 9_999, 31_000])
                    clock.now_ms += elapsed
                    model.advance(elapsed)
                elif operation == "reserve":
                    wanted = reservation(number, rng.choice([0, 1, 40, 200, 700, 800]), *limits.values())
                    fits = model.fits(1, wanted.tokens) and model.running(clock()) < model.places()
                    assert isinstance(await quota.reserve(wanted), Admitted) == fits
                    if fits:
                        key = f"{wanted.request_id}:1"
                        made[key] = wanted
                        model.take(1, wanted.tokens)
                        model.open[key], model.leases[key] = wanted.tokens, clock() + LEASE_MS
                elif operation == "extend":
                    more = rng.choice([1, 64, 256])
                    fits = model.fits(0, more)
                    assert await quota.extend(made[name], more) == fits
                    if fits:
                        model.take(0, more)
                        model.open[name] += more
                elif operation == "renew":
                    if model.leases[name] > clock():
                        await quota.renew([made[name]])
                        model.leases[name] = clock() + LEASE_MS
                else:
                    kind = rng.choice(["exact", "at_least", "void"])
                    used = rng.choice([0, 1, model.open[name], model.open[name] + 300])
                    reserved = model.open.pop(name)
                    del model.leases[name]
                    charged = {"exact": used, "at_least": max(used, reserved), "void": 0}[kind]
                    model.take(-1 if kind == "void" else 0, charged - reserved)
                    for _ in range(rng.choice([1, 1, 2])):
                        await quota.settle(made[name], used, kind)
                await check_walk(redis, clock, model, took_something=fits and operation in ("reserve", "extend"))

    with_redis(body)


def test_used_plus_reserved_never_exceeds_the_limit_with_32_concurrent_callers(valkey):
    """The real clock, 32 connections: what is out can't exceed a full bucket plus what has refilled since."""
    limits = Limits(requests_per_minute=10_000, tokens_per_minute=1_000, concurrent_requests=9)
    out = {"tokens": 0, "running": 0, "most_running": 0, "settled": 0, "admitted": 0}

    async def caller(number: int, server_ms) -> None:
        rng = random.Random(number)
        async with Redis.from_url(valkey.url) as redis:
            with closing(Quota(redis, 30.0)) as quota:
                for turn in range(12):
                    wanted = reservation(number * 1_000 + turn, rng.choice([10, 50, 120]), limits)
                    if not isinstance(await quota.reserve(wanted), Admitted):
                        continue
                    out["admitted"] += 1
                    out["tokens"] += wanted.tokens
                    out["running"] += 1
                    out["most_running"] = max(out["most_running"], out["running"])
                    elapsed_ms = await server_ms()
                    assert out["tokens"] <= 1_000 + elapsed_ms * 1_000 / MINUTE + 1
                    await asyncio.sleep(0)
                    used = rng.randint(0, wanted.tokens)
                    out["running"] -= 1  # before: another may have it before we hear that ours was given back
                    out["tokens"] -= wanted.tokens - used
                    await quota.settle(wanted, used, "exact")
                    out["settled"] += 1

    async def main() -> None:
        async with Redis.from_url(valkey.url) as redis:
            await redis.flushall()
            began = await redis.time()

            async def server_ms() -> float:
                seconds, micros = await redis.time()
                return (seconds - began[0]) * 1_000 + (micros - began[1]) / 1_000

            await asyncio.gather(*(caller(number, server_ms) for number in range(32)))
            assert await redis.zcard("tn:q2:{ten_a}:l:tenant") == 0

    asyncio.run(main())
    assert out["admitted"] == out["settled"] > 9
    assert out["most_running"] <= 9
    assert out["running"] == 0
