"""the day of the month on which a tenant's billing months begin

Revision ID: billing_anchor_day
Revises: no_truncate
"""

import sqlalchemy as sa
from alembic import op

revision = "billing_anchor_day"
down_revision = "no_truncate"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("tenant", sa.Column("billing_anchor_day", sa.BigInteger(), server_default="1", nullable=False))


def downgrade() -> None:
    op.drop_column("tenant", "billing_anchor_day")
