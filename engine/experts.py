"""How the load lies over the experts of a model, and which device is an expert's home. Plain numbers, no torch."""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise

WINDOW_NS = 60_000_000_000
READING_NS = 1_000_000_000  # readings of the window are at least so far apart
TOP_EXPERTS = 16
MAX_LISTED_EXPERTS = 128

Counts = Sequence[Sequence[int]]  # tokens by layer and expert


def homes(num_experts: int, num_ranks: int) -> list[range]:
    """The experts that live on each rank: consecutive ones, each on exactly one rank, as many as on any other rank or
    one more; ranks past the last expert have none. Raises ValueError without experts or ranks."""
    if num_experts < 1 or num_ranks < 1:
        raise ValueError(f"{num_experts} experts on {num_ranks} ranks: at least one of each is needed")
    borders = [num_experts * rank // num_ranks for rank in range(num_ranks + 1)]
    return [range(first, end) for first, end in pairwise(borders)]


def balancedness(counts: Counts) -> float:
    """Mean load of an expert over the load of the busiest, both added over the layers: 1 is even, 1 / E is all on one.

    That is the part of the layers' time in which the experts would all be busy, were each a device. 1 without tokens.
    """
    busiest = sum(max(layer) for layer in counts)
    return sum(sum(layer) / len(layer) for layer in counts) / busiest if busiest else 1.0


class ExpertLoad:
    """Tokens of each expert since the start, and how even the load of the last minute was.

    ``layers`` are the numbers of the layers with experts; ``read`` gives their counts as of now, which never fall.
    """

    def __init__(self, layers: Sequence[int], read: Callable[[], Counts]) -> None:
        self.layers = tuple(layers)
        self._read = read
        self._readings: deque[tuple[int, Counts]] = deque()
        self._listed: dict[tuple[int, int], None] = {}  # insertion-ordered

    def counts(self) -> Counts:
        """[layers][E] tokens since the start."""
        return self._read()

    def recent_balancedness(self, now_ns: int) -> float:
        """Of the tokens since the oldest reading in the last minute (since the start, or the last reading before
        that minute, where there is none)."""
        counts = self._read()
        while len(self._readings) > 1 and self._readings[1][0] <= now_ns - WINDOW_NS:
            self._readings.popleft()
        before = self._readings[0][1] if self._readings else [[0] * len(layer) for layer in counts]
        if not self._readings or self._readings[-1][0] <= now_ns - READING_NS:
            self._readings.append((now_ns, counts))
        return balancedness([_difference(now, then) for now, then in zip(counts, before, strict=True)])

    def top(self) -> dict[tuple[int, int], int]:
        """Tokens of the experts most used since the start, by (layer, expert).

        One that has been listed stays, so that its counter never vanishes; there are at most MAX_LISTED_EXPERTS.
        """
        counts = self._read()
        tokens = {
            (layer, expert): number
            for layer, numbers in zip(self.layers, counts, strict=True)
            for expert, number in enumerate(numbers)
            if number
        }
        for place in sorted(tokens, key=lambda place: (-tokens[place], place))[:TOP_EXPERTS]:
            if len(self._listed) < MAX_LISTED_EXPERTS:
                self._listed.setdefault(place)
        return {place: tokens[place] for place in self._listed}


def _difference(now: Sequence[int], then: Sequence[int]) -> list[int]:
    return [a - b for a, b in zip(now, then, strict=True)]
