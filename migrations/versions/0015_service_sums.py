"""SLO sums by quarter and day beside those by minute; a version's counts once a minute, for all that it applies to

Revision ID: service_sums
Revises: billing_reference
"""

from collections.abc import Iterable, Iterator
from itertools import chain

import msgspec
import sqlalchemy as sa
from alembic import op

revision = "service_sums"
down_revision = "billing_reference"
branch_labels = None
depends_on = None

_DAY_S, _QUARTER_S, _MINUTE_S = 86_400, 900, 60
_PAGE = 1000
_KEY = ("tenant_id", "minute_s", "model", "flow_class")
_SUM = ("tenant_id", "width_s", "start_s", "model", "flow_class", "sums")


def upgrade() -> None:
    _create_tables()
    op.execute(
        "INSERT INTO objective_minute (tenant_id, minute_s, version_id, valid, good) "
        "SELECT tenant_id, minute_s, version_id, SUM(valid), SUM(good) FROM slo_minute "
        "WHERE version_id <> '' GROUP BY tenant_id, minute_s, version_id"
    )
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
    op.drop_table("objective_minute")


def _place() -> list[sa.Column]:
    return [
        sa.Column("tenant_id", sa.String(length=28), nullable=False),
        sa.Column("minute_s", sa.BigInteger(), nullable=False),
        sa.Column("model", sa.String(length=80), nullable=False),
        sa.Column("flow_class", sa.String(length=16), nullable=False),
    ]


def _create_tables() -> None:
    op.create_table(
        "objective_minute",
        sa.Column("tenant_id", sa.String(length=28), nullable=False),
        sa.Column("minute_s", sa.BigInteger(), nullable=False),
        sa.Column("version_id", sa.String(length=28), nullable=False),
        sa.Column("valid", sa.BigInteger(), nullable=False),
        sa.Column("good", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", "minute_s", "version_id", name=op.f("pk_objective_minute")),
        sqlite_with_rowid=False,
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


def _sum_up_day(connection: sa.Connection, tenant_id: str, day_s: int) -> None:
    sums: dict[tuple[int, int, str, str], list[dict]] = {}
    for minute_s, model, flow_class, part in chain(
        _counts(connection, tenant_id, day_s), _samples(connection, tenant_id, day_s)
    ):
        for width_s in (_MINUTE_S, _QUARTER_S, _DAY_S):
            key = (width_s, minute_s // width_s * width_s, model, flow_class)
            _add(sums.setdefault(key, [{}, {}, {}, {}]), part)
    into = sa.table("service_sum", *map(sa.column, _SUM))
    rows = [dict(zip(_SUM, (tenant_id, *key, msgspec.msgpack.encode(each)), strict=True)) for key, each in sums.items()]
    for start in range(0, len(rows), _PAGE):
        connection.execute(into.insert(), rows[start : start + _PAGE])


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
