"""Base-2 exponential histograms of scale 5, as OpenTelemetry defines them: 32 buckets an octave, merged by addition.

Bucket i holds (2^(i/32), 2^((i+1)/32)]; a quantile is at most 1.09 % off. All is in integers, so that the order in
which processes add and merge changes nothing.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from math import isqrt

from msgspec import Struct, field

SCALE = 5
FEW = 100  # samples below which a 99th percentile says nothing
_PER_OCTAVE = 1 << SCALE
_BITS = 64  # of the fraction in which bounds are compared
_ZERO = -2  # the bucket of 0; the smallest other value, 1, is in bucket -1


def _bounds() -> tuple[int, ...]:
    """⌊2^(k/32) · 2^64⌋ for k = 0..31, by square roots of integers: the same on every machine."""
    precision = 4 * _BITS
    root = 1 << precision + 1  # 2, then 2^(1/2), 2^(1/4), … 2^(1/32)
    for _ in range(SCALE):
        root = isqrt(root << precision)
    bounds = [1 << precision]
    for _ in range(_PER_OCTAVE - 1):
        bounds.append(bounds[-1] * root >> precision)
    return tuple(bound >> precision - _BITS for bound in bounds)


_BOUNDS = _bounds()


def bucket_of(value: int) -> int:
    """The bucket of a value of 0 or more, below 2^64."""
    if value <= 0:
        return _ZERO
    octave = value.bit_length() - 1
    return octave * _PER_OCTAVE + bisect_left(_BOUNDS, value << _BITS - octave) - 1


class Histogram(Struct, array_like=True, gc=False):  # in no cycle, and a report reads tens of thousands
    """Sparse. ``total`` is the exact sum of the samples, ``least`` and ``most`` are exact too (0 without any)."""

    counts: dict[int, int] = field(default_factory=dict)
    total: int = 0
    least: int = 0
    most: int = 0

    @property
    def count(self) -> int:
        return sum(self.counts.values())

    @property
    def mean(self) -> int | None:
        """Rounded down; None without samples."""
        count = self.count
        return self.total // count if count else None

    def merge(self, other: "Histogram") -> None:
        if not other.counts:
            return
        if not self.counts or other.least < self.least:
            self.least = other.least
        self.most = max(self.most, other.most)
        counts, known = self.counts, self.counts.get  # a month merges millions of buckets
        for bucket, count in other.counts.items():
            counts[bucket] = known(bucket, 0) + count
        self.total += other.total

    def quantile(self, percent: int) -> int | None:
        """The nearest rank's value: of one sample that sample; None without any, and for P99 of fewer than FEW."""
        count = self.count
        if not count or (percent >= 99 and count < FEW):
            return None
        rank = max(1, -(-count * percent // 100))
        for bucket in sorted(self.counts):
            rank -= self.counts[bucket]
            if rank <= 0:
                return min(max(_middle(bucket), self.least), self.most)
        raise AssertionError("a rank beyond the last bucket")


def histogram_of(values: Sequence[int]) -> Histogram:
    """Of one value or more."""
    counts: dict[int, int] = {}
    for bucket in map(bucket_of, values):
        counts[bucket] = counts.get(bucket, 0) + 1
    return Histogram(counts, sum(values), min(values), max(values))


def merged(parts: Iterable[Histogram]) -> Histogram:
    whole = Histogram()
    for part in parts:
        whole.merge(part)
    return whole


def _middle(bucket: int) -> int:
    """The value whose relative distance to both ends of the bucket is the same."""
    if bucket == _ZERO:
        return 0
    low, high = 2 ** (bucket / _PER_OCTAVE), 2 ** ((bucket + 1) / _PER_OCTAVE)
    return round(2 * low * high / (low + high))
