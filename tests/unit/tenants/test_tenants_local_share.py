"""A process's share of the limits, with a clock that tests move."""

import random

import pytest

from tenants.errors import StoreUnavailable
from tenants.quota.local_share import LocalShare
from tenants.quota.quota import Admitted, Limits, Refused, Reservation

MINUTE = 60_000


class Clock:
    now_ms = 1_000_000

    def __call__(self) -> int:
        return self.now_ms


def reservation(number: int, tokens: int, tenant: Limits, key: Limits | None = None) -> Reservation:
    scopes = (("tenant", tenant), ("key:k", key or Limits()))
    return Reservation(f"r{number}", 0, "ten_a", "k", tokens, scopes)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_all_processes_together_admit_what_the_limit_says(clock):
    shares = [LocalShare(3, clock) for _ in range(3)]
    limits = Limits(requests_per_minute=30)
    admitted = sum(
        isinstance(share.reserve(reservation(number, 1, limits)), Admitted) for share in shares for number in range(20)
    )

    assert admitted == 30


def test_a_share_refills_with_time_and_says_how_long_that_takes(clock):
    share, limits = LocalShare(2, clock), Limits(tokens_per_minute=120)
    assert share.reserve(reservation(1, 60, limits)) == Admitted(
        share.reserve(reservation(1, 60, limits)).headroom  # asked twice, taken once
    )
    refused = share.reserve(reservation(2, 10, limits))
    assert isinstance(refused, Refused)
    assert (refused.limit, refused.scope, refused.retry_after_ms) == ("tokens_per_minute", "tenant", 10_000)
    assert (refused.headroom.limit_tokens, refused.headroom.remaining_tokens) == (60, 0)
    clock.now_ms += 9_999
    assert isinstance(share.reserve(reservation(3, 10, limits)), Refused)
    clock.now_ms += 1
    assert isinstance(share.reserve(reservation(4, 10, limits)), Admitted)


def test_a_refusal_takes_nothing_from_any_scope(clock):
    share, tenant, key = LocalShare(1, clock), Limits(tokens_per_minute=100), Limits(requests_per_minute=1)
    assert isinstance(share.reserve(reservation(1, 10, tenant, key)), Admitted)
    refused = share.reserve(reservation(2, 10, tenant, key))
    assert isinstance(refused, Refused)
    assert refused.scope == "key:k"
    assert refused.headroom.remaining_tokens == 90


def test_what_was_not_used_is_given_back_and_an_overrun_is_debited(clock):
    share, limits = LocalShare(1, clock), Limits(tokens_per_minute=100, requests_per_minute=10)
    for number, (used, kind, left) in enumerate([(30, "exact", 70), (0, "void", 70), (5, "at_least", 20)]):
        held = reservation(number, 50, limits)
        share.reserve(held)
        share.settle(held, used, kind)
        share.settle(held, used, kind)
        looked = share.reserve(reservation(100 + number, 0, limits))
        assert looked.headroom.remaining_tokens == left
    held = reservation(9, 10, limits)
    share.reserve(held)
    share.settle(held, 40, "exact")
    clock.now_ms += 6_000  # ten more tokens
    assert isinstance(share.reserve(reservation(10, 1, limits)), Refused)


def test_concurrency_is_what_runs_here(clock):
    share, limits = LocalShare(2, clock), Limits(concurrent_requests=5)
    held = [reservation(number, 1, limits) for number in range(3)]

    assert [isinstance(share.reserve(each), Admitted) for each in held] == [True, True, False]
    share.settle(held[0], 1, "exact")
    assert isinstance(share.reserve(held[2]), Admitted)


def test_a_grant_is_extended_while_the_share_lasts(clock):
    share, limits = LocalShare(1, clock), Limits(tokens_per_minute=100)
    held = reservation(1, 10, limits)
    share.reserve(held)

    assert share.holds(held)
    assert share.extend(held, 80)
    assert not share.extend(held, 11)
    assert share.extend(reservation(2, 0, limits), 10)  # the store's own
    share.settle(held, 20, "exact")
    assert share.reserve(reservation(3, 0, limits)).headroom.remaining_tokens == 70


