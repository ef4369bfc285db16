"""what an operator's billing system calls a tenant

Revision ID: billing_reference
Revises: costly_records
"""

import sqlalchemy as sa
from alembic import op

revision = "billing_reference"
down_revision = "costly_records"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("tenant", sa.Column("billing_reference", sa.String(length=64), nullable=True))


def downgrade() -> None:
    op.drop_column("tenant", "billing_reference")
