"""The limit of failed authentications, on a fake clock."""

import random

import pytest

from gateway.failures import FailedAttempts, peer_of


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_so_many_failures_are_told_and_the_next_must_wait(clock: Clock):
    failures = FailedAttempts(max_failures=3, clock_s=clock)
    assert [failures.record("a") for _ in range(3)] == [None] * 3
    assert failures.record("a") == pytest.approx(20.0)


def test_a_third_of_a_minute_later_one_of_three_is_back(clock: Clock):
    failures = FailedAttempts(max_failures=3, clock_s=clock)
    for _ in range(10):
        failures.record("a")
    clock.now_s += 20
    assert failures.record("a") is None
    assert failures.record("a") == pytest.approx(20.0)


def test_who_is_refused_does_not_wait_longer_for_asking(clock: Clock):
    failures = FailedAttempts(max_failures=1, clock_s=clock)
    failures.record("a")
    waits = []
    for _ in range(6):
        clock.now_s += 9
        waits.append(failures.record("a"))
    assert waits == pytest.approx([51, 42, 33, 24, 15, 6])


def test_what_was_no_failure_is_forgiven_and_no_more_than_that(clock: Clock):
    failures = FailedAttempts(max_failures=2, clock_s=clock)
    failures.record("a")
    for _ in range(3):
        failures.forgive("a")
    assert [failures.record("a") for _ in range(3)] == [None, None, pytest.approx(30.0)]
    failures.forgive("stranger")
    assert len(failures) == 1


def test_addresses_are_counted_apart(clock: Clock):
    failures = FailedAttempts(max_failures=1, clock_s=clock)
    failures.record("a")
    assert failures.record("a") is not None
    assert failures.record("b") is None


def test_a_clock_that_goes_back_gives_nothing(clock: Clock):
    failures = FailedAttempts(max_failures=1, clock_s=clock)
    failures.record("a")
    clock.now_s -= 500
    assert failures.record("a") == pytest.approx(60.0)


def test_memory_is_bounded_and_the_oldest_failures_are_forgotten_first(clock: Clock):
    failures = FailedAttempts(max_failures=1, max_addresses=100, clock_s=clock)
    failures.record("first")
    draw = random.Random(7)
    for _ in range(1000):
        failures.record(str(draw.random()))
        assert len(failures) <= 100
    assert failures.record("first") is None


@pytest.mark.parametrize(
    ("host", "counted"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("203.0.113.9", "203.0.113.9"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff::1", "2001:db8:1:2::/64"),
        ("::ffff:203.0.113.9", "203.0.113.9"),
        ("fe80::1%eth0", "fe80::/64"),
    ],
)
def test_an_address_is_counted_as_what_one_host_owns(host: str, counted: str):
    assert peer_of({"client": (host, 5)}) == counted  # pyright: ignore[reportArgumentType]


def test_a_peer_without_an_address_is_one_peer():
    assert peer_of({"client": None}) == ""  # pyright: ignore[reportArgumentType]
