"""What the requests of one model and class came to in a time: counts, exclusions and samples, merged by addition.

They are kept by minute, by quarter of an hour (every zone's days and hours begin with one) and by day of UTC, so that
a month is read from few rows, and any minutes from few more.
"""

from collections.abc import Mapping

import msgspec
from msgspec import Raw, Struct, field

from tenants.slo.histogram import Histogram
from tenants.slo.objectives import MINUTE_S
from tenants.slo.verdict import Verdict

ALL = "all"  # every objective kept and the request answered
QUARTER_S, DAY_S = 900, 86_400
WIDTHS_S = (DAY_S, QUARTER_S, MINUTE_S)


class ServiceSums(Struct, array_like=True):
    """``valid`` and ``good`` requests by SLI or ALL, ``excluded`` ones by reason, samples by measure."""

    valid: dict[str, int] = field(default_factory=dict)
    good: dict[str, int] = field(default_factory=dict)
    excluded: dict[str, int] = field(default_factory=dict)
    histograms: dict[str, Histogram] = field(default_factory=dict)

    def count(self, verdict: Verdict, sign: int = 1) -> None:
        """All of a verdict but its samples."""
        if verdict.excluded:
            _add(self.excluded, verdict.excluded, sign)
            return
        for sli, (_version_id, good) in verdict.results.items():
            _add(self.valid, sli, sign)
            _add(self.good, sli, sign * good)
        _add(self.valid, ALL, sign)
        _add(self.good, ALL, sign * verdict.met)

    def merge(self, other: "ServiceSums") -> None:
        merge_counts(self.valid, other.valid)
        merge_counts(self.good, other.good)
        merge_counts(self.excluded, other.excluded)
        for measure, histogram in other.histograms.items():
            self.histograms.setdefault(measure, Histogram()).merge(histogram)

    @property
    def is_empty(self) -> bool:
        """Nothing was counted, or all of it was taken back."""
        return not (any(self.valid.values()) or self.excluded or self.histograms)


class Outline(Struct, array_like=True, gc=False):  # as Histogram
    """ServiceSums whose histograms are left as they are encoded: most readers want one of them, or none."""

    valid: dict[str, int] = field(default_factory=dict)
    good: dict[str, int] = field(default_factory=dict)
    excluded: dict[str, int] = field(default_factory=dict)
    histograms: dict[str, Raw] = field(default_factory=dict)


encode_sums = msgspec.msgpack.Encoder().encode
decode_sums = msgspec.msgpack.Decoder(ServiceSums).decode
decode_outline = msgspec.msgpack.Decoder(Outline).decode
decode_histogram = msgspec.msgpack.Decoder(Histogram).decode


def merge_counts(counts: dict[str, int], others: Mapping[str, int]) -> None:
    known = counts.get  # a month merges hundreds of thousands
    for name, number in others.items():
        counts[name] = known(name, 0) + number


def _add(counts: dict[str, int], name: str, number: int) -> None:
    counts[name] = counts.get(name, 0) + number
