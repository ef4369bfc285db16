"""find the records whose cost the rollups don't tell

Revision ID: costly_records
Revises: wallet
"""

import sqlalchemy as sa
from alembic import op

revision = "costly_records"
down_revision = "wallet"
branch_labels = None
depends_on = None


def upgrade() -> None:
    where = sa.text("outcome = 0 OR load_ns > 0")
    op.create_index(
        "ix_request_record_costly",
        "request_record",
        ["finished_unix_ns"],
        sqlite_where=where,
        postgresql_where=where,
    )


def downgrade() -> None:
    op.drop_index("ix_request_record_costly", "request_record")
