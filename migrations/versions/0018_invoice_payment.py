"""what of an invoice was paid from prepaid credit

Revision ID: invoice_payment
Revises: service_sums
"""

import sqlalchemy as sa
from alembic import op

import tenants.tables
from migrations.append_only import make_append_only, make_changeable

revision = "invoice_payment"
down_revision = "service_sums"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("invoice", sa.Column("paid_cents", sa.BigInteger(), server_default="0", nullable=False))
    invoice, month = [
        sa.ForeignKeyConstraint([name], ["invoice.invoice_id"], name=op.f(f"fk_invoice_payment_{name}"))
        for name in ("invoice_id", "month_of")
    ]
    op.create_table(
        "invoice_payment",
        sa.Column("invoice_id", sa.String(length=28), nullable=False),
        sa.Column("month_of", sa.String(length=28), nullable=False),
        sa.Column("amount_picousd", tenants.tables.WideInteger(), nullable=False),
        invoice,
        month,
        sa.PrimaryKeyConstraint("invoice_id", "month_of", name=op.f("pk_invoice_payment")),
    )
    op.create_index(op.f("ix_invoice_payment_month_of"), "invoice_payment", ["month_of"])
    make_append_only("invoice_payment")


def downgrade() -> None:
    make_changeable("invoice_payment")
    op.drop_table("invoice_payment")
    op.drop_column("invoice", "paid_cents")
