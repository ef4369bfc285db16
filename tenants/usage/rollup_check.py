"""The rollups once more, from the records and entries themselves: to compare with, or to take their place.

Days before the first record that the database still has are left as they are: rollups outlive what retention takes.
"""

from itertools import pairwise

from sqlalchemy import func, select
from sqlmodel.ext.asyncio.session import AsyncSession

from tenants.bulk import insert_new
from tenants.tables import RequestRecord, UsageSeries
from tenants.usage.cover import WIDTHS_S
from tenants.usage.rollups import DIMENSIONS, SUMMED_METERS, SUMS, series_id

_COLUMNS = ", ".join(("series_id", "width_s", "start_s", *SUMS))
_SUMMED = ", ".join(f"SUM({name})" for name in SUMS)
_MINUTE_S, _DAY_S = min(WIDTHS_S), max(WIDTHS_S)
_NS = 10**9


async def rebuild(session: AsyncSession) -> None:
    """Sums up anew, in the caller's transaction. What is booked meanwhile waits for its end."""
    connection, first_s = await session.connection(), await _first_day_s(session)
    if connection.dialect.name == "postgresql":  # on SQLite a writer is alone anyway
        await connection.exec_driver_sql("LOCK TABLE usage_rollup IN EXCLUSIVE MODE")
    await connection.exec_driver_sql(f"DELETE FROM usage_rollup WHERE start_s >= {first_s}")  # noqa: S608 (ours)
    names = (getattr(RequestRecord, name) for name in DIMENSIONS)
    found = (await session.exec(select(*names).distinct())).all()  # pyright: ignore[reportCallIssue,reportArgumentType]
    series = sorted((series_id(*row), *row) for row in found)
    await insert_new(session, UsageSeries, ("series_id", *DIMENSIONS), series)
    for statement in _recounts(first_s):
        await connection.exec_driver_sql(f"INSERT INTO usage_rollup ({_COLUMNS}) {statement}")


async def differences(session: AsyncSession) -> int:
    """How many rollups are not the sums of what is booked: 0, always. One snapshot, also while others book."""
    connection, first_s = await session.connection(), await _first_day_s(session)
    counted = 0
    for width_s, recount in zip(sorted(WIDTHS_S), _recounts(first_s), strict=True):
        wanted = f"width_s = {width_s} AND start_s >= {first_s}"
        stored = f"SELECT {_COLUMNS} FROM usage_rollup WHERE {wanted}"  # noqa: S608 (numbers of ours)
        for one, other in ((stored, recount), (recount, stored)):
            extra = f"SELECT COUNT(*) FROM ({one} EXCEPT {other}) AS extra"  # noqa: S608
            counted += (await connection.exec_driver_sql(extra)).scalar_one()
    return counted


async def _first_day_s(session: AsyncSession) -> int:
    """Where the UTC day of the first record begins."""
    first_ns = (await session.exec(select(func.min(RequestRecord.finished_unix_ns)))).one()[0] or 0  # pyright: ignore[reportCallIssue,reportArgumentType]
    return first_ns // _NS // _DAY_S * _DAY_S


def _recounts(first_s: int) -> list[str]:
    return [_minutes(), *coarser_sums(first_s)]


def coarser_sums(first_s: int = 0) -> list[str]:
    """SELECTs of hours from the stored minutes, and of days from the stored hours, from a whole day on."""
    return [
        f"SELECT series_id, {width}, start_s / {width} * {width}, {_SUMMED} FROM usage_rollup "  # noqa: S608
        f"WHERE width_s = {finer} AND start_s >= {first_s} GROUP BY 1, 2, 3"
        for finer, width in pairwise(sorted(WIDTHS_S))
    ]


def _minutes() -> str:
    """Quantities and amounts of the entries, under what their request's first billed dispatch says; the device time of
    every record."""
    same = " AND ".join(f"s.{name} = r.{name}" for name in DIMENSIONS)
    of_meter = {meter: f"CASE e.meter WHEN '{meter}' THEN {{}} ELSE 0 END" for meter in SUMMED_METERS}
    of_entry = [of_meter[meter].format("e.quantity") for meter in SUMMED_METERS]
    for meter in SUMMED_METERS:
        of_entry += [of_meter[meter].format(f"e.amount_picousd {limb} 1000000000") for limb in "/%"]
    named = ", ".join(f"{value} AS {name}" for value, name in zip((*of_entry, "0"), SUMS, strict=True))
    nothing = ", ".join("0" for _ in of_entry)
    return (
        f"SELECT series_id, {_MINUTE_S}, at_s / {_MINUTE_S} * {_MINUTE_S}, {_SUMMED} FROM ("  # noqa: S608
        f"SELECT s.series_id, e.occurred_unix_ns / 1000000000 AS at_s, {named} FROM ledger_entry e "
        "JOIN request_record r ON r.request_id = e.request_id AND r.attempt = (SELECT MIN(b.attempt) "
        "FROM request_record b WHERE b.request_id = e.request_id AND b.billed) "
        f"JOIN usage_series s ON {same} "
        f"UNION ALL SELECT s.series_id, r.finished_unix_ns / 1000000000, {nothing}, r.gpu_ns FROM request_record r "
        f"JOIN usage_series s ON {same}) AS each_one GROUP BY 1, 2, 3"
    )
