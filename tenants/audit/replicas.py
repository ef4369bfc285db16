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
_PROCESSES = text(
    "SELECT engine_id, incarnation_unix_ns, count(*) AS num_records, max(number) AS last, sum(wall_ns) AS wall_ns,"
    f" {', '.join(f'sum({name}) AS {name}' for name in ACCOUNTS)} FROM replica_time"
    " GROUP BY engine_id, incarnation_unix_ns"
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
    """A replay would insert what isn't there."""
    by_process: dict[tuple[str, int], list[JournaledTime]] = defaultdict(list)
    for record in records:
        by_process[record.process].append(record)
    for (engine_id, incarnation), own in by_process.items():
        ends = {"first": min(record.place for record in own), "last": max(record.place for record in own)}
        query = {"engine_id": engine_id, "incarnation": incarnation, **ends}
        rows = {row.number: tuple(row) for row in await connection.execute(_SPANS, query)}
        for record in own:
            findings["I8"].checked += 1
            where = f"record {record.number} of {journal}, a second's accounts,"
            found = rows.get(record.place)
            if found is None and record.due:
                findings["I8"].breach(
                    f"record {record.number} of {journal}, a second's accounts, is not in the database"
                )
            elif found is not None and found != record.values:
                findings["I8"].breach(f"{where} was changed in the database")


async def check_replicas(connection: AsyncConnection, findings: Findings) -> None:
    finding = findings["I10"]
    for row in await connection.execute(_PROCESSES):
        finding.checked += row.num_records
        name, wall = f"{row.engine_id} since {row.incarnation_unix_ns}", int(row.wall_ns)
        if row.num_records != row.last + 1:
            finding.breach(f"{name}: {row.num_records} of {row.last + 1} time records are there")
        told = sum(int(getattr(row, account)) for account in ACCOUNTS)
        if abs(told - wall) > wall * TOLERANCE_PERCENT // 100 + _IN_THE_AIR_NS:
            finding.breach(f"{name}: its accounts are {told} ns, the wall {wall} ns")
