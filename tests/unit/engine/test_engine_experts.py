"""engine/experts: homes of experts (case 22), how even a load is, and which experts are told of."""

import random

import pytest

from engine.experts import (
    MAX_LISTED_EXPERTS,
    READING_NS,
    TOP_EXPERTS,
    WINDOW_NS,
    ExpertLoad,
    balancedness,
    homes,
)

SECOND = 1_000_000_000


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7, 8, 64, 600])
@pytest.mark.parametrize("num_experts", [1, 7, 60, 64, 257, 512])
def test_every_expert_has_one_home_and_homes_differ_by_one_at_most(num_experts: int, num_ranks: int):
    """Case 22."""
    found = homes(num_experts, num_ranks)

    assert [expert for home in found for expert in home] == list(range(num_experts))
    sizes = [len(home) for home in found]
    assert len(sizes) == num_ranks
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(("num_experts", "num_ranks"), [(0, 1), (8, 0), (-1, 2), (8, -3)])
def test_homes_of_nothing_are_refused_with_the_numbers(num_experts: int, num_ranks: int):
    with pytest.raises(ValueError, match=f"{num_experts} experts on {num_ranks} ranks"):
        homes(num_experts, num_ranks)


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([[5, 5, 5, 5]], 1.0),
        ([[20, 0, 0, 0]], 0.25),
        ([[0, 0], [0, 0]], 1.0),
        ([[4, 0], [2, 2]], 4 / 6),  # mean 2 + 2 over highest 4 + 2
        ([[7]], 1.0),
    ],
)
def test_balancedness_is_mean_over_highest_load(counts: list[list[int]], expected: float):
    assert balancedness(counts) == pytest.approx(expected)


class Traffic:
    """Counts that a test adds to."""

    def __init__(self, *layers: list[int]) -> None:
        self.counts = [list(layer) for layer in layers]

    def __call__(self) -> list[list[int]]:
        return [list(layer) for layer in self.counts]


def test_recent_balancedness_forgets_what_is_older_than_the_window():
    traffic = Traffic([100, 0])
    load = ExpertLoad([3], traffic)

    assert load.recent_balancedness(0) == 0.5  # all since the start: everything on one
    traffic.counts = [[150, 50]]
    assert load.recent_balancedness(WINDOW_NS // 2) == 1.0  # 50 and 50 since the first reading
    traffic.counts = [[150, 150]]
    assert load.recent_balancedness(WINDOW_NS) == pytest.approx(100 / 150)  # 50 and 150
    traffic.counts = [[350, 150]]
    late = WINDOW_NS + WINDOW_NS // 2
    assert load.recent_balancedness(late) == pytest.approx(150 / 200)  # 200 and 100 since the second reading


def test_frequent_readings_keep_the_window_and_little_memory():
    traffic = Traffic([0, 0])
    load = ExpertLoad([0], traffic)
    for tenth in range(3000):
        traffic.counts[0][0 if tenth < 1500 else 1] += 1
        even = load.recent_balancedness(tenth * SECOND // 10)

    assert even == 0.5  # the last minute, all on the second expert
    assert len(load._readings) <= WINDOW_NS // READING_NS + 2


def test_the_most_used_experts_are_told_with_their_layers():
    load = ExpertLoad([4, 9], Traffic([0, 7, 1], [9, 0, 7]))

    assert load.top() == {(9, 0): 9, (4, 1): 7, (9, 2): 7, (4, 2): 1}


def test_who_was_told_of_once_is_told_of_for_good_and_the_sum_never_falls():
    rng = random.Random(4)
    traffic = Traffic(*([0] * 64 for _ in range(8)))
    load = ExpertLoad(range(8), traffic)
    before: dict[tuple[int, int], int] = {}
    for _ in range(60):
        for _ in range(40):
            traffic.counts[rng.randrange(8)][rng.randrange(64)] += rng.choice((1, 1, 1, 500))
        top = load.top()
        assert before.keys() <= top.keys()
        assert all(top[place] >= number for place, number in before.items())
        assert all(number == traffic.counts[layer][expert] for (layer, expert), number in top.items())
        before = top

    assert TOP_EXPERTS < len(before) <= MAX_LISTED_EXPERTS
