"""The rollups once more, from the records and entries themselves: to compare with, or to take their place."""

from itertools import pairwise

from sqlalchemy import select
from sqlmodel.ext.asyncio.session import AsyncSession

from tenants.bulk import insert_new
from tenants.tables import RequestRecord, UsageSeries
from tenants.usage.cover import WIDTHS_S
from tenants.usage.rollups import DIMENSIONS, SUMMED_METERS, SUMS, series_id

_COLUMNS = ", ".join(("series_id", "width_s", "start_s", *SUMS))
_SUMMED = ", ".join(f"SUM({name})" for name in SUMS)
_MINUTE_S = min(WIDTHS_S)


async def rebuild(session: AsyncSession) -> None:
    """Sums everything up anew, in the caller's transaction. What is booked meanwhile waits for its end."""
    connection = await session.connection()
    if connection.dialect.name == "postgresql":  # on SQLite a writer is alone anyway
        await connection.exec_driver_sql("LOCK TABLE usage_rollup IN EXCLUSIVE MODE")
    await connection.exec_driver_sql("DELETE FROM usage_rollup")
    names = (getattr(RequestRecord, name) for name in DIMENSIONS)
    found = (await session.exec(select(*names).distinct())).all()  # pyright: ignore[reportCallIssue,reportArgumentType]
    series = sorted((series_id(*row), *row) for row in found)
    await insert_new(session, UsageSeries, ("series_id", *DIMENSIONS), series)
    for statement in _recounts():
        await connection.exec_driver_sql(f"INSERT INTO usage_rollup ({_COLUMNS}) {statement}")


async def differences(session: AsyncSession) -> int:
    """How many rollups are not the sums of what is booked: 0, always. One snapshot, also while others book."""
    connection = await session.connection()
    counted = 0
    for width_s, recount in zip(sorted(WIDTHS_S), _recounts(), strict=True):
        stored = f"SELECT {_COLUMNS} FROM usage_rollup WHERE width_s = {width_s}"  # noqa: S608 (numbers of ours)
        for one, other in ((stored, recount), (recount, stored)):
            extra = f"SELECT COUNT(*) FROM ({one} EXCEPT {other}) AS extra"  # noqa: S608
            counted += (await connection.exec_driver_sql(extra)).scalar_one()
    return counted


def _recounts() -> list[str]:
    return [_minutes(), *coarser_sums()]


def coarser_sums() -> list[str]:
    """SELECTs of hours from the stored minutes, and of days from the stored hours."""
    return [
        f"SELECT series_id, {width}, start_s / {width} * {width}, {_SUMMED} FROM usage_rollup "  # noqa: S608
        f"WHERE width_s = {finer} GROUP BY 1, 2, 3"
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
