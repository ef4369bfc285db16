"""create the table of idempotent requests

Revision ID: idempotency
Revises: 0001
"""

import sqlalchemy as sa
from alembic import op

revision = "idempotency"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "idempotent_request",
        sa.Column("tenant_id", sa.String(length=28), nullable=False),
        sa.Column("key_hash", sa.String(length=64), nullable=False),
        sa.Column("body_hash", sa.LargeBinary(), nullable=False),
        sa.Column("request_id", sa.String(length=36), nullable=False),
        sa.Column("lease_unix_ns", sa.BigInteger(), nullable=False),
        sa.Column("finished_unix_ns", sa.BigInteger(), nullable=True),
        sa.Column("answer", sa.LargeBinary(), nullable=True),
        sa.Column("keep_until_unix_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", "key_hash", name=op.f("pk_idempotent_request")),
    )
    op.create_index(op.f("ix_idempotent_request_keep_until_unix_ns"), "idempotent_request", ["keep_until_unix_ns"])


def downgrade() -> None:
    op.drop_table("idempotent_request")
