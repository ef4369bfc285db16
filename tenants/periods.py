"""Billing periods: months of a tenant's own calendar, as half-open intervals of Unix nanoseconds."""

from calendar import monthrange
from dataclasses import dataclass
from datetime import date, datetime, tzinfo

_NS = 10**9
LAST_ANCHOR_DAY = 31


@dataclass(frozen=True, slots=True)
class Period:
    """[start, end): ``label`` is the local date on which it begins, YYYY-MM-DD."""

    start_unix_ns: int
    end_unix_ns: int
    label: str


def month_of(unix_ns: int, zone: tzinfo, anchor_day: int = 1) -> Period:
    """The month that holds that instant: each is in one. Months begin at local midnight of ``anchor_day`` (1–31),
    or of the month's last day where it is shorter."""
    local = datetime.fromtimestamp(unix_ns // _NS, zone).date()
    year, month = local.year, local.month
    if unix_ns < midnight_ns(anchor(year, month, anchor_day), zone):
        year, month = _before(year, month)
    begin, end = anchor(year, month, anchor_day), anchor(*_after(year, month), anchor_day)
    return Period(midnight_ns(begin, zone), midnight_ns(end, zone), begin.isoformat())


def month_named(text: str, zone: tzinfo, anchor_day: int = 1) -> Period:
    """The month that begins in YYYY-MM, or on the day YYYY-MM-DD. Raises ValueError."""
    first = date.fromisoformat(text if len(text) > len("YYYY-MM") else f"{text}-01")
    begin = anchor(first.year, first.month, anchor_day)
    if text not in (begin.isoformat(), begin.isoformat()[:7]):
        raise ValueError(f"the month of {text[:7]} begins on {begin.isoformat()}")
    return month_of(midnight_ns(begin, zone), zone, anchor_day)


def anchor(year: int, month: int, anchor_day: int) -> date:
    assert 1 <= anchor_day <= LAST_ANCHOR_DAY
    return date(year, month, min(anchor_day, monthrange(year, month)[1]))


def midnight_ns(day: date, zone: tzinfo) -> int:
    """The instant at which a local day begins: where midnight is left out by a change of clocks, or comes twice, the
    first instant of that day."""
    return int(datetime(day.year, day.month, day.day, tzinfo=zone).timestamp()) * _NS


def _before(year: int, month: int) -> tuple[int, int]:
    return (year - 1, 12) if month == 1 else (year, month - 1)


def _after(year: int, month: int) -> tuple[int, int]:
    return (year + 1, 1) if month == 12 else (year, month + 1)
