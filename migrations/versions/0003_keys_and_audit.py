"""scopes, peppers and scoped limits of keys; deleted tenants; the audit log

Revision ID: keys_and_audit
Revises: idempotency
"""

import sqlalchemy as sa
from alembic import op

import tenants.tables

revision = "keys_and_audit"
down_revision = "idempotency"
branch_labels = None
depends_on = None

_EVERY_SCOPE = '["adapters:read", "adapters:write", "inference", "usage"]'


def upgrade() -> None:
    """Columns are added in place: SQLite can't copy a table that others refer to."""
    op.add_column("tenant", sa.Column("deleted_unix_ns", sa.BigInteger(), nullable=True))
    for column in _key_columns():
        op.add_column("api_key", column)
    op.execute("UPDATE api_key SET is_demo = true WHERE name = 'demo' AND expires_unix_ns IS NOT NULL")
    op.add_column("operator_key", _pepper())
    _create_audit_event()
    op.create_table(
        "audit_head",
        sa.Column("head_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("hash", sa.String(length=64), nullable=False),
        sa.PrimaryKeyConstraint("head_id", name=op.f("pk_audit_head")),
    )


def downgrade() -> None:
    op.drop_table("audit_head")
    op.drop_table("audit_event")
    op.drop_column("operator_key", "pepper")
    for column in reversed(_key_columns()):
        op.drop_column("api_key", column.name)
    op.drop_column("tenant", "deleted_unix_ns")


def _key_columns() -> list[sa.Column]:
    return [
        sa.Column("scopes", tenants.tables.StringList(), nullable=False, server_default=_EVERY_SCOPE),
        sa.Column("scoped_limits", tenants.tables.JsonList(), nullable=False, server_default="[]"),
        _pepper(),
        sa.Column("is_demo", sa.Boolean(), nullable=False, server_default=sa.false()),
    ]


def _pepper() -> sa.Column:
    return sa.Column("pepper", sa.BigInteger(), nullable=False, server_default="1")


def _create_audit_event() -> None:
    op.create_table(
        "audit_event",
        sa.Column("number", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("occurred_unix_ns", sa.BigInteger(), nullable=False),
        sa.Column("actor_key_id", sa.String(length=16), nullable=False),
        sa.Column("actor", sa.String(length=64), nullable=False),
        sa.Column("action", sa.String(length=64), nullable=False),
        sa.Column("target", sa.String(length=64), nullable=False),
        sa.Column("before", sa.Text(), nullable=False),
        sa.Column("after", sa.Text(), nullable=False),
        sa.Column("prev_hash", sa.String(length=64), nullable=False),
        sa.Column("hash", sa.String(length=64), nullable=False),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_audit_event")),
    )
