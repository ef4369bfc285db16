"""create the meters of adapters

Revision ID: adapter_hours
Revises: webhooks
"""

import sqlalchemy as sa
from alembic import op

revision = "adapter_hours"
down_revision = "webhooks"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "adapter_meter_head",
        sa.Column("head_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("hour", sa.BigInteger(), nullable=False),
        sa.Column("looked_unix_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("head_id", name=op.f("pk_adapter_meter_head")),
    )
    op.create_table(
        "adapter_residency",
        sa.Column("adapter_version_id", sa.String(length=28), nullable=False),
        sa.Column("hour", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("resident_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("adapter_version_id", "hour", name=op.f("pk_adapter_residency")),
    )


def downgrade() -> None:
    op.drop_table("adapter_residency")
    op.drop_table("adapter_meter_head")
