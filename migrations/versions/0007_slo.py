"""objectives, and what is counted against them

Revision ID: slo
Revises: usage_rollups
"""

import sqlalchemy as sa
from alembic import op

revision = "slo"
down_revision = "usage_rollups"
branch_labels = None
depends_on = None

_TABLES = ("slo_watch", "slo_incident", "refusal_minute", "latency_minute", "slo_minute", "slo_objective")


def upgrade() -> None:
    op.add_column("request_record", sa.Column("streamed", sa.Boolean(), nullable=False, server_default=sa.false()))
    op.add_column("request_record", sa.Column("num_choices", sa.BigInteger(), nullable=False, server_default="1"))
    _create_objective()
    _create_minutes()
    _create_alerts()


def downgrade() -> None:
    for table in _TABLES:
        op.drop_table(table)
    op.drop_column("request_record", "num_choices")
    op.drop_column("request_record", "streamed")


def _create_objective() -> None:
    op.create_table(
        "slo_objective",
        sa.Column("version_id", sa.String(length=28), nullable=False),
        *_place(),
        sa.Column("sli", sa.String(length=16), nullable=False),
        *_numbers("version", "effective_unix_ns", "threshold_ns", "target_ppm", "window_days"),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("description", sa.String(length=256), nullable=False),
        sa.Column("retired", sa.Boolean(), nullable=False),
        *_numbers("created_unix_ns"),
        sa.CheckConstraint("sli IN ('availability', 'ttft', 'tpot', 'e2e')", name=op.f("ck_slo_objective_sli")),
        sa.PrimaryKeyConstraint("version_id", name=op.f("pk_slo_objective")),
        sa.UniqueConstraint(
            *("tenant_id", "model", "flow_class", "sli", "version"),
            name=op.f("uq_slo_objective_tenant_id_model_flow_class_sli_version"),
        ),
    )


def _create_minutes() -> None:
    op.create_table(
        "slo_minute",
        *_place("minute_s"),
        sa.Column("sli", sa.String(length=16), nullable=False),
        sa.Column("version_id", sa.String(length=28), nullable=False),
        *_numbers("valid", "good"),
        _key("slo_minute", "sli", "version_id"),
    )
    op.create_table(
        "latency_minute",
        *_place("minute_s"),
        sa.Column("sums", sa.LargeBinary(), nullable=False),
        _key("latency_minute"),
    )
    op.create_table(
        "refusal_minute",
        sa.Column("tenant_id", sa.String(length=28), nullable=False),
        *_numbers("minute_s"),
        sa.Column("model", sa.String(length=80), nullable=False),
        sa.Column("base_model", sa.String(length=64), nullable=False),
        sa.Column("flow_class", sa.String(length=16), nullable=False),
        *_numbers("status"),
        sa.Column("reason", sa.String(length=32), nullable=False),
        sa.Column("process_id", sa.String(length=36), nullable=False),
        *_numbers("num_requests"),
        sa.PrimaryKeyConstraint(
            *("tenant_id", "minute_s", "model", "base_model", "flow_class", "status", "reason", "process_id"),
            name=op.f("pk_refusal_minute"),
        ),
    )


def _create_alerts() -> None:
    op.create_table(
        "slo_incident",
        sa.Column("incident_id", sa.String(length=36), nullable=False),
        *_place(),
        sa.Column("sli", sa.String(length=16), nullable=False),
        sa.Column("alert", sa.String(length=16), nullable=False),
        *_numbers("opened_s"),
        sa.Column("closed_s", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("incident_id", name=op.f("pk_slo_incident")),
    )
    op.create_index(op.f("ix_slo_incident_closed_s"), "slo_incident", ["closed_s"])
    op.create_index(op.f("ix_slo_incident_tenant_id_opened_s"), "slo_incident", ["tenant_id", "opened_s"])
    op.create_table(
        "slo_watch",
        sa.Column("watch_id", sa.BigInteger(), autoincrement=False, nullable=False),
        *_numbers("minute_s"),
        sa.PrimaryKeyConstraint("watch_id", name=op.f("pk_slo_watch")),
    )


def _place(*numbers: str) -> list[sa.Column]:
    return [
        sa.Column("tenant_id", sa.String(length=28), nullable=False),
        *_numbers(*numbers),
        sa.Column("model", sa.String(length=80), nullable=False),
        sa.Column("flow_class", sa.String(length=16), nullable=False),
    ]


def _numbers(*names: str) -> list[sa.Column]:
    return [sa.Column(name, sa.BigInteger(), nullable=False) for name in names]


def _key(table: str, *more: str) -> sa.PrimaryKeyConstraint:
    return sa.PrimaryKeyConstraint("tenant_id", "minute_s", "model", "flow_class", *more, name=op.f(f"pk_{table}"))
