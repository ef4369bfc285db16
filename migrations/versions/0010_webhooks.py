"""create the tables of webhooks

Revision ID: webhooks
Revises: replica_time
"""

import sqlalchemy as sa
from alembic import op

import tenants.tables

revision = "webhooks"
down_revision = "replica_time"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "webhook_endpoint",
        sa.Column("endpoint_id", sa.String(length=28), nullable=False),
        sa.Column("tenant_id", sa.String(length=28), nullable=False),
        sa.Column("url", sa.String(length=2048), nullable=False),
        sa.Column("description", sa.String(length=64), nullable=False),
        sa.Column("kinds", tenants.tables.StringList(), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("secret_name", sa.String(length=64), nullable=False),
        sa.Column("old_secret_name", sa.String(length=64), nullable=False),
        sa.Column("old_secret_until_unix_ns", sa.BigInteger(), nullable=False),
        sa.Column("created_unix_ns", sa.BigInteger(), nullable=False),
        sa.Column("failing_since_unix_ns", sa.BigInteger(), nullable=True),
        sa.CheckConstraint(
            "status IN ('enabled', 'disabled', 'gone', 'failing')", name=op.f("ck_webhook_endpoint_status")
        ),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenant.tenant_id"], name=op.f("fk_webhook_endpoint_tenant_id")),
        sa.PrimaryKeyConstraint("endpoint_id", name=op.f("pk_webhook_endpoint")),
    )
    op.create_index(op.f("ix_webhook_endpoint_tenant_id"), "webhook_endpoint", ["tenant_id"])
    _create_delivery()


def downgrade() -> None:
    op.drop_table("webhook_delivery")
    op.drop_table("webhook_endpoint")


def _create_delivery() -> None:
    op.create_table(
        "webhook_delivery",
        sa.Column("event_id", sa.String(length=28), nullable=False),
        sa.Column("endpoint_id", sa.String(length=28), nullable=False),
        sa.Column("tenant_id", sa.String(length=28), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("attempts", sa.BigInteger(), nullable=False),
        sa.Column("due_unix_ns", sa.BigInteger(), nullable=False),
        sa.Column("last_status", sa.BigInteger(), nullable=False),
        sa.Column("last_error", sa.String(length=32), nullable=False),
        sa.CheckConstraint("state IN ('pending', 'delivered', 'failed')", name=op.f("ck_webhook_delivery_state")),
        sa.ForeignKeyConstraint(["event_id"], ["event.event_id"], name=op.f("fk_webhook_delivery_event_id")),
        sa.ForeignKeyConstraint(
            ["endpoint_id"], ["webhook_endpoint.endpoint_id"], name=op.f("fk_webhook_delivery_endpoint_id")
        ),
        sa.PrimaryKeyConstraint("event_id", "endpoint_id", name=op.f("pk_webhook_delivery")),
    )
    op.create_index(op.f("ix_webhook_delivery_state_due_unix_ns"), "webhook_delivery", ["state", "due_unix_ns"])
    op.create_index(op.f("ix_webhook_delivery_endpoint_id_number"), "webhook_delivery", ["endpoint_id", "number"])
