"""create the table of events

Revision ID: events
Revises: keys_and_audit
"""

import sqlalchemy as sa
from alembic import op

revision = "events"
down_revision = "keys_and_audit"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "event",
        sa.Column("event_id", sa.String(length=28), nullable=False),
        sa.Column("tenant_id", sa.String(length=28), nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("data", sa.Text(), nullable=False),
        sa.Column("endpoint_id", sa.String(length=28), nullable=False),
        sa.Column("occurred_unix_ns", sa.BigInteger(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("event_id", name=op.f("pk_event")),
    )
    op.create_index(op.f("ix_event_number"), "event", ["number"], unique=True)
    op.create_index(op.f("ix_event_tenant_id_number"), "event", ["tenant_id", "number"])


def downgrade() -> None:
    op.drop_table("event")
