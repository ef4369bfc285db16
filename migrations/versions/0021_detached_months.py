"""what is kept of months whose receipts and charges were detached

Revision ID: detached_months
Revises: billing_anchor_day
"""

import sqlalchemy as sa
from alembic import op

import tenants.tables
from migrations.append_only import make_append_only, make_changeable, make_emptiable, make_unemptiable

revision = "detached_months"
down_revision = "billing_anchor_day"
branch_labels = None
depends_on = None

_TABLES = ("detached_month", "detached_sum")
_KEY = (
    *(("month", 7), ("kind", 16), ("owner", 28), ("model", 80), ("base_model", 64), ("flow_class", 16)),
    *(("meter", 32), ("rate_card_id", 28)),
)


def upgrade() -> None:
    op.create_table(
        "detached_month",
        *(sa.Column(name, sa.String(length=size), nullable=False) for name, size in (("month", 7), ("first_id", 36))),
        sa.Column("end_id", sa.String(length=36), nullable=False),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in ("num_records", "num_entries")),
        sa.Column("detached_unix_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("month", name=op.f("pk_detached_month")),
    )
    op.create_table(
        "detached_sum",
        *(sa.Column(name, sa.String(length=size), nullable=False) for name, size in _KEY),
        sa.Column("unit_price_picousd", sa.BigInteger(), nullable=False),
        *(sa.Column(name, tenants.tables.WideInteger(), nullable=False) for name in ("quantity", "amount_picousd")),
        sa.CheckConstraint("kind IN ('charge', 'debit', 'written')", name=op.f("ck_detached_sum_kind")),
        sa.ForeignKeyConstraint(["month"], ["detached_month.month"], name=op.f("fk_detached_sum_month")),
        sa.PrimaryKeyConstraint(*(name for name, _ in _KEY), "unit_price_picousd", name=op.f("pk_detached_sum")),
    )
    make_append_only(*_TABLES)
    if op.get_bind().dialect.name == "postgresql":
        make_unemptiable(*_TABLES)


def downgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        make_emptiable(*_TABLES)
    make_changeable(*_TABLES)
    for table in reversed(_TABLES):
        op.drop_table(table)
