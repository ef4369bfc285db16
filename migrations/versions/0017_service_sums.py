"""SLO sums by quarter and day beside those by minute; counts of an objective's version by hour

Revision ID: service_sums
Revises: replica_hours
"""

from collections.abc import Iterable, Iterator
from itertools import chain

import msgspec
import sqlalchemy as sa
from alembic import op

revision = "service_sums"
down_revision = "replica_hours"
branch_labels = None
depends_on = None

_DAY_S, _HOUR_S, _QUARTER_S, _MINUTE_S = 86_400, 3600, 900, 60
_PAGE = 1000
_KEY = ("tenant_id", "minute_s", "model", "flow_class")
_SUM = ("tenant_id", "width_s", "start_s", "model", "flow_class", "sums")
_HOUR = ("tenant_id", "hour_s", "version_id", "valid", "good", "minutes")


def upgrade() -> None:
    _create_tables()
    _sum_up_what_is_there()
    op.drop_table("latency_minute")
    op.drop_table("slo_minute")


def downgrade() -> None:
    """The sums are gone then: which place a version's counts were of is not kept any more."""
    op.create_table(
        "slo_minute",
        *_place(),
        sa.Column("sli", sa.String(length=16), nullable=False),
        sa.Column("version_id", sa.String(length=28), nullable=False),
        sa.Column("valid", sa.BigInteger(), nullable=False),
        sa.Column("good", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint(*_KEY, "sli", "version_id", name=op.f("pk_slo_minute")),
    )
    op.create_table(
        "latency_minute",
        *_place(),
        sa.Column("sums", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint(*_KEY, name=op.f("pk_latency_minute")),
    )
    op.drop_table("service_sum")
    op.drop_table("objective_hour")


def _place() -> list[sa.Column]:
    return [
        sa.Column("tenant_id", sa.String(length=28), nullable=False),
        sa.Column("minute_s", sa.BigInteger(), nullable=False),
        sa.Column("model", sa.String(length=80), nullable=False),
        sa.Column("flow_class", sa.String(length=16), nullable=False),
    ]


def _create_tables() -> None:
    op.create_table(
        "objective_hour",
        sa.Column("tenant_id", sa.String(length=28), nullable=False),
        sa.Column("hour_s", sa.BigInteger(), nullable=False),
        sa.Column("version_id", sa.String(length=28), nullable=False),
        sa.Column("valid", sa.BigInteger(), nullable=False),
        sa.Column("good", sa.BigInteger(), nullable=False),
        sa.Column("minutes", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", "hour_s", "version_id", name=op.f("pk_objective_hour")),
    )
    op.create_table(
        "service_sum",
        sa.Column("tenant_id", sa.String(length=28), nullable=False),
        sa.Column("width_s", sa.BigInteger(), nullable=False),
        sa.Column("start_s", sa.BigInteger(), nullable=False),
        sa.Column("model", sa.String(length=80), nullable=False),
        sa.Column("flow_class", sa.String(length=16), nullable=False),
        sa.Column("sums", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint(*_SUM[:-1], name=op.f("pk_service_sum")),
    )


# ── sums: [valid by SLI, good by SLI, excluded by reason, histograms by measure] ────────────────


def _sum_up_what_is_there() -> None:
    """Tenant by tenant, day by day: no more than a day of one tenant is in memory."""
    connection = op.get_bind()
    days: dict[str, set[int]] = {}
    for table in ("slo_minute", "latency_minute"):
        found = sa.text(f"SELECT DISTINCT tenant_id, minute_s / {_DAY_S} AS day FROM {table}")  # noqa: S608 (our own)
        for tenant_id, day in connection.execute(found).all():
            days.setdefault(tenant_id, set()).add(int(day))
    for tenant_id in sorted(days):
        for day in sorted(days[tenant_id]):
            _sum_up_day(connection, tenant_id, day * _DAY_S)
            _sum_up_versions(connection, tenant_id, day * _DAY_S)


def _sum_up_day(connection: sa.Connection, tenant_id: str, day_s: int) -> None:
    sums: dict[tuple[int, int, str, str], list[dict]] = {}
    for minute_s, model, flow_class, part in chain(
        _counts(connection, tenant_id, day_s), _samples(connection, tenant_id, day_s)
    ):
        for width_s in (_MINUTE_S, _QUARTER_S, _DAY_S):
            key = (width_s, minute_s // width_s * width_s, model, flow_class)
            _add(sums.setdefault(key, [{}, {}, {}, {}]), part)
    rows = ((tenant_id, *key, msgspec.msgpack.encode(each)) for key, each in sums.items())
    _insert(connection, "service_sum", _SUM, rows)


def _sum_up_versions(connection: sa.Connection, tenant_id: str, day_s: int) -> None:
    """An hour is kept as {minute: [valid, good]}."""
    hours: dict[tuple[int, str], dict[int, tuple[int, int]]] = {}
    columns = "minute_s, version_id, SUM(valid) AS valid, SUM(good) AS good"
    for row in _of_day(connection, columns, "slo_minute GROUP BY minute_s, version_id", tenant_id, day_s):
        if row.version_id:
            hour_s, second = row.minute_s // _HOUR_S * _HOUR_S, row.minute_s % _HOUR_S
            hours.setdefault((hour_s, row.version_id), {})[second // _MINUTE_S] = (int(row.valid), int(row.good))
    rows = (
        (tenant_id, *key, sum(each[0] for each in kept.values()), sum(each[1] for each in kept.values()), encoded)
        for key, kept in hours.items()
        for encoded in [msgspec.msgpack.encode(kept)]
    )
    _insert(connection, "objective_hour", _HOUR, rows)


def _insert(connection: sa.Connection, table: str, columns: tuple[str, ...], rows: Iterable[tuple]) -> None:
    into = sa.table(table, *map(sa.column, columns)).insert()
    named = [dict(zip(columns, row, strict=True)) for row in rows]
    for start in range(0, len(named), _PAGE):
        connection.execute(into, named[start : start + _PAGE])


def _counts(connection: sa.Connection, tenant_id: str, day_s: int) -> Iterator[tuple[int, str, str, list[dict]]]:
    columns = "minute_s, model, flow_class, sli, SUM(valid) AS valid, SUM(good) AS good"
    for row in _of_day(connection, columns, "slo_minute GROUP BY minute_s, model, flow_class, sli", tenant_id, day_s):
        counts = [{row.sli: int(row.valid)}, {row.sli: int(row.good)}, {}, {}]
        yield row.minute_s, row.model, row.flow_class, counts


def _samples(connection: sa.Connection, tenant_id: str, day_s: int) -> Iterator[tuple[int, str, str, list[dict]]]:
    """A minute was kept as [histograms, excluded]."""
    for row in _of_day(connection, "minute_s, model, flow_class, sums", "latency_minute", tenant_id, day_s):
        histograms, excluded = msgspec.msgpack.decode(row.sums)
        yield row.minute_s, row.model, row.flow_class, [{}, {}, excluded, histograms]


def _of_day(connection: sa.Connection, columns: str, source: str, tenant_id: str, day_s: int) -> Iterable[sa.Row]:
    table, _, grouped = source.partition(" ")
    query = sa.text(
        f"SELECT {columns} FROM {table} WHERE tenant_id = :tenant_id "  # noqa: S608 (our own names)
        f"AND minute_s >= :start_s AND minute_s < :end_s {grouped}"
    )
    return connection.execute(query, {"tenant_id": tenant_id, "start_s": day_s, "end_s": day_s + _DAY_S}).all()


def _add(whole: list[dict], part: list[dict]) -> None:
    for counts, others in zip(whole[:3], part[:3], strict=True):
        _add_up(counts, others)
    for measure, histogram in part[3].items():
        known = whole[3].get(measure)
        whole[3][measure] = _merged(known, histogram) if known else [dict(histogram[0]), *histogram[1:]]


def _merged(known: list, histogram: list) -> list:
    """Of [counts by bucket, total, least, most]; none of them is without samples."""
    _add_up(known[0], histogram[0])
    return [known[0], known[1] + histogram[1], min(known[2], histogram[2]), max(known[3], histogram[3])]


def _add_up(counts: dict, others: dict) -> None:
    for name, number in others.items():
        counts[name] = counts.get(name, 0) + number
