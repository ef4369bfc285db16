"""What requests cost beside what they were charged, and where the rest of the machines' time went.

The rows of groups are what requests took: their shares of steps and the loads of their adapters, lost requests apart.
The accounts are what no request pays. Together they are the wall time of all replicas, to the nanosecond. Each model's
unpaid time is also spread over its groups, in proportion to what they took: the second column, ``full_*``.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Literal, TypeAlias, get_args

from sqlalchemy import ColumnElement, Table, and_, func, literal, select, text
from sqlmodel import col
from sqlmodel.ext.asyncio.session import AsyncSession

from tenants.errors import InvalidValue
from tenants.money import exact_sum, total
from tenants.tables import LedgerEntry, ReplicaHour, ReplicaTime, RequestRecord, UsageRollup, UsageSeries
from tenants.tables.ledger import COSTLY, NOT_SUMMED
from tenants.usage.cover import cover
from tenants.usage.rollups import SUMMED_METERS

Dimension: TypeAlias = Literal["tenant", "model", "adapter", "class"]
Account: TypeAlias = Literal["load", "recompute", "lost", "idle", "overhead", "unsettled"]

COLUMNS: dict[Dimension, str] = {
    "tenant": "tenant_id",
    "model": "base_model",
    "adapter": "adapter_version_id",
    "class": "flow_class",
}
MAX_DAYS = 32
MINUTE_S = 60
_NS = 10**9
_HOUR_NS = 3600 * _NS
_TIMES = ("wall_ns", "attributed_ns", "load_ns", "recompute_ns", "lost_ns", "idle_ns", "overhead_ns")
_series: Table = UsageSeries.__table__  # pyright: ignore[reportAttributeAccessIssue]
_entries: Table = LedgerEntry.__table__  # pyright: ignore[reportAttributeAccessIssue]
_records: Table = RequestRecord.__table__  # pyright: ignore[reportAttributeAccessIssue]
_rollups: Table = UsageRollup.__table__  # pyright: ignore[reportAttributeAccessIssue]

Key: TypeAlias = tuple[str, ...]  # base model, then values of the dimensions asked for


@dataclass(frozen=True, slots=True)
class MarginQuery:
    """[start_s, end_s) in Unix seconds, widened to whole minutes. ``gpu_hour_picousd`` None: no cost in money.

    Raises InvalidValue.
    """

    start_s: int
    end_s: int
    group_by: tuple[Dimension, ...] = ("tenant",)
    gpu_hour_picousd: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.start_s < self.end_s < 1 << 33:
            raise InvalidValue("end_time", "lies after start_time, both in Unix seconds")
        object.__setattr__(self, "start_s", self.start_s // MINUTE_S * MINUTE_S)
        object.__setattr__(self, "end_s", -(-self.end_s // MINUTE_S) * MINUTE_S)
        if self.end_s - self.start_s > MAX_DAYS * 86_400:
            raise InvalidValue("end_time", f"lies at most {MAX_DAYS} days after start_time")
        if not self.group_by or len(set(self.group_by)) < len(self.group_by):
            raise InvalidValue("group_by", "names each dimension once, and at least one")
        if not set(self.group_by) <= set(get_args(Dimension)):
            raise InvalidValue("group_by", f"is one of {', '.join(get_args(Dimension))}")

    def cost_picousd(self, ns: int) -> int | None:
        """Of that much of a GPU, rounded down."""
        return None if self.gpu_hour_picousd is None else ns * self.gpu_hour_picousd // _HOUR_NS


@dataclass(slots=True)
class Taken:
    """Of one group. ``spread_ns`` is its part of what nobody pays."""

    gpu_ns: int = 0
    load_ns: int = 0
    price_picousd: int = 0
    spread_ns: int = 0

    @property
    def busy_ns(self) -> int:
        return self.gpu_ns + self.load_ns

    @property
    def full_ns(self) -> int:
        return self.busy_ns + self.spread_ns

    def add(self, other: "Taken") -> None:
        for name in ("gpu_ns", "load_ns", "price_picousd", "spread_ns"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(frozen=True, slots=True)
class Margins:
    """``groups`` by values of the query's dimensions. ``unspread_ns``: unpaid time of models that nobody used.
    ``error_ratio`` and ``r_squared`` are the cost model's, weighted by the time that it shared; None: it shared none.

    ``accounts["unsettled"]``: what ran for requests that had not ended when the interval did, less what was settled in
    it and had run before; it may be negative.
    """

    query: MarginQuery
    groups: dict[Key, Taken]
    accounts: dict[Account, int]
    wall_ns: int
    unspread_ns: int
    error_ratio: float | None
    r_squared: float | None


@dataclass(slots=True)
class _Model:
    """One base model's replicas: what their time records add up to, and its groups."""

    times: Counter[str] = field(default_factory=Counter)
    lost_ns: int = 0
    groups: dict[Key, Taken] = field(default_factory=lambda: defaultdict(Taken))

    def accounts(self) -> dict[Account, int]:
        busy_ns = sum(group.gpu_ns for group in self.groups.values())
        load_ns = sum(group.load_ns for group in self.groups.values())
        return {
            "load": self.times["load_ns"] - load_ns,
            "recompute": self.times["recompute_ns"],
            "lost": self.times["lost_ns"] + self.lost_ns,
            "idle": self.times["idle_ns"],
            "overhead": self.times["overhead_ns"] + self._unaccounted_ns(),
            "unsettled": self.times["attributed_ns"] - busy_ns - self.lost_ns,
        }

    def _unaccounted_ns(self) -> int:
        """Of a step in the air at the end, less one at the beginning."""
        return self.times["wall_ns"] - sum(self.times[name] for name in _TIMES[1:])


