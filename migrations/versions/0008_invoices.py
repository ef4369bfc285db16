"""create invoices and credit notes; what is in the books is never changed

Revision ID: invoices
Revises: slo
"""

import sqlalchemy as sa
from alembic import op

import tenants.tables
from migrations.append_only import drop_function, make_append_only, make_changeable

revision = "invoices"
down_revision = "slo"
branch_labels = None
depends_on = None

_APPEND_ONLY = (
    *("invoice", "invoice_line", "credit_note", "credit_note_line"),
    *("ledger_entry", "request_record", "unbooked_record", "rate_card", "rate_card_item", "audit_event"),
)


def upgrade() -> None:
    op.create_table(
        "document_series",
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("kind", name=op.f("pk_document_series")),
    )
    _create_invoice()
    _create_invoice_line()
    _create_credit_notes()
    make_append_only(*_APPEND_ONLY)


def downgrade() -> None:
    make_changeable(*_APPEND_ONLY)
    drop_function()
    for table in ("credit_note_line", "credit_note", "invoice_line", "invoice", "document_series"):
        op.drop_table(table)


def _create_invoice() -> None:
    op.create_table(
        "invoice",
        sa.Column("invoice_id", sa.String(length=28), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("tenant_id", sa.String(length=28), nullable=False),
        sa.Column("period", sa.String(length=10), nullable=False),
        sa.Column("start_unix_ns", sa.BigInteger(), nullable=False),
        sa.Column("end_unix_ns", sa.BigInteger(), nullable=False),
        sa.Column("issued_unix_ns", sa.BigInteger(), nullable=False),
        sa.Column("tenant_name", sa.String(length=64), nullable=False),
        sa.Column("time_zone", sa.String(length=64), nullable=False),
        sa.Column("issuer", sa.String(length=200), nullable=False),
        sa.Column("currency", sa.String(length=3), nullable=False),
        sa.Column("total_cents", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("invoice_id", name=op.f("pk_invoice")),
        sa.UniqueConstraint("number", name=op.f("uq_invoice_number")),
        sa.UniqueConstraint("tenant_id", "period", name=op.f("uq_invoice_tenant_id_period")),
    )


def _create_invoice_line() -> None:
    op.create_table(
        "invoice_line",
        sa.Column("invoice_id", sa.String(length=28), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("description", sa.String(length=200), nullable=False),
        sa.Column("model", sa.String(length=80), nullable=False),
        sa.Column("base_model", sa.String(length=64), nullable=False),
        sa.Column("flow_class", sa.String(length=16), nullable=False),
        sa.Column("meter", sa.String(length=32), nullable=False),
        sa.Column("rate_card_id", sa.String(length=28), nullable=False),
        sa.Column("reference", sa.String(length=28), nullable=False),
        sa.Column("start_unix_ns", sa.BigInteger(), nullable=False),
        sa.Column("end_unix_ns", sa.BigInteger(), nullable=False),
        sa.Column("quantity", tenants.tables.WideInteger(), nullable=False),
        sa.Column("unit_price_picousd", tenants.tables.Picousd(), nullable=False),
        sa.Column("amount_picousd", tenants.tables.WideInteger(), nullable=False),
        sa.Column("amount_cents", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("kind IN ('usage', 'correction', 'credit', 'rounding')", name=op.f("ck_invoice_line_kind")),
        sa.ForeignKeyConstraint(["invoice_id"], ["invoice.invoice_id"], name=op.f("fk_invoice_line_invoice_id")),
        sa.PrimaryKeyConstraint("invoice_id", "number", name=op.f("pk_invoice_line")),
    )
    op.create_index(op.f("ix_invoice_line_reference"), "invoice_line", ["reference"])


def _create_credit_notes() -> None:
    op.create_table(
        "credit_note",
        sa.Column("credit_note_id", sa.String(length=28), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("invoice_id", sa.String(length=28), nullable=False),
        sa.Column("tenant_id", sa.String(length=28), nullable=False),
        sa.Column("reason", sa.String(length=200), nullable=False),
        sa.Column("issued_unix_ns", sa.BigInteger(), nullable=False),
        sa.Column("currency", sa.String(length=3), nullable=False),
        sa.Column("total_cents", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["invoice_id"], ["invoice.invoice_id"], name=op.f("fk_credit_note_invoice_id")),
        sa.PrimaryKeyConstraint("credit_note_id", name=op.f("pk_credit_note")),
        sa.UniqueConstraint("number", name=op.f("uq_credit_note_number")),
    )
    op.create_index(op.f("ix_credit_note_invoice_id"), "credit_note", ["invoice_id"])
    op.create_index(op.f("ix_credit_note_tenant_id"), "credit_note", ["tenant_id"])
    op.create_table(
        "credit_note_line",
        sa.Column("credit_note_id", sa.String(length=28), nullable=False),
        sa.Column("invoice_line", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("amount_cents", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["credit_note_id"], ["credit_note.credit_note_id"], name=op.f("fk_credit_note_line_credit_note_id")
        ),
        sa.PrimaryKeyConstraint("credit_note_id", "invoice_line", name=op.f("pk_credit_note_line")),
    )
