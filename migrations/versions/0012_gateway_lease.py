"""create the table of gateways that may hold reservations

Revision ID: gateway_lease
Revises: adapter_hours
"""

import sqlalchemy as sa
from alembic import op

revision = "gateway_lease"
down_revision = "adapter_hours"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "gateway_lease",
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("until_unix_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_gateway_lease")),
    )


def downgrade() -> None:
    op.drop_table("gateway_lease")