async def margins(session: AsyncSession, query: MarginQuery) -> Margins:
    """From the rollups, the replicas' time records, and the few request records that rollups don't tell apart."""
    models: dict[str, _Model] = defaultdict(_Model)
    await _add_summed(session, query, models)
    await _add_not_summed(session, query, models)
    await _add_costly(session, query, models)
    error_ratio, r_squared = await _add_replicas(session, query, models)
    accounts: Counter[Account] = Counter()
    groups: dict[Key, Taken] = defaultdict(Taken)
    unspread_ns = 0
    for model in models.values():
        unpaid = model.accounts()
        accounts.update(unpaid)
        unspread_ns += _spread(sum(unpaid.values()), model.groups)
        for key, taken in model.groups.items():
            groups[key[1:]].add(taken)
    wall_ns = sum(model.times["wall_ns"] for model in models.values())
    return Margins(query, dict(groups), dict(accounts), wall_ns, unspread_ns, error_ratio, r_squared)


def _spread(unpaid_ns: int, groups: dict[Key, Taken]) -> int:
    """Gives each its part by what it took, exact in sum → what is left since nobody took anything."""
    keys = sorted(groups)
    parts = [0, *accumulate(groups[key].busy_ns for key in keys)]
    if parts[-1] == 0:
        return unpaid_ns
    for key, (lower, upper) in zip(keys, pairwise(parts), strict=True):
        groups[key].spread_ns = unpaid_ns * upper // parts[-1] - unpaid_ns * lower // parts[-1]
    return 0


def _keys(query: MarginQuery, table: Table) -> list[ColumnElement]:
    """A key's columns: the base model first, since unpaid time is a model's. '' for what the table doesn't tell."""
    names = ["base_model", *(COLUMNS[name] for name in query.group_by)]
    columns = (table.c[name] if name in table.c else literal("") for name in names)
    return [column.label(f"key_{number}") for number, column in enumerate(columns)]


async def _add_summed(session: AsyncSession, query: MarginQuery, models: dict[str, _Model]) -> None:
    keys = _keys(query, _series)
    prices = [column for meter in SUMMED_METERS for column in _sums_of_limbs(meter)]
    for piece in cover(query.start_s, query.end_s):
        within = and_(
            _rollups.c.series_id == _series.c.series_id,
            _rollups.c.width_s == piece.width_s,
            _rollups.c.start_s >= piece.start_s,
            _rollups.c.start_s < piece.end_s,
        )
        sums = select(*keys, func.sum(_rollups.c.gpu_ns).label("gpu_ns"), *prices)
        for row in (await session.exec(sums.select_from(_series.join(_rollups, within)).group_by(*keys))).all():
            taken = _taken(row, keys, models)
            taken.gpu_ns += int(row.gpu_ns)
            taken.price_picousd += sum(total(row, meter) for meter in SUMMED_METERS)


