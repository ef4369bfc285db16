"""PostgreSQL refuses to empty at one stroke what it refuses to delete row by row; SQLite has no TRUNCATE

Revision ID: no_truncate
Revises: invoice_payment
"""

from alembic import op

from migrations.append_only import make_emptiable, make_unemptiable

revision = "no_truncate"
down_revision = "invoice_payment"
branch_labels = None
depends_on = None

_BOOKS = (
    *("invoice", "invoice_line", "invoice_payment", "credit_note", "credit_note_line"),
    *("ledger_entry", "request_record", "unbooked_record", "rate_card", "rate_card_item", "audit_event"),
    *("wallet_grant", "replica_time", "replica_hour"),
)


def upgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        make_unemptiable(*_BOOKS)


def downgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        make_emptiable(*_BOOKS)
