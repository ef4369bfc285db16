"""What is asked of usage and costs, and the shape of the answers: pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta, tzinfo
from itertools import pairwise
from typing import Generic, Literal, TypeAlias, TypeVar

from tenants.errors import InvalidValue
from tenants.meter import FlowClass
from tenants.periods import midnight_ns

BucketWidth: TypeAlias = Literal["1m", "1h", "1d"]
GroupBy: TypeAlias = Literal["model", "api_key_id", "project_id", "flow_class", "line_item"]

Row = TypeVar("Row")

WIDTH_S: dict[BucketWidth, int] = {"1m": 60, "1h": 3600, "1d": 86_400}
_NS = 10**9
_MAX_BUCKETS = {"1m": 1440, "1h": 168, "1d": 366}


@dataclass(frozen=True, slots=True)
class UsageQuery:
    """A half-open interval [start_s, end_s) in Unix seconds, cut at whole minutes, or at hours or days of ``zone``.

    The first and the last bucket end at the interval's own ends. Empty filters mean all. Raises InvalidValue.
    """

    start_s: int
    end_s: int
    width: BucketWidth = "1d"
    group_by: tuple[GroupBy, ...] = ()
    models: tuple[str, ...] = ()
    key_ids: tuple[str, ...] = ()
    project_ids: tuple[str, ...] = ()
    zone: tzinfo = UTC

    def __post_init__(self) -> None:
        if not 0 <= self.start_s < self.end_s < 1 << 33:
            raise InvalidValue("end_time", "lies after start_time, both in Unix seconds")
        if (self.end_s - self.start_s) // WIDTH_S[self.width] > _MAX_BUCKETS[self.width]:
            raise InvalidValue("bucket_width", f"at most {_MAX_BUCKETS[self.width]} buckets of {self.width}")

    def intervals(self) -> list[tuple[int, int]]:
        """The buckets, half-open."""
        return list(pairwise(edges(self.start_s, self.end_s, self.width, self.zone)))

    def check_groups(self, *allowed: GroupBy) -> None:
        for name in self.group_by:
            if name not in allowed:
                raise InvalidValue("group_by", f"is one of {', '.join(allowed)}")


@dataclass(frozen=True, slots=True)
class UsageRow:
    """OpenAI's usage result. ``input_tokens`` include the cached ones; a field not grouped by is None."""

    input_tokens: int
    input_cached_tokens: int
    output_tokens: int
    num_model_requests: int
    model: str | None = None
    api_key_id: str | None = None
    project_id: str | None = None
    flow_class: FlowClass | None = None


@dataclass(frozen=True, slots=True)
class CostRow:
    """OpenAI's cost result, exact."""

    amount_picousd: int
    line_item: str | None = None
    api_key_id: str | None = None
    project_id: str | None = None


@dataclass(frozen=True, slots=True)
class TimeBucket(Generic[Row]):
    """The rows of [start_s, end_s), in Unix seconds."""

    start_s: int
    end_s: int
    rows: list[Row]


def edges(start_s: int, end_s: int, width: BucketWidth, zone: tzinfo) -> list[int]:
    """Unix seconds at which buckets begin, and the end: strictly rising."""
    inner = _CUTS[width](start_s, end_s, zone)
    return [start_s, *(edge for edge in inner if start_s < edge < end_s), end_s]


def page_end(start_s: int, end_s: int, width: BucketWidth, zone: tzinfo, num_buckets: int) -> int:
    """Where that many buckets end, or the interval, if that is sooner."""
    near_s = start_s + (num_buckets + 2) * WIDTH_S[width]  # an hour more in some days makes no two of them
    return edges(start_s, min(end_s, near_s), width, zone)[: num_buckets + 1][-1]


def _minutes(start_s: int, end_s: int, _: tzinfo) -> Iterator[int]:
    width_s = WIDTH_S["1m"]
    yield from range((start_s // width_s + 1) * width_s, end_s, width_s)


def _hours(start_s: int, end_s: int, zone: tzinfo) -> Iterator[int]:
    """Where local hours begin: an hour that comes twice is two, and where clocks change within one, so is that."""
    width_s, at_s = WIDTH_S["1h"], start_s
    while at_s < end_s:
        offset = datetime.fromtimestamp(at_s, zone).utcoffset() or timedelta()
        at_s += width_s - (at_s + int(offset.total_seconds())) % width_s
        yield at_s


def _days(start_s: int, end_s: int, zone: tzinfo) -> Iterator[int]:
    """Where local days begin: a day has 23, 24 or 25 hours."""
    day: date = datetime.fromtimestamp(start_s, zone).date()
    last = datetime.fromtimestamp(end_s, zone).date()
    instants = set()  # a day that a zone left out begins when the next one does
    while day <= last:
        instants.add(midnight_ns(day, zone) // _NS)
        day += timedelta(days=1)
    yield from sorted(instants)


_CUTS = {"1m": _minutes, "1h": _hours, "1d": _days}
