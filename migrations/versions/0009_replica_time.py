"""create the table of the replicas' time; say what loading and recomputing for a request took

Revision ID: replica_time
Revises: invoices
"""

import sqlalchemy as sa
from alembic import op

revision = "replica_time"
down_revision = "invoices"
branch_labels = None
depends_on = None

_NUMBERS = (
    *("until_unix_ns", "wall_ns", "attributed_ns", "load_ns", "recompute_ns", "lost_ns", "idle_ns", "overhead_ns"),
    *("error_ppm", "r2_ppm"),
)


def upgrade() -> None:
    op.create_table(
        "replica_time",
        sa.Column("engine_id", sa.String(length=64), nullable=False),
        sa.Column("incarnation_unix_ns", sa.BigInteger(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("model", sa.String(length=64), nullable=False),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in _NUMBERS),
        sa.PrimaryKeyConstraint("engine_id", "incarnation_unix_ns", "number", name=op.f("pk_replica_time")),
    )
    op.create_index(op.f("ix_replica_time_until_unix_ns"), "replica_time", ["until_unix_ns"])
    for name in ("load_ns", "recompute_ns"):
        op.add_column("request_record", sa.Column(name, sa.BigInteger(), nullable=False, server_default="0"))


def downgrade() -> None:
    for name in ("recompute_ns", "load_ns"):  # in place: a table made anew on SQLite would lose its triggers
        op.drop_column("request_record", name)
    op.drop_index(op.f("ix_replica_time_until_unix_ns"), table_name="replica_time")
    op.drop_table("replica_time")
