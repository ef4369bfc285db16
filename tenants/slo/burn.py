"""Burn rates: how fast an error budget goes, over a long and a short window at once (Google's SRE workbook, ch. 5)."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate

from tenants.slo.objectives import MINUTE_S, PPM


@dataclass(frozen=True, slots=True)
class Alert:
    """It fires while both windows burn faster than ``factor``: 1 spends the budget just by the end of its window."""

    name: str
    factor_tenths: int
    long_s: int
    short_s: int


ALERTS = (
    Alert("page_fast", 144, 3600, 300),
    Alert("page_slow", 60, 6 * 3600, 1800),
    Alert("ticket_fast", 30, 86_400, 7200),
    Alert("ticket_slow", 10, 3 * 86_400, 6 * 3600),
)
WINDOWS_S = tuple(sorted({window for alert in ALERTS for window in (alert.long_s, alert.short_s)}))
LOOK_BACK_S = max(WINDOWS_S)
LONGEST_SHORT_S = max(alert.short_s for alert in ALERTS)


@dataclass(frozen=True, slots=True)
class Counts:
    """Requests of a time: ``good`` of the ``valid``."""

    valid: int = 0
    good: int = 0

    @property
    def bad(self) -> int:
        return self.valid - self.good

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(self.valid + other.valid, self.good + other.good)


@dataclass(frozen=True, slots=True)
class Incident:
    """An alert that fired in [from_s, to_s), whole minutes; ``to_s`` None: it still does. ``bad`` are the requests
    that failed from the long window before it on."""

    alert: str
    from_s: int
    to_s: int | None
    bad: int


class Series:
    """Counts by minute (Unix seconds of its start), of one objective."""

    def __init__(self, minutes: Iterable[tuple[int, Counts]]) -> None:
        ordered = sorted(minutes, key=lambda minute: minute[0])
        self._starts = [start for start, _ in ordered]
        self._valid = [0, *accumulate(counts.valid for _, counts in ordered)]
        self._good = [0, *accumulate(counts.good for _, counts in ordered)]
        self._bad = [start for start, counts in ordered if counts.bad]

    def between(self, start_s: int, end_s: int) -> Counts:
        """Of the minutes that begin in [start_s, end_s)."""
        first, last = bisect_left(self._starts, start_s), bisect_left(self._starts, end_s)
        return Counts(self._valid[last] - self._valid[first], self._good[last] - self._good[first])

    def had_bad(self, start_s: int, end_s: int) -> bool:
        return bisect_left(self._bad, start_s) < bisect_left(self._bad, end_s)


def firing(series: Series, alert: Alert, at_s: int, target_ppm: int) -> bool:
    """Both windows that end at ``at_s``: bad / valid > factor × (1 − target), without a division."""
    if not series.had_bad(at_s - alert.short_s, at_s):
        return False
    windows = (series.between(at_s - window_s, at_s) for window_s in (alert.short_s, alert.long_s))
    allowed = alert.factor_tenths * (PPM - target_ppm)
    return all(counts.bad * 10 * PPM > allowed * counts.valid for counts in windows)


def rate(counts: Counts, target_ppm: int) -> float | None:
    """How many times faster than allowed the budget went; None without requests, or without a budget."""
    if not counts.valid or target_ppm >= PPM:
        return None
    return counts.bad * PPM / (counts.valid * (PPM - target_ppm))


def incidents(series: Series, target_ppm: int, start_s: int, end_s: int) -> list[Incident]:
    """What fires in [start_s, end_s), looked at each whole minute; in the order of its beginning."""
    found = [each for alert in ALERTS for each in _of_alert(series, alert, target_ppm, start_s, end_s)]
    return sorted(found, key=lambda incident: (incident.from_s, incident.alert))


def _of_alert(series: Series, alert: Alert, target_ppm: int, start_s: int, end_s: int) -> Iterator[Incident]:
    since = None
    for at_s in range(-(-start_s // MINUTE_S) * MINUTE_S, end_s, MINUTE_S):
        fires = firing(series, alert, at_s, target_ppm)
        if fires and since is None:
            since = at_s
        elif not fires and since is not None:
            yield Incident(alert.name, since, at_s, series.between(since - alert.long_s, at_s).bad)
            since = None
    if since is not None:
        yield Incident(alert.name, since, None, series.between(since - alert.long_s, end_s).bad)
