"""Where the replicas' time went: I10, by itself and against the journals."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from tenants.audit.findings import Findings

SPAN = (
    *("engine_id", "incarnation_unix_ns", "number", "model", "until_unix_ns", "wall_ns", "attributed_ns", "load_ns"),
    *("recompute_ns", "lost_ns", "idle_ns", "overhead_ns", "error_ppm", "r2_ppm"),
)
ACCOUNTS = ("attributed_ns", "load_ns", "recompute_ns", "lost_ns", "idle_ns", "overhead_ns")
TOLERANCE_PERCENT = 1
_IN_THE_AIR_NS = 10**9  # a step that no record has yet when a process ends
_SPANS = text(
    f"SELECT {', '.join(SPAN)} FROM replica_time WHERE engine_id = :engine_id"
    " AND incarnation_unix_ns = :incarnation AND number >= :first AND number <= :last"
)
_ROLLED_UP = text(
    "SELECT first_number, last_number FROM replica_hour WHERE engine_id = :engine_id"
    " AND incarnation_unix_ns = :incarnation AND first_number <= :last AND last_number >= :first"
)
_SUMMED = ", ".join(("wall_ns", *ACCOUNTS))
_PROCESSES = text(
    "SELECT engine_id, incarnation_unix_ns, sum(num_records) AS num_records, max(last_number) AS last,"
    f" {', '.join(f'sum({name}) AS {name}' for name in ('wall_ns', *ACCOUNTS))} FROM ("
    f"SELECT engine_id, incarnation_unix_ns, 1 AS num_records, number AS last_number, {_SUMMED} FROM replica_time"
    " UNION ALL SELECT engine_id, incarnation_unix_ns, last_number - first_number + 1, last_number,"
    f" {_SUMMED} FROM replica_hour) AS spans GROUP BY engine_id, incarnation_unix_ns"
)


@dataclass(frozen=True, slots=True)
class JournaledTime:
    """A time record of a journal: the values of SPAN, in that order. ``due`` as of a Journaled."""

    number: int
    due: bool
    values: tuple[str | int, ...]

    @property
    def process(self) -> tuple[str, int]:
        return str(self.values[0]), int(self.values[1])

    @property
    def place(self) -> int:
        return int(self.values[2])


async def check_spans(
    connection: AsyncConnection, journal: str, records: Sequence[JournaledTime], findings: Findings
) -> None:
    """A replay would insert what isn't there, but for what is in an hour's sums."""
    by_process: dict[tuple[str, int], list[JournaledTime]] = defaultdict(list)
    for record in records:
        by_process[record.process].append(record)
    for (engine_id, incarnation), own in by_process.items():
        ends = {"first": min(record.place for record in own), "last": max(record.place for record in own)}
        query = {"engine_id": engine_id, "incarnation": incarnation, **ends}
        rows = {row.number: tuple(row) for row in await connection.execute(_SPANS, query)}
        hours = [range(low, high + 1) for low, high in await connection.execute(_ROLLED_UP, query)]
        for record in own:
            findings["I8"].checked += 1
            where = f"record {record.number} of {journal}, a second's accounts,"
            found = rows.get(record.place)
            if found is None and record.due and not any(record.place in hour for hour in hours):
                findings["I8"].breach(
                    f"record {record.number} of {journal}, a second's accounts, is not in the database"
                )
            elif found is not None and found != record.values:
                findings["I8"].breach(f"{where} was changed in the database")


async def check_replicas(connection: AsyncConnection, findings: Findings) -> None:
    finding = findings["I10"]
    for row in await connection.execute(_PROCESSES):
        finding.checked += int(row.num_records)
        name, wall = f"{row.engine_id} since {row.incarnation_unix_ns}", int(row.wall_ns)
        if row.num_records != row.last + 1:
            finding.breach(f"{name}: {row.num_records} of {row.last + 1} time records are there")
        told = sum(int(getattr(row, account)) for account in ACCOUNTS)
        if abs(told - wall) > wall * TOLERANCE_PERCENT // 100 + _IN_THE_AIR_NS:
            finding.breach(f"{name}: its accounts are {told} ns, the wall {wall} ns")