async def _add_not_summed(session: AsyncSession, query: MarginQuery, models: dict[str, _Model]) -> None:
    """What adapters are charged for lying there."""
    keys, when = _keys(query, _entries), _entries.c.occurred_unix_ns
    sums = select(*keys, *exact_sum(_entries.c.amount_picousd, "amount")).group_by(*keys)
    for row in (await session.exec(sums.where(text(NOT_SUMMED), *_within(query, when)))).all():
        _taken(row, keys, models).price_picousd += total(row, "amount")


def _sums_of_limbs(meter: str) -> Iterable[ColumnElement]:
    names = (f"{meter}_quotient", f"{meter}_remainder")
    return (func.sum(_rollups.c[name]).label(name) for name in names)


def _taken(row: Any, keys: Sequence[ColumnElement], models: dict[str, _Model]) -> Taken:
    key = tuple(row[: len(keys)])
    return models[key[0]].groups[key]


async def _add_costly(session: AsyncSession, query: MarginQuery, models: dict[str, _Model]) -> None:
    """Loads of adapters go to their groups; what lost requests took, which the rollups have, goes from there."""
    keys = _keys(query, _records)
    lost = (_records.c.outcome == 0).label("is_lost")
    sums = (func.sum(_records.c[name]).label(name) for name in ("gpu_ns", "load_ns"))
    found = select(*keys, lost, *sums).group_by(*keys, lost)
    within = _within(query, _records.c.finished_unix_ns)
    for row in (await session.exec(found.where(text(f"({COSTLY})"), *within))).all():
        taken = _taken(row, keys, models)
        if row.is_lost:
            taken.gpu_ns -= int(row.gpu_ns)
            models[row.key_0].lost_ns += int(row.gpu_ns)
        else:
            taken.load_ns += int(row.load_ns)


async def _add_replicas(
    session: AsyncSession, query: MarginQuery, models: dict[str, _Model]
) -> tuple[float | None, float | None]:
    """→ the cost model's error and R². Old time is there by the hour: an hour counts where its last record does."""
    errors = busy_s = r_squared = 0.0
    for table in (ReplicaTime, ReplicaHour):
        for model, *times, error, r2 in (await session.exec(_times(table, query))).all():
            models[model].times.update(dict(zip(_TIMES, map(int, times), strict=True)))
            busy_s += int(times[1]) / _NS
            errors, r_squared = errors + float(error) / 1e6, r_squared + float(r2) / 1e6
    return (errors / busy_s, r_squared / busy_s) if busy_s else (None, None)


def _times(table: type[ReplicaTime | ReplicaHour], query: MarginQuery) -> Any:
    """By model: sums of _TIMES, then of error and R², weighted by the seconds shared."""
    busy = col(table.attributed_ns)
    weighted = (func.sum(busy * 1e-9 * col(table.error_ppm)), func.sum(busy * 1e-9 * col(table.r2_ppm)))
    columns: list[Any] = [col(table.model), *(func.sum(getattr(table, name)) for name in _TIMES), *weighted]
    return select(*columns).where(*_within(query, col(table.until_unix_ns))).group_by(col(table.model))


def _within(query: MarginQuery, time: Any) -> Sequence[Any]:
    return time >= query.start_s * _NS, time < query.end_s * _NS


def ranked(groups: Iterable[tuple[Key, Taken]], most: int) -> tuple[list[tuple[Key, Taken]], Taken]:
    """The dearest groups first, and the sum of those behind ``most``."""
    every = sorted(groups, key=lambda each: (-each[1].busy_ns, each[0]))
    others = Taken()
    for _, taken in every[most:]:
        others.add(taken)
    return every[:most], others
