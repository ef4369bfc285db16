"""Burn rates: how fast an error budget goes, over a long and a short window at once (Google's SRE workbook, ch. 5).

An alert fires while both windows burn. An incident begins when its alert fires, and is over once the short window has
been calm for CALM_MINUTES: a rate that wavers about its limit is one incident, not one a minute.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate
from operator import and_, gt, sub

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
_A_FEW = 15  # looks at least, and a sixth of a long window
CALM_MINUTES = 5  # the shortest window: the first and the last look of a calm share no request, whichever the alert


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
    """In [from_s, to_s), whole minutes; ``to_s`` None: it is not over. ``bad`` are the requests that failed from the
    long window before it on."""

    alert: str
    from_s: int
    to_s: int | None
    bad: int


@dataclass(frozen=True, slots=True)
class Tally:
    """Counts by time in columns: starts of minutes in Unix seconds, any number of times and in any order, how many were
    valid and good. Numbers alone, since a month's minutes as objects would keep Python's collector busy."""

    starts: list[int] = field(default_factory=list)
    valid: list[int] = field(default_factory=list)
    good: list[int] = field(default_factory=list)

    def add(self, starts: Iterable[int], valid: Iterable[int], good: Iterable[int]) -> None:
        self.starts.extend(starts)
        self.valid.extend(valid)
        self.good.extend(good)


class Series:
    """A tally by minute, summed up from its first one on: a month of them is looked at minute by minute."""

    def __init__(self, tally: Tally) -> None:
        self._first_s = min(tally.starts, default=0)
        valid, bad = _by_minute(tally, self._first_s)
        self._valid, self._bad = [0, *accumulate(valid)], [0, *accumulate(bad)]  # before each minute

    def between(self, start_s: int, end_s: int) -> Counts:
        """Of what starts in [start_s, end_s)."""
        first, last = self._place(start_s), self._place(end_s)
        valid = self._valid[last] - self._valid[first]
        return Counts(valid, valid - self._bad[last] + self._bad[first])

    def running(self, start_s: int, end_s: int) -> tuple[list[int], list[int]]:
        """How many were valid and how many bad before each whole minute from start to end, both included."""
        first, last = ((at_s - self._first_s) // MINUTE_S for at_s in (start_s, end_s))
        return _from_to(self._valid, first, last), _from_to(self._bad, first, last)

    def _place(self, at_s: int) -> int:
        """Of the first minute that begins then or later, as far as there are any."""
        return min(max(0, -((self._first_s - at_s) // MINUTE_S)), len(self._valid) - 1)


def _by_minute(tally: Tally, first_s: int) -> tuple[list[int], list[int]]:
    """How many were valid and how many bad in each minute from the first on."""
    starts, were_bad = tally.starts, list(map(sub, tally.valid, tally.good))
    if starts == list(range(first_s, first_s + len(starts) * MINUTE_S, MINUTE_S)):  # who is busy is so all the time
        return tally.valid, were_bad
    places = [(start - first_s) // MINUTE_S for start in starts]
    valid, bad = [0] * (max(places) + 1), [0] * (max(places) + 1)
    for place, num_valid, num_bad in zip(places, tally.valid, were_bad, strict=True):
        valid[place] += num_valid
        bad[place] += num_bad
    return valid, bad


def _from_to(sums: list[int], first: int, last: int) -> list[int]:
    """Both included. Nothing comes before the first of them, and nothing more after the last one."""
    before, after = min(-first, last - first + 1), min(last - len(sums) + 1, last - first + 1)
    return [*[0] * before, *sums[max(0, first) : max(0, last + 1)], *[sums[-1]] * after]


def firing(series: Series, alert: Alert, at_s: int, target_ppm: int) -> bool:
    """Both windows that end at ``at_s`` burn."""
    windows = (series.between(at_s - window_s, at_s) for window_s in (alert.short_s, alert.long_s))
    return all(_burns(counts, alert, target_ppm) for counts in windows)


def is_calm(series: Series, alert: Alert, at_s: int, target_ppm: int) -> bool:
    """The short window burnt at none of the last CALM_MINUTES looks, the one at ``at_s`` among them."""
    looks = range(at_s, at_s - CALM_MINUTES * MINUTE_S, -MINUTE_S)
    return not any(_burns(series.between(look - alert.short_s, look), alert, target_ppm) for look in looks)


def _burns(counts: Counts, alert: Alert, target_ppm: int) -> bool:
    """bad / valid > factor × (1 − target), without a division."""
    return counts.bad * 10 * PPM > alert.factor_tenths * (PPM - target_ppm) * counts.valid


def rate(counts: Counts, target_ppm: int) -> float | None:
    """How many times faster than allowed the budget went; None without requests, or without a budget."""
    if not counts.valid or target_ppm >= PPM:
        return None
    return counts.bad * PPM / (counts.valid * (PPM - target_ppm))


def incidents(series: Series, target_ppm: int, start_s: int, end_s: int) -> list[Incident]:
    """What begins in [start_s, end_s), looked at each whole minute of it; in the order of its beginning. What had begun
    before begins with the interval, if it fires then."""
    first_s, last_s = -(-start_s // MINUTE_S) * MINUTE_S, -(-end_s // MINUTE_S) * MINUTE_S
    if first_s >= last_s:
        return []
    running = series.running(first_s - LOOK_BACK_S, last_s)
    if running[1][0] == running[1][-1]:
        return []
    found: list[Incident] = []
    for alert in ALERTS:
        limit = Fraction(alert.factor_tenths * (PPM - target_ppm), 10 * PPM)  # in lowest terms: small numbers are fast
        long = _burning(running, limit, alert.long_s)
        if 1 not in long:
            continue
        short = _burning(running, limit, alert.short_s)
        for begin, end in _spans(bytes(map(and_, short, long)), short):
            from_s, to_s = first_s + begin * MINUTE_S, None if end is None else first_s + end * MINUTE_S
            counts = series.between(from_s - alert.long_s, end_s if to_s is None else to_s)
            found.append(Incident(alert.name, from_s, to_s, counts.bad))
    return sorted(found, key=lambda incident: (incident.from_s, incident.alert))


def _burning(running: tuple[list[int], list[int]], limit: Fraction, window_s: int) -> bytes:
    """1 where the window before a look burns, else 0. Sums are ``running`` from LOOK_BACK_S before the first look on.

    A month of looks is too many for a call each. Of a few that follow each other it is asked first whether all that was
    bad in any of their windows would be too much for what was valid in each of them: mostly it would not."""
    (valid, bad), first, width = running, LOOK_BACK_S // MINUTE_S, window_s // MINUTE_S
    times, allowed, few = limit.denominator, limit.numerator, max(_A_FEW, width // 6)
    found = bytearray(len(valid) - 1 - first)
    for begin in range(first, len(valid) - 1, few):
        end = min(begin + few, len(valid) - 1)
        most_bad, least_valid = bad[end - 1] - bad[begin - width], valid[begin] - valid[end - 1 - width]
        if times * most_bad > allowed * max(0, least_valid):
            were_bad = map(sub, bad[begin:end], bad[begin - width : end - width])
            were_valid = map(sub, valid[begin:end], valid[begin - width : end - width])
            burns = map(gt, map(times.__mul__, were_bad), map(allowed.__mul__, were_valid))
            found[begin - first : end - first] = bytes(burns)
    return bytes(found)


def _spans(fires: bytes, burns: bytes) -> Iterator[tuple[int, int | None]]:
    """From a look that fires to the last of the calm ones that end it, which is where the next may begin."""
    begin = fires.find(1)
    while begin >= 0:
        calm = burns.find(bytes(CALM_MINUTES), begin)
        if calm < 0:
            yield begin, None
            return
        end = calm + CALM_MINUTES - 1
        yield begin, end
        begin = fires.find(1, end)
