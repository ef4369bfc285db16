"""create the table of records that can't be booked

Revision ID: unbooked_records
Revises: events
"""

import sqlalchemy as sa
from alembic import op

revision = "unbooked_records"
down_revision = "events"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "unbooked_record",
        sa.Column("request_id", sa.String(length=36), nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("tenant_id", sa.String(length=28), nullable=False),
        sa.Column("reason", sa.String(length=32), nullable=False),
        sa.Column("record", sa.Text(), nullable=False),
        sa.Column("set_aside_unix_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("request_id", "attempt", name=op.f("pk_unbooked_record")),
    )


def downgrade() -> None:
    op.drop_table("unbooked_record")
