"""The interval of a report, and its local days and hours."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise
from zoneinfo import ZoneInfo

from tenants.errors import InvalidValue
from tenants.periods import midnight_ns
from tenants.slo.objectives import MINUTE_S

MAX_DAYS = 92
GROUPS = ("model", "class")
_DAY_S, _HOUR_S, _NS = 86_400, 3600, 10**9


@dataclass(frozen=True, slots=True)
class SloQuery:
    """[start_s, end_s) in Unix seconds, whole minutes, at most MAX_DAYS. ``group`` ⊆ GROUPS. Raises InvalidValue."""

    start_s: int
    end_s: int
    group: tuple[str, ...] = GROUPS

    def __post_init__(self) -> None:
        if not 0 <= self.start_s < self.end_s < 1 << 33:
            raise InvalidValue("end", "lies after start, both in Unix seconds")
        for name, value in (("start", self.start_s), ("end", self.end_s)):
            if value % MINUTE_S:
                raise InvalidValue(name, "is a whole minute")
        if self.end_s - self.start_s > MAX_DAYS * _DAY_S + 2 * _HOUR_S:  # a change of clocks is no reason
            raise InvalidValue("end", f"lies at most {MAX_DAYS} days after start")
        if not set(self.group) <= set(GROUPS):
            raise InvalidValue("group", f"holds of {', '.join(GROUPS)}")


class Calendar:
    """``days`` are the local days as (start, end), cut at the interval's ends; ``hours`` the starts of their hours."""

    def __init__(self, query: SloQuery, zone: ZoneInfo) -> None:
        self.zone = zone
        self.days = list(_days(query, zone))
        self.hours = [hour for start, end in self.days for hour in range(start, end, _HOUR_S)]


def _days(query: SloQuery, zone: ZoneInfo) -> Iterator[tuple[int, int]]:
    first = datetime.fromtimestamp(query.start_s, zone).date()
    last = datetime.fromtimestamp(query.end_s, zone).date()
    dates = (first + timedelta(days=number) for number in range((last - first).days + 1))
    midnights = {midnight_ns(date, zone) // _NS for date in dates}
    inner = (edge for edge in midnights if query.start_s < edge < query.end_s)
    return pairwise(sorted({query.start_s, *inner, query.end_s}))
