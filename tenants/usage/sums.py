"""What was charged in intervals of time: rollups where they are whole, the ledger's entries for the rest."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from sqlalchemy import CTE, BigInteger, ColumnElement, Table, and_, column, func, select, text, true, values
from sqlmodel.ext.asyncio.session import AsyncSession

from tenants.money import exact_sum, total
from tenants.tables import LedgerEntry, UsageRollup, UsageSeries
from tenants.tables.ledger import NOT_SUMMED
from tenants.usage.cover import RAW, cover
from tenants.usage.rollups import SUMMED_METERS, SUMS

Where: TypeAlias = Callable[[Table], list[ColumnElement[bool]]]
_NS = 10**9
_PIECE = tuple(column(name, BigInteger) for name in ("interval", "width_s", "from_s", "until_s"))
_entries: Table = LedgerEntry.__table__  # pyright: ignore[reportAttributeAccessIssue]
_rollups: Table = UsageRollup.__table__  # pyright: ignore[reportAttributeAccessIssue]
_series: Table = UsageSeries.__table__  # pyright: ignore[reportAttributeAccessIssue]


@dataclass(slots=True)
class Charged:
    """Quantities and picousd by meter; a meter is there if something of it was charged."""

    quantities: Counter[str] = field(default_factory=Counter)
    amounts: Counter[str] = field(default_factory=Counter)

    def add(self, meter: str, quantity: int, amount: int) -> None:
        if quantity:
            self.quantities[meter] += quantity
            self.amounts[meter] += amount


Found: TypeAlias = dict[tuple[int, tuple[str, ...]], Charged]  # by number of the interval, and values of the dimensions


async def charged(
    session: AsyncSession, intervals: Sequence[tuple[int, int]], dimensions: Sequence[str], where: Where
) -> Found:
    """Each entry that occurred in [start_s, end_s) of one of ``intervals``, once. ``dimensions`` are columns that
    entries and series have both; ``where`` makes conditions on such columns of either table."""
    pieces = [
        (number, piece.width_s, piece.start_s, piece.end_s)
        for number, interval in enumerate(intervals)
        for piece in cover(*interval)
    ]
    found: Found = defaultdict(Charged)
    if not pieces:
        return found
    piece = values(*_PIECE, name="piece").data(pieces).cte()
    for row in (await session.exec(_from_rollups(piece, dimensions, where))).all():  # pyright: ignore[reportCallIssue,reportArgumentType]
        for meter in SUMMED_METERS:
            found[_key(row, dimensions)].add(meter, int(getattr(row, meter) or 0), total(row, meter))
    parts_of = [_not_summed(piece)] + [piece.c.width_s == RAW] * any(width_s == RAW for _, width_s, _, _ in pieces)
    for parts in parts_of:
        for row in (await session.exec(_from_entries(piece, dimensions, where, parts))).all():  # pyright: ignore[reportCallIssue,reportArgumentType]
            found[_key(row, dimensions)].add(row.meter, int(row.quantity), total(row, "amount"))
    return found


def _key(row: Any, dimensions: Sequence[str]) -> tuple[int, tuple[str, ...]]:
    return row.interval, tuple(getattr(row, name) for name in dimensions)


def _not_summed(piece: CTE) -> ColumnElement[bool]:
    return and_(piece.c.width_s != RAW, text(NOT_SUMMED))


def _from_rollups(piece: CTE, dimensions: Sequence[str], where: Where) -> Any:
    keys = [piece.c.interval, *(_series.c[name] for name in dimensions)]
    within = and_(
        _rollups.c.series_id == _series.c.series_id,
        _rollups.c.width_s == piece.c.width_s,
        _rollups.c.start_s >= piece.c.from_s,
        _rollups.c.start_s < piece.c.until_s,
    )
    # outer: SQLite then begins with the series, and never reads all rollups once a piece; sums of nothing are null
    joined = _series.join(piece, true()).join(_rollups, within, isouter=True)
    sums = (func.sum(_rollups.c[name]).label(name) for name in SUMS)
    return select(*keys, *sums).select_from(joined).where(*where(_series)).group_by(*keys)


def _from_entries(piece: CTE, dimensions: Sequence[str], where: Where, parts: ColumnElement[bool]) -> Any:
    keys = [piece.c.interval, *(_entries.c[name] for name in dimensions), _entries.c.meter]
    within = and_(
        _entries.c.occurred_unix_ns >= piece.c.from_s * _NS, _entries.c.occurred_unix_ns < piece.c.until_s * _NS
    )
    sums = (func.sum(_entries.c.quantity).label("quantity"), *exact_sum(_entries.c.amount_picousd, "amount"))
    return select(*keys, *sums).select_from(piece.join(_entries, within)).where(parts, *where(_entries)).group_by(*keys)
