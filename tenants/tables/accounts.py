"""Tenants and keys."""

from typing import Any

from sqlalchemy import BigInteger, LargeBinary
from sqlmodel import Field, SQLModel

from tenants.tables.types import MAX_NAME_LENGTH, JsonList, Picousd, StringList, one_of

DEFAULT_ALERTS = (50, 80, 100)  # percent of a limit, or of credit


class Tenant(SQLModel, table=True):
    """A customer and its limits; None = no limit. A deleted one stays as a row without a name: the ledger has it."""

    __tablename__ = "tenant"  # pyright: ignore[reportAssignmentType]
    __table_args__ = (
        one_of("status", "active", "suspended"),
        one_of("max_class", "interactive", "standard", "batch"),
        one_of("cache_policy", "private", "shared", "off"),
    )

    tenant_id: str = Field(primary_key=True, max_length=28)
    name: str = Field(max_length=MAX_NAME_LENGTH, unique=True)
    status: str = Field(default="active", max_length=16)
    time_zone: str = Field(default="UTC", max_length=64)
    billing_anchor_day: int = Field(default=1, sa_type=BigInteger)
    billing_reference: str | None = Field(default=None, max_length=64)
    created_unix_ns: int = Field(sa_type=BigInteger)
    changed_unix_ns: int = Field(sa_type=BigInteger, index=True)
    deleted_unix_ns: int | None = Field(default=None, sa_type=BigInteger)
    requests_per_minute: int | None = Field(default=None, sa_type=BigInteger)
    tokens_per_minute: int | None = Field(default=None, sa_type=BigInteger)
    concurrent_requests: int | None = Field(default=None, sa_type=BigInteger)
    spend_limit_picousd_per_month: int | None = Field(default=None, sa_type=Picousd)
    default_output_tokens: int = Field(default=1024, sa_type=BigInteger)
    max_adapters: int = Field(default=100, sa_type=BigInteger)
    max_adapter_rank: int = Field(default=64, sa_type=BigInteger)
    max_adapter_bytes: int = Field(default=512 << 20, sa_type=BigInteger)
    max_storage_bytes: int = Field(default=10 << 30, sa_type=BigInteger)
    max_class: str = Field(default="interactive", max_length=16)
    weight: int = Field(default=1, sa_type=BigInteger)
    cache_policy: str = Field(default="private", max_length=16)
    is_prepaid: bool = False
    spend_alerts: list[int] = Field(default_factory=lambda: list(DEFAULT_ALERTS), sa_type=JsonList)


class ApiKey(SQLModel, table=True):
    """A tenant's key: only the HMAC of its text, made with the pepper of that number. Its limits apply beside the
    tenant's; ``scoped_limits`` are those for one model or adapter."""

    __tablename__ = "api_key"  # pyright: ignore[reportAssignmentType]
    __table_args__ = (one_of("flow_class", "interactive", "standard", "batch"),)

    key_id: str = Field(primary_key=True, max_length=16)
    tenant_id: str = Field(foreign_key="tenant.tenant_id", index=True, max_length=28)
    digest: bytes = Field(sa_type=LargeBinary)
    name: str = Field(default="", max_length=MAX_NAME_LENGTH)
    last4: str = Field(max_length=4)
    flow_class: str = Field(default="standard", max_length=16)
    scopes: list[str] = Field(sa_type=StringList)
    scoped_limits: list[dict[str, Any]] = Field(default_factory=list, sa_type=JsonList)
    pepper: int = Field(default=1, sa_type=BigInteger)
    is_demo: bool = False
    created_unix_ns: int = Field(sa_type=BigInteger)
    changed_unix_ns: int = Field(sa_type=BigInteger, index=True)
    expires_unix_ns: int | None = Field(default=None, sa_type=BigInteger)
    revoked_unix_ns: int | None = Field(default=None, sa_type=BigInteger)
    requests_per_minute: int | None = Field(default=None, sa_type=BigInteger)
    tokens_per_minute: int | None = Field(default=None, sa_type=BigInteger)
    concurrent_requests: int | None = Field(default=None, sa_type=BigInteger)
    spend_limit_picousd_per_month: int | None = Field(default=None, sa_type=Picousd)


class OperatorKey(SQLModel, table=True):
    """A named key of the ops port. ``scopes`` ⊆ {read, billing, admin}."""

    __tablename__ = "operator_key"  # pyright: ignore[reportAssignmentType]

    key_id: str = Field(primary_key=True, max_length=16)
    digest: bytes = Field(sa_type=LargeBinary)
    name: str = Field(max_length=MAX_NAME_LENGTH)
    last4: str = Field(max_length=4)
    scopes: list[str] = Field(sa_type=StringList)
    pepper: int = Field(default=1, sa_type=BigInteger)
    created_unix_ns: int = Field(sa_type=BigInteger)
    changed_unix_ns: int = Field(sa_type=BigInteger, index=True)
    expires_unix_ns: int | None = Field(default=None, sa_type=BigInteger)
    revoked_unix_ns: int | None = Field(default=None, sa_type=BigInteger)
