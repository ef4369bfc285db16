"""create tables

Revision ID: 0001
Revises:
"""

import sqlalchemy as sa
from alembic import op

import tenants.tables

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    _create_tenant()
    _create_api_key()
    _create_operator_key()
    _create_adapter_version()
    _create_adapter_alias()
    _create_rate_card()
    _create_rate_card_item()
    _create_request_record()
    _create_ledger_entry()


def downgrade() -> None:
    op.drop_table("ledger_entry")
    op.drop_table("request_record")
    op.drop_table("rate_card_item")
    op.drop_table("rate_card")
    op.drop_table("adapter_alias")
    op.drop_table("adapter_version")
    op.drop_table("operator_key")
    op.drop_table("api_key")
    op.drop_table("tenant")


def _create_tenant() -> None:
    op.create_table(
        "tenant",
        sa.Column("tenant_id", sa.String(length=28), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("time_zone", sa.String(length=64), nullable=False),
        sa.Column("created_unix_ns", sa.BigInteger(), nullable=False),
        sa.Column("changed_unix_ns", sa.BigInteger(), nullable=False),
        sa.Column("requests_per_minute", sa.BigInteger(), nullable=True),
        sa.Column("tokens_per_minute", sa.BigInteger(), nullable=True),
        sa.Column("concurrent_requests", sa.BigInteger(), nullable=True),
        sa.Column("spend_limit_picousd_per_month", tenants.tables.Picousd(), nullable=True),
        sa.Column("default_output_tokens", sa.BigInteger(), nullable=False),
        sa.Column("max_adapters", sa.BigInteger(), nullable=False),
        sa.Column("max_adapter_rank", sa.BigInteger(), nullable=False),
        sa.Column("max_adapter_bytes", sa.BigInteger(), nullable=False),
        sa.Column("max_storage_bytes", sa.BigInteger(), nullable=False),
        sa.Column("max_class", sa.String(length=16), nullable=False),
        sa.Column("weight", sa.BigInteger(), nullable=False),
        sa.Column("cache_policy", sa.String(length=16), nullable=False),
        sa.CheckConstraint("cache_policy IN ('private', 'shared', 'off')", name=op.f("ck_tenant_cache_policy")),
        sa.CheckConstraint("max_class IN ('interactive', 'standard', 'batch')", name=op.f("ck_tenant_max_class")),
        sa.CheckConstraint("status IN ('active', 'suspended')", name=op.f("ck_tenant_status")),
        sa.PrimaryKeyConstraint("tenant_id", name=op.f("pk_tenant")),
        sa.UniqueConstraint("name", name=op.f("uq_tenant_name")),
    )
    op.create_index(op.f("ix_tenant_changed_unix_ns"), "tenant", ["changed_unix_ns"])


def _create_api_key() -> None:
    op.create_table(
        "api_key",
        sa.Column("key_id", sa.String(length=16), nullable=False),
        sa.Column("tenant_id", sa.String(length=28), nullable=False),
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("last4", sa.String(length=4), nullable=False),
        sa.Column("flow_class", sa.String(length=16), nullable=False),
        sa.Column("created_unix_ns", sa.BigInteger(), nullable=False),
        sa.Column("changed_unix_ns", sa.BigInteger(), nullable=False),
        sa.Column("expires_unix_ns", sa.BigInteger(), nullable=True),
        sa.Column("revoked_unix_ns", sa.BigInteger(), nullable=True),
        sa.Column("requests_per_minute", sa.BigInteger(), nullable=True),
        sa.Column("tokens_per_minute", sa.BigInteger(), nullable=True),
        sa.Column("concurrent_requests", sa.BigInteger(), nullable=True),
        sa.Column("spend_limit_picousd_per_month", tenants.tables.Picousd(), nullable=True),
        sa.CheckConstraint("flow_class IN ('interactive', 'standard', 'batch')", name=op.f("ck_api_key_flow_class")),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenant.tenant_id"], name=op.f("fk_api_key_tenant_id")),
        sa.PrimaryKeyConstraint("key_id", name=op.f("pk_api_key")),
    )
    op.create_index(op.f("ix_api_key_changed_unix_ns"), "api_key", ["changed_unix_ns"])
    op.create_index(op.f("ix_api_key_tenant_id"), "api_key", ["tenant_id"])


def _create_operator_key() -> None:
    op.create_table(
        "operator_key",
        sa.Column("key_id", sa.String(length=16), nullable=False),
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("last4", sa.String(length=4), nullable=False),
        sa.Column("scopes", tenants.tables.StringList(), nullable=False),
        sa.Column("created_unix_ns", sa.BigInteger(), nullable=False),
        sa.Column("changed_unix_ns", sa.BigInteger(), nullable=False),
        sa.Column("expires_unix_ns", sa.BigInteger(), nullable=True),
        sa.Column("revoked_unix_ns", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("key_id", name=op.f("pk_operator_key")),
    )
    op.create_index(op.f("ix_operator_key_changed_unix_ns"), "operator_key", ["changed_unix_ns"])


def _create_adapter_version() -> None:
    op.create_table(
        "adapter_version",
        sa.Column("adapter_version_id", sa.String(length=28), nullable=False),
        sa.Column("tenant_id", sa.String(length=28), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("base_model", sa.String(length=64), nullable=False),
        sa.Column("lora_rank", sa.BigInteger(), nullable=False),
        sa.Column("target_modules", tenants.tables.StringList(), nullable=False),
        sa.Column("num_pairs", sa.BigInteger(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("warnings", tenants.tables.StringList(), nullable=False),
        sa.Column("created_unix_ns", sa.BigInteger(), nullable=False),
        sa.Column("deleted_unix_ns", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenant.tenant_id"], name=op.f("fk_adapter_version_tenant_id")),
        sa.PrimaryKeyConstraint("adapter_version_id", name=op.f("pk_adapter_version")),
        sa.UniqueConstraint("tenant_id", "name", "version", name=op.f("uq_adapter_version_tenant_id_name_version")),
    )
    op.create_index(op.f("ix_adapter_version_tenant_id_sha256"), "adapter_version", ["tenant_id", "sha256"])


def _create_adapter_alias() -> None:
    op.create_table(
        "adapter_alias",
        sa.Column("tenant_id", sa.String(length=28), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("changed_unix_ns", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant_id", "name", "version"],
            ["adapter_version.tenant_id", "adapter_version.name", "adapter_version.version"],
            name=op.f("fk_adapter_alias_tenant_id_name_version"),
        ),
        sa.PrimaryKeyConstraint("tenant_id", "name", name=op.f("pk_adapter_alias")),
    )


def _create_rate_card() -> None:
    op.create_table(
        "rate_card",
        sa.Column("rate_card_id", sa.String(length=28), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("effective_unix_ns", sa.BigInteger(), nullable=False),
        sa.Column("currency", sa.String(length=3), nullable=False),
        sa.Column("created_unix_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("rate_card_id", name=op.f("pk_rate_card")),
        sa.UniqueConstraint("version", name=op.f("uq_rate_card_version")),
    )


def _create_rate_card_item() -> None:
    op.create_table(
        "rate_card_item",
        sa.Column("rate_card_id", sa.String(length=28), nullable=False),
        sa.Column("meter", sa.String(length=32), nullable=False),
        sa.Column("model", sa.String(length=64), nullable=False),
        sa.Column("flow_class", sa.String(length=16), nullable=False),
        sa.Column("price_picousd", tenants.tables.Picousd(), nullable=False),
        sa.ForeignKeyConstraint(
            ["rate_card_id"], ["rate_card.rate_card_id"], name=op.f("fk_rate_card_item_rate_card_id")
        ),
        sa.PrimaryKeyConstraint("rate_card_id", "meter", "model", "flow_class", name=op.f("pk_rate_card_item")),
    )


def _create_request_record() -> None:
    op.create_table(
        "request_record",
        sa.Column("request_id", sa.String(length=36), nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("tenant_id", sa.String(length=28), nullable=False),
        sa.Column("key_id", sa.String(length=16), nullable=False),
        sa.Column("operation", sa.String(length=16), nullable=False),
        sa.Column("model", sa.String(length=80), nullable=False),
        sa.Column("base_model", sa.String(length=64), nullable=False),
        sa.Column("adapter_version_id", sa.String(length=28), nullable=False),
        sa.Column("flow_class", sa.String(length=16), nullable=False),
        sa.Column("rate_card_id", sa.String(length=28), nullable=False),
        sa.Column("outcome", sa.BigInteger(), nullable=False),
        sa.Column("billed", sa.Boolean(), nullable=False),
        sa.Column("price_picousd", tenants.tables.Picousd(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("output_tokens", sa.BigInteger(), nullable=False),
        sa.Column("queue_ns", sa.BigInteger(), nullable=False),
        sa.Column("prefill_ns", sa.BigInteger(), nullable=False),
        sa.Column("decode_ns", sa.BigInteger(), nullable=False),
        sa.Column("post_ns", sa.BigInteger(), nullable=False),
        sa.Column("network_ns", sa.BigInteger(), nullable=False),
        sa.Column("first_token_ns", sa.BigInteger(), nullable=False),
        sa.Column("gpu_ns", sa.BigInteger(), nullable=False),
        sa.Column("admitted_unix_ns", sa.BigInteger(), nullable=False),
        sa.Column("finished_unix_ns", sa.BigInteger(), nullable=False),
        sa.Column("trace_id", sa.String(length=32), nullable=False),
        sa.Column("label", sa.String(length=128), nullable=False),
        sa.PrimaryKeyConstraint("request_id", "attempt", name=op.f("pk_request_record")),
    )
    op.create_index(
        op.f("ix_request_record_tenant_id_finished_unix_ns"), "request_record", ["tenant_id", "finished_unix_ns"]
    )


def _create_ledger_entry() -> None:
    op.create_table(
        "ledger_entry",
        sa.Column("entry_id", sa.String(length=36), nullable=False),
        sa.Column("request_id", sa.String(length=36), nullable=False),
        sa.Column("tenant_id", sa.String(length=28), nullable=False),
        sa.Column("key_id", sa.String(length=16), nullable=False),
        sa.Column("meter", sa.String(length=32), nullable=False),
        sa.Column("model", sa.String(length=80), nullable=False),
        sa.Column("base_model", sa.String(length=64), nullable=False),
        sa.Column("flow_class", sa.String(length=16), nullable=False),
        sa.Column("rate_card_id", sa.String(length=28), nullable=False),
        sa.Column("quantity", sa.BigInteger(), nullable=False),
        sa.Column("unit_price_picousd", tenants.tables.Picousd(), nullable=False),
        sa.Column("amount_picousd", tenants.tables.Picousd(), nullable=False),
        sa.Column("occurred_unix_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("entry_id", name=op.f("pk_ledger_entry")),
    )
    op.create_index(op.f("ix_ledger_entry_request_id"), "ledger_entry", ["request_id"])
    op.create_index(
        op.f("ix_ledger_entry_tenant_id_occurred_unix_ns"), "ledger_entry", ["tenant_id", "occurred_unix_ns"]
    )
