"""prepaid credit, totals of months with a limit, alerts

Revision ID: wallet
Revises: gateway_lease
"""

import sqlalchemy as sa
from alembic import op

import tenants.tables
from migrations.append_only import make_append_only, make_changeable

revision = "wallet"
down_revision = "gateway_lease"
branch_labels = None
depends_on = None


def upgrade() -> None:
    alerts = sa.Column("spend_alerts", tenants.tables.JsonList(), server_default="[50, 80, 100]", nullable=False)
    prepaid = sa.Column("is_prepaid", sa.Boolean(), server_default=sa.false(), nullable=False)
    for column in (prepaid, alerts):
        op.add_column("tenant", column)
    _create_wallet()
    _create_wallet_hold()
    make_append_only("wallet_grant")
    op.create_table(
        "spend_total",
        sa.Column("tenant_id", sa.String(length=28), nullable=False),
        sa.Column("period", sa.String(length=10), nullable=False),
        sa.Column("stamp", sa.BigInteger(), nullable=False),
        sa.Column("picousd", tenants.tables.WideInteger(), server_default="0", nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", "period", name=op.f("pk_spend_total")),
    )


def downgrade() -> None:
    make_changeable("wallet_grant")
    for table in ("spend_total", "wallet_hold", "wallet_grant", "wallet"):
        op.drop_table(table)
    for column in ("spend_alerts", "is_prepaid"):
        op.drop_column("tenant", column)


def _create_wallet() -> None:
    op.create_table(
        "wallet",
        sa.Column("tenant_id", sa.String(length=28), nullable=False),
        sa.Column("granted_picousd", tenants.tables.Picousd(), nullable=False),
        sa.Column("reserved_picousd", tenants.tables.Picousd(), nullable=False),
        sa.Column("spent_picousd", tenants.tables.Picousd(), nullable=False),
        sa.Column("num_grants", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("granted_picousd >= 0", name=op.f("ck_wallet_granted")),
        sa.CheckConstraint("reserved_picousd >= 0", name=op.f("ck_wallet_reserved")),
        sa.CheckConstraint("spent_picousd >= 0", name=op.f("ck_wallet_spent")),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenant.tenant_id"], name=op.f("fk_wallet_tenant_id")),
        sa.PrimaryKeyConstraint("tenant_id", name=op.f("pk_wallet")),
    )
    op.create_table(
        "wallet_grant",
        sa.Column("tenant_id", sa.String(length=28), nullable=False),
        sa.Column("reference", sa.String(length=128), nullable=False),
        sa.Column("amount_picousd", tenants.tables.Picousd(), nullable=False),
        sa.Column("created_unix_ns", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenant.tenant_id"], name=op.f("fk_wallet_grant_tenant_id")),
        sa.PrimaryKeyConstraint("tenant_id", "reference", name=op.f("pk_wallet_grant")),
    )


def _create_wallet_hold() -> None:
    op.create_table(
        "wallet_hold",
        sa.Column("request_id", sa.String(length=36), nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("tenant_id", sa.String(length=28), nullable=False),
        sa.Column("gateway", sa.String(length=128), nullable=False),
        sa.Column("amount_picousd", tenants.tables.Picousd(), nullable=False),
        sa.Column("spent_picousd", tenants.tables.Picousd(), nullable=True),
        sa.Column("created_unix_ns", sa.BigInteger(), nullable=False),
        sa.Column("resolved_unix_ns", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("request_id", "attempt", name=op.f("pk_wallet_hold")),
    )
    op.create_index("ix_wallet_hold_open", "wallet_hold", ["gateway", "created_unix_ns"])