def test_a_request_too_large_for_the_share_alone_waits_for_the_store(clock):
    share = LocalShare(4, clock)
    with pytest.raises(StoreUnavailable):
        share.reserve(reservation(1, 26, Limits(tokens_per_minute=100)))


@pytest.mark.parametrize(
    "limits", [Limits(tokens_per_minute=100), Limits(requests_per_minute=0), Limits(concurrent_requests=0)]
)
def test_a_request_larger_than_the_limit_itself_is_told_not_to_wait(clock, limits: Limits):
    answer = LocalShare(4, clock).reserve(reservation(1, 101, limits))

    assert isinstance(answer, Refused)
    assert answer.retry_after_ms is None


def test_a_limit_that_was_changed_counts_from_then_on(clock):
    share = LocalShare(1, clock)
    share.reserve(reservation(1, 100, Limits(tokens_per_minute=100)))

    assert isinstance(share.reserve(reservation(2, 1, Limits())), Admitted)
    assert isinstance(share.reserve(reservation(3, 10, Limits(tokens_per_minute=10))), Refused)
    assert isinstance(share.reserve(reservation(4, 1, Limits(tokens_per_minute=10, requests_per_minute=1))), Refused)


@pytest.mark.parametrize("seed", range(20))
def test_no_walk_admits_more_than_the_share_of_its_time_and_its_overruns(clock, seed: int):
    """Against an account kept apart: what was taken, less what was given back, never passes a full bucket and its
    refill by more than what settlements debited over their reservations."""
    draw = random.Random(seed)
    sharers = draw.randint(1, 4)
    limits = Limits(draw.randint(4, 40), draw.randint(200, 2000), draw.randint(1, 8))
    share, start_ms = LocalShare(sharers, clock), clock.now_ms
    part = Limits(*(max(1, getattr(limits, name) // sharers) for name in Limits.__dataclass_fields__))
    held: dict[int, tuple[Reservation, int]] = {}
    taken = overrun = requests = 0
    for number in range(400):
        clock.now_ms += draw.choice((0, 5, 50, 500))
        action = draw.random()
        if action < 0.5:
            wanted = reservation(number, draw.randint(1, part.tokens_per_minute or 1), limits)
            if isinstance(share.reserve(wanted), Admitted):
                held[number] = wanted, wanted.tokens
                taken, requests = taken + wanted.tokens, requests + 1
        elif held and action < 0.6:
            chosen = draw.choice(list(held))
            if share.extend(held[chosen][0], 64):
                held[chosen] = held[chosen][0], held[chosen][1] + 64
                taken += 64
        elif held:
            wanted, tokens = held.pop(draw.choice(list(held)))
            used, kind = draw.randint(0, tokens + 20), draw.choice(("exact", "at_least", "void"))
            share.settle(wanted, used, kind)
            charged = {"exact": used, "at_least": max(used, tokens), "void": 0}[kind]
            taken += charged - tokens
            overrun += max(0, charged - tokens)
            requests -= kind == "void"
        minutes = 1 + (clock.now_ms - start_ms) / MINUTE
        assert taken <= (part.tokens_per_minute or 0) * minutes + overrun
        assert requests <= (part.requests_per_minute or 0) * minutes
        assert len(held) <= (part.concurrent_requests or 0)
    for wanted, _ in held.values():
        share.settle(wanted, 0, "void")
    clock.now_ms += 60 * MINUTE
    full = share.reserve(reservation(9999, 0, limits)).headroom
    assert (full.remaining_tokens, full.remaining_requests) == (
        part.tokens_per_minute,
        (part.requests_per_minute or 0) - 1,
    )
