"""roll old seconds of replicas up into hours; what is in the books of their time is never changed

Revision ID: replica_hours
Revises: billing_reference
"""

import sqlalchemy as sa
from alembic import op

from migrations.append_only import make_append_only, make_changeable

revision = "replica_hours"
down_revision = "billing_reference"
branch_labels = None
depends_on = None

_NUMBERS = (
    *("last_number", "until_unix_ns", "wall_ns", "attributed_ns", "load_ns", "recompute_ns", "lost_ns", "idle_ns"),
    *("overhead_ns", "error_ppm", "r2_ppm"),
)
_COVERED = (
    "SELECT 1 FROM replica_hour h WHERE h.engine_id = {row}.engine_id"
    " AND h.incarnation_unix_ns = {row}.incarnation_unix_ns"
    " AND {row}.number BETWEEN h.first_number AND h.last_number"
)
_KEPT = "replica_time is append-only until its hour is in replica_hour"


def upgrade() -> None:
    op.create_table(
        "replica_hour",
        sa.Column("engine_id", sa.String(length=64), nullable=False),
        sa.Column("incarnation_unix_ns", sa.BigInteger(), nullable=False),
        sa.Column("first_number", sa.BigInteger(), nullable=False),
        sa.Column("model", sa.String(length=64), nullable=False),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in _NUMBERS),
        sa.PrimaryKeyConstraint("engine_id", "incarnation_unix_ns", "first_number", name=op.f("pk_replica_hour")),
    )
    op.create_index(op.f("ix_replica_hour_until_unix_ns"), "replica_hour", ["until_unix_ns"])
    make_append_only("replica_hour")
    for statement in _postgres() if op.get_bind().dialect.name == "postgresql" else _sqlite():
        op.execute(statement)


def downgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        for what in ("change", "delete", "insert"):
            op.execute(f"DROP TRIGGER replica_time_{what} ON replica_time")
        for what in ("delete", "insert"):
            op.execute(f"DROP FUNCTION tenora_replica_time_{what}()")
    else:
        for what in ("change", "delete", "insert"):
            op.execute(f"DROP TRIGGER replica_time_{what}")
    make_changeable("replica_hour")
    op.drop_index(op.f("ix_replica_hour_until_unix_ns"), table_name="replica_hour")
    op.drop_table("replica_hour")


def _sqlite() -> list[str]:
    """A row leaves only when an hour has it, and does not come back then."""
    old, new = _COVERED.format(row="OLD"), _COVERED.format(row="NEW")
    return [
        "CREATE TRIGGER replica_time_change BEFORE UPDATE ON replica_time "
        "BEGIN SELECT RAISE(ABORT, 'replica_time is append-only'); END",
        f"CREATE TRIGGER replica_time_delete BEFORE DELETE ON replica_time WHEN NOT EXISTS ({old}) "
        f"BEGIN SELECT RAISE(ABORT, '{_KEPT}'); END",
        f"CREATE TRIGGER replica_time_insert BEFORE INSERT ON replica_time WHEN EXISTS ({new}) "
        "BEGIN SELECT RAISE(IGNORE); END",
    ]


def _postgres() -> list[str]:
    old, new = _COVERED.format(row="OLD"), _COVERED.format(row="NEW")
    return [
        "CREATE TRIGGER replica_time_change BEFORE UPDATE ON replica_time "
        "FOR EACH ROW EXECUTE FUNCTION tenora_append_only()",
        "CREATE FUNCTION tenora_replica_time_delete() RETURNS trigger LANGUAGE plpgsql AS $$ "
        f"BEGIN IF NOT EXISTS ({old}) THEN RAISE EXCEPTION '{_KEPT}'; END IF; RETURN OLD; END $$",
        "CREATE TRIGGER replica_time_delete BEFORE DELETE ON replica_time "
        "FOR EACH ROW EXECUTE FUNCTION tenora_replica_time_delete()",
        "CREATE FUNCTION tenora_replica_time_insert() RETURNS trigger LANGUAGE plpgsql AS $$ "
        f"BEGIN IF EXISTS ({new}) THEN RETURN NULL; END IF; RETURN NEW; END $$",
        "CREATE TRIGGER replica_time_insert BEFORE INSERT ON replica_time "
        "FOR EACH ROW EXECUTE FUNCTION tenora_replica_time_insert()",
    ]
