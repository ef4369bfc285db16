"""Old seconds of replicas as sums of hours: 31 million rows a replica and year become 8,766."""

from sqlalchemy import CursorResult, text
from sqlmodel.ext.asyncio.session import AsyncSession

from tenants.database import Database

_HOUR_NS = 3600 * 10**9
_DAY_NS = 24 * _HOUR_NS
_SUMMED = ("wall_ns", "attributed_ns", "load_ns", "recompute_ns", "lost_ns", "idle_ns", "overhead_ns")
_WEIGHTED = ("error_ppm", "r2_ppm")
_IN = "until_unix_ns >= :start_ns AND until_unix_ns < :end_ns"


def _mean(name: str) -> str:
    shared = "sum(attributed_ns * 1e-9)"
    return f"CAST(round(coalesce(sum(attributed_ns * 1e-9 * {name}) / nullif({shared}, 0), 0)) AS BIGINT)"


_ADD = text(
    "INSERT INTO replica_hour"  # noqa: S608 (our own names)
    " (engine_id, incarnation_unix_ns, first_number, model, last_number, until_unix_ns,"
    f" {', '.join((*_SUMMED, *_WEIGHTED))})"
    " SELECT engine_id, incarnation_unix_ns, min(number), min(model), max(number), max(until_unix_ns),"
    f" {', '.join((*(f'CAST(sum({name}) AS BIGINT)' for name in _SUMMED), *map(_mean, _WEIGHTED)))}"
    f" FROM replica_time WHERE {_IN} GROUP BY engine_id, incarnation_unix_ns, until_unix_ns / {_HOUR_NS}"
    " HAVING count(*) = max(number) - min(number) + 1 AND min(model) = max(model)"
)
_REMOVE = text(
    f"DELETE FROM replica_time WHERE {_IN}"  # noqa: S608
    " AND EXISTS (SELECT 1 FROM replica_hour h"
    " WHERE h.engine_id = replica_time.engine_id AND h.incarnation_unix_ns = replica_time.incarnation_unix_ns"
    " AND replica_time.number BETWEEN h.first_number AND h.last_number)"
)
_FIRST = text("SELECT min(until_unix_ns) FROM replica_time")


async def roll_up(database: Database, before_ns: int) -> int:
    """Puts the whole hours before ``before_ns`` (Unix) into ``replica_hour`` and takes their seconds away, a day in a
    transaction → how many rows went. Hours in which a record is missing stay as they are: an audit tells of them."""
    end_ns, num_gone = before_ns // _HOUR_NS * _HOUR_NS, 0
    async with database.session() as session:
        first_ns = (await session.exec(_FIRST)).scalar_one()  # pyright: ignore[reportCallIssue, reportArgumentType]
    for start_ns in range((first_ns or end_ns) // _HOUR_NS * _HOUR_NS, end_ns, _DAY_NS):
        async with database.transaction() as session:
            num_gone += await _roll_up(session, start_ns, min(start_ns + _DAY_NS, end_ns))
    return num_gone


async def _roll_up(session: AsyncSession, start_ns: int, end_ns: int) -> int:
    connection, within = await session.connection(), {"start_ns": start_ns, "end_ns": end_ns}
    await connection.execute(_ADD, within)
    gone: CursorResult = await connection.execute(_REMOVE, within)
    return gone.rowcount
