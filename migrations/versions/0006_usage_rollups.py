"""sums of usage by minute, hour and day; the order of postings; both of what is booked already

Revision ID: usage_rollups
Revises: unbooked_records
"""

import hashlib

import sqlalchemy as sa
from alembic import op

revision = "usage_rollups"
down_revision = "unbooked_records"
branch_labels = None
depends_on = None

_DIMENSIONS = ("tenant_id", "key_id", "model", "base_model", "adapter_version_id", "flow_class", "rate_card_id")
_METERS = ("input_uncached_tokens", "input_cached_tokens", "output_tokens", "requests")
_LIMBS = tuple(f"{meter}_{limb}" for meter in _METERS for limb in ("quotient", "remainder"))
_POSTING = 500


def upgrade() -> None:
    _create_usage_series()
    _create_usage_rollup()
    _create_postings()
    where = sa.text(f"meter NOT IN ({', '.join(repr(meter) for meter in _METERS)})")
    columns = ["tenant_id", "occurred_unix_ns"]
    op.create_index("ix_ledger_entry_not_summed", "ledger_entry", columns, sqlite_where=where, postgresql_where=where)
    _sum_up_what_is_there()
    _number_what_is_there()


def downgrade() -> None:
    op.drop_index("ix_ledger_entry_not_summed", "ledger_entry")
    for table in ("posting_head", "posting", "usage_rollup", "usage_series"):
        op.drop_table(table)


def _create_usage_series() -> None:
    op.create_table(
        "usage_series",
        sa.Column("series_id", sa.String(length=24), nullable=False),
        sa.Column("tenant_id", sa.String(length=28), nullable=False),
        sa.Column("key_id", sa.String(length=16), nullable=False),
        sa.Column("model", sa.String(length=80), nullable=False),
        sa.Column("base_model", sa.String(length=64), nullable=False),
        sa.Column("adapter_version_id", sa.String(length=28), nullable=False),
        sa.Column("flow_class", sa.String(length=16), nullable=False),
        sa.Column("rate_card_id", sa.String(length=28), nullable=False),
        sa.PrimaryKeyConstraint("series_id", name=op.f("pk_usage_series")),
    )
    op.create_index(op.f("ix_usage_series_tenant_id"), "usage_series", ["tenant_id"])


def _create_usage_rollup() -> None:
    op.create_table(
        "usage_rollup",
        sa.Column("series_id", sa.String(length=24), nullable=False),
        sa.Column("width_s", sa.BigInteger(), nullable=False),
        sa.Column("start_s", sa.BigInteger(), nullable=False),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in (*_METERS, *_LIMBS, "gpu_ns")),
        sa.PrimaryKeyConstraint("series_id", "width_s", "start_s", name=op.f("pk_usage_rollup")),
        sqlite_with_rowid=False,
    )


def _create_postings() -> None:
    op.create_table(
        "posting",
        sa.Column("number", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("request_ids", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_posting")),
    )
    op.create_table(
        "posting_head",
        sa.Column("head_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("head_id", name=op.f("pk_posting_head")),
    )


def _sum_up_what_is_there() -> None:
    connection = op.get_bind()
    records = sa.table("request_record", *map(sa.column, _DIMENSIONS))
    found = connection.execute(sa.select(*records.c).distinct()).all()
    if not found:
        return
    names = ("series_id", *_DIMENSIONS)
    into = sa.table("usage_series", *map(sa.column, names))
    connection.execute(into.insert(), [dict(zip(names, (_series_id(row), *row), strict=True)) for row in found])
    for width_s in (60, 3600, 86_400):
        connection.execute(sa.text(_sums(width_s)))


def _series_id(dimensions) -> str:
    fields = map(str.encode, dimensions)
    message = b"".join(len(field).to_bytes(4, "big") + field for field in fields)
    return hashlib.sha256(b"tenora-series\x01" + message).hexdigest()[:24]


def _sums(width_s: int) -> str:
    """Quantities and amounts of the entries, under what their request's first billed dispatch says; every record's
    device time."""
    same = " AND ".join(f"s.{name} = r.{name}" for name in _DIMENSIONS)
    of_entry = [f"CASE e.meter WHEN '{meter}' THEN e.quantity ELSE 0 END" for meter in _METERS]
    for meter in _METERS:
        of_entry.append(f"CASE e.meter WHEN '{meter}' THEN e.amount_picousd / 1000000000 ELSE 0 END")
        of_entry.append(f"CASE e.meter WHEN '{meter}' THEN e.amount_picousd % 1000000000 ELSE 0 END")
    names = (*_METERS, *_LIMBS, "gpu_ns")
    named = ", ".join(f"{value} AS {name}" for value, name in zip((*of_entry, "0"), names, strict=True))
    nothing = ", ".join("0" for _ in (*_METERS, *_LIMBS))
    summed = ", ".join(f"SUM({name})" for name in names)
    return (
        f"INSERT INTO usage_rollup (series_id, width_s, start_s, {', '.join(names)}) "  # noqa: S608 (our own names)
        f"SELECT series_id, {width_s}, at_s / {width_s} * {width_s}, {summed} FROM ("
        f"SELECT s.series_id, e.occurred_unix_ns / 1000000000 AS at_s, {named} FROM ledger_entry e "
        "JOIN request_record r ON r.request_id = e.request_id AND r.attempt = (SELECT MIN(b.attempt) "
        "FROM request_record b WHERE b.request_id = e.request_id AND b.billed) "
        f"JOIN usage_series s ON {same} "
        f"UNION ALL SELECT s.series_id, r.finished_unix_ns / 1000000000, {nothing}, r.gpu_ns FROM request_record r "
        f"JOIN usage_series s ON {same}) AS each_one GROUP BY 1, 2, 3"
    )


def _number_what_is_there() -> None:
    connection = op.get_bind()
    rows = connection.execute(
        sa.text("SELECT request_id FROM ledger_entry GROUP BY request_id ORDER BY MIN(occurred_unix_ns), request_id")
    )
    ids = [row.request_id for row in rows]
    postings = [" ".join(ids[start : start + _POSTING]) for start in range(0, len(ids), _POSTING)]
    if postings:
        into = sa.table("posting", sa.column("number"), sa.column("request_ids"))
        rows = [{"number": number, "request_ids": ids} for number, ids in enumerate(postings, 1)]
        connection.execute(into.insert(), rows)
        head = sa.table("posting_head", sa.column("head_id"), sa.column("number"))
        connection.execute(head.insert(), [{"head_id": 1, "number": len(postings)}])
