"""The tables. Times are BIGINT nanoseconds since 1970 UTC, money is BIGINT picousd: integers that SQLite and
PostgreSQL keep alike. Nothing here is bound to a request body: table models don't validate."""

from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    ForeignKeyConstraint,
    Index,
    LargeBinary,
    Text,
    UniqueConstraint,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.engine import Dialect
from sqlalchemy.types import TypeDecorator, TypeEngine
from sqlmodel import Field, SQLModel

MAX_NAME_LENGTH = 64

metadata = SQLModel.metadata
metadata.naming_convention = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s",
    "pk": "pk_%(table_name)s",
}


class JsonList(TypeDecorator[list[Any]]):
    """A list: JSONB on PostgreSQL, JSON text on SQLite. Replace the list; a change in place is not seen."""

    impl = JSON
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        return dialect.type_descriptor(JSONB() if dialect.name == "postgresql" else JSON())


class StringList(JsonList):
    """A list of strings."""

    cache_ok = True


class Picousd(TypeDecorator[int]):
    """10⁻¹² USD in a BIGINT. Refuses what is no int (a float would lose money) or does not fit."""

    impl = BigInteger
    cache_ok = True

    def process_bind_param(self, value: int | None, dialect: Dialect) -> int | None:
        if value is not None and type(value) is not int:
            raise TypeError(f"money is int, not {type(value).__name__}")
        if value is not None and not -(1 << 63) <= value < 1 << 63:
            raise OverflowError("a row's amount fits BIGINT")
        return value


def _one_of(column: str, *values: str) -> CheckConstraint:
    listed = ", ".join(f"'{value}'" for value in values)
    return CheckConstraint(f"{column} IN ({listed})", name=column)


class Tenant(SQLModel, table=True):
    """A customer and its limits; None = no limit. A deleted one stays as a row without a name: the ledger has it."""

    __tablename__ = "tenant"  # pyright: ignore[reportAssignmentType]
    __table_args__ = (
        _one_of("status", "active", "suspended"),
        _one_of("max_class", "interactive", "standard", "batch"),
        _one_of("cache_policy", "private", "shared", "off"),
    )

    tenant_id: str = Field(primary_key=True, max_length=28)
    name: str = Field(max_length=MAX_NAME_LENGTH, unique=True)
    status: str = Field(default="active", max_length=16)
    time_zone: str = Field(default="UTC", max_length=64)
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


class ApiKey(SQLModel, table=True):
    """A tenant's key: only the HMAC of its text, made with the pepper of that number. Its limits apply beside the
    tenant's; ``scoped_limits`` are those for one model or adapter."""

    __tablename__ = "api_key"  # pyright: ignore[reportAssignmentType]
    __table_args__ = (_one_of("flow_class", "interactive", "standard", "batch"),)

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


class AdapterVersion(SQLModel, table=True):
    """Immutable but for its deletion. Identity is (tenant_id, sha256); the number is its place under a name."""

    __tablename__ = "adapter_version"  # pyright: ignore[reportAssignmentType]
    __table_args__ = (UniqueConstraint("tenant_id", "name", "version"), Index(None, "tenant_id", "sha256"))

    adapter_version_id: str = Field(primary_key=True, max_length=28)
    tenant_id: str = Field(foreign_key="tenant.tenant_id", max_length=28)
    name: str = Field(max_length=MAX_NAME_LENGTH)
    version: int = Field(sa_type=BigInteger)
    sha256: str = Field(max_length=64)
    base_model: str = Field(max_length=MAX_NAME_LENGTH)
    lora_rank: int = Field(sa_type=BigInteger)
    target_modules: list[str] = Field(sa_type=StringList)
    num_pairs: int = Field(sa_type=BigInteger)
    size_bytes: int = Field(sa_type=BigInteger)
    warnings: list[str] = Field(sa_type=StringList)
    created_unix_ns: int = Field(sa_type=BigInteger)
    deleted_unix_ns: int | None = Field(default=None, sa_type=BigInteger)


class AdapterAlias(SQLModel, table=True):
    """What a name means now. It moves by compare-and-swap; requests hold a version, never a name."""

    __tablename__ = "adapter_alias"  # pyright: ignore[reportAssignmentType]
    __table_args__ = (
        ForeignKeyConstraint(
            ["tenant_id", "name", "version"],
            ["adapter_version.tenant_id", "adapter_version.name", "adapter_version.version"],
        ),
    )

    tenant_id: str = Field(primary_key=True, max_length=28)
    name: str = Field(primary_key=True, max_length=MAX_NAME_LENGTH)
    version: int = Field(sa_type=BigInteger)
    changed_unix_ns: int = Field(sa_type=BigInteger)


class RateCardVersion(SQLModel, table=True):
    """An immutable version of the prices, in force from ``effective_unix_ns`` until a later one is."""

    __tablename__ = "rate_card"  # pyright: ignore[reportAssignmentType]

    rate_card_id: str = Field(primary_key=True, max_length=28)
    version: int = Field(sa_type=BigInteger, unique=True)
    effective_unix_ns: int = Field(sa_type=BigInteger)
    currency: str = Field(default="USD", max_length=3)
    created_unix_ns: int = Field(sa_type=BigInteger)


class RateCardItem(SQLModel, table=True):
    """The price of one meter for one base model and class; '*' is any."""

    __tablename__ = "rate_card_item"  # pyright: ignore[reportAssignmentType]

    rate_card_id: str = Field(primary_key=True, foreign_key="rate_card.rate_card_id", max_length=28)
    meter: str = Field(primary_key=True, max_length=32)
    model: str = Field(primary_key=True, max_length=MAX_NAME_LENGTH)
    flow_class: str = Field(primary_key=True, max_length=16)
    price_picousd: int = Field(sa_type=Picousd)


class RequestRecord(SQLModel, table=True):
    """The receipt: one row for each dispatch of a request, written once, from the engine's usage record.

    No foreign keys: records outlive what they name. The five phases sum to ``total_ns``.
    """

    __tablename__ = "request_record"  # pyright: ignore[reportAssignmentType]
    __table_args__ = (Index(None, "tenant_id", "finished_unix_ns"),)

    request_id: str = Field(primary_key=True, max_length=36)
    attempt: int = Field(primary_key=True, sa_type=BigInteger)
    tenant_id: str = Field(max_length=28)
    key_id: str = Field(max_length=16)
    operation: str = Field(max_length=16)
    model: str = Field(max_length=80)
    base_model: str = Field(max_length=MAX_NAME_LENGTH)
    adapter_version_id: str = Field(max_length=28)
    flow_class: str = Field(max_length=16)
    rate_card_id: str = Field(max_length=28)
    outcome: int = Field(sa_type=BigInteger)  # HTTP status; 499 the caller left; 0 lost
    billed: bool
    price_picousd: int = Field(sa_type=Picousd)
    prompt_tokens: int = Field(sa_type=BigInteger)
    cached_tokens: int = Field(sa_type=BigInteger)
    output_tokens: int = Field(sa_type=BigInteger)
    queue_ns: int = Field(sa_type=BigInteger)
    prefill_ns: int = Field(sa_type=BigInteger)
    decode_ns: int = Field(sa_type=BigInteger)
    post_ns: int = Field(sa_type=BigInteger)
    network_ns: int = Field(sa_type=BigInteger)
    first_token_ns: int = Field(sa_type=BigInteger)
    gpu_ns: int = Field(sa_type=BigInteger)
    admitted_unix_ns: int = Field(sa_type=BigInteger)
    finished_unix_ns: int = Field(sa_type=BigInteger)
    trace_id: str = Field(max_length=32)
    label: str = Field(max_length=128)

    @property
    def total_ns(self) -> int:
        return self.queue_ns + self.prefill_ns + self.decode_ns + self.post_ns + self.network_ns


class LedgerEntry(SQLModel, table=True):
    """One charge: ``entry_id`` = uuid5(request_id, meter), so a replay can't bill twice, ever. Append-only."""

    __tablename__ = "ledger_entry"  # pyright: ignore[reportAssignmentType]
    __table_args__ = (Index(None, "tenant_id", "occurred_unix_ns"), Index(None, "request_id"))

    entry_id: str = Field(primary_key=True, max_length=36)
    request_id: str = Field(max_length=36)
    tenant_id: str = Field(max_length=28)
    key_id: str = Field(max_length=16)
    meter: str = Field(max_length=32)
    model: str = Field(max_length=80)
    base_model: str = Field(max_length=MAX_NAME_LENGTH)
    flow_class: str = Field(max_length=16)
    rate_card_id: str = Field(max_length=28)
    quantity: int = Field(sa_type=BigInteger)
    unit_price_picousd: int = Field(sa_type=Picousd)
    amount_picousd: int = Field(sa_type=Picousd)
    occurred_unix_ns: int = Field(sa_type=BigInteger)


class AuditEvent(SQLModel, table=True):
    """One administrative write: who, what, to what. Append-only; each row's hash covers the one before it."""

    __tablename__ = "audit_event"  # pyright: ignore[reportAssignmentType]

    number: int = Field(primary_key=True, sa_type=BigInteger, sa_column_kwargs={"autoincrement": False})  # 1, 2, …
    occurred_unix_ns: int = Field(sa_type=BigInteger)
    actor_key_id: str = Field(max_length=16)  # '' = the server itself
    actor: str = Field(max_length=MAX_NAME_LENGTH)
    action: str = Field(max_length=MAX_NAME_LENGTH)
    target: str = Field(max_length=MAX_NAME_LENGTH)
    before: str = Field(sa_type=Text)  # canonical JSON, 'null' = there was nothing
    after: str = Field(sa_type=Text)
    prev_hash: str = Field(max_length=64)
    hash: str = Field(max_length=64)


class AuditHead(SQLModel, table=True):
    """The last event's number and hash, in one row that every writer locks: what keeps the chain one."""

    __tablename__ = "audit_head"  # pyright: ignore[reportAssignmentType]

    head_id: int = Field(primary_key=True, sa_type=BigInteger, sa_column_kwargs={"autoincrement": False})
    number: int = Field(sa_type=BigInteger)
    hash: str = Field(max_length=64)


class IdempotentRequest(SQLModel, table=True):
    """The request that an Idempotency-Key of a tenant stands for; of the key's value only a keyed hash is kept.

    Until ``finished_unix_ns`` the gateway that runs it renews the lease. ``answer`` is encrypted under the value;
    None: too large or streamed, the receipt of ``request_id`` stands for it.
    """

    __tablename__ = "idempotent_request"  # pyright: ignore[reportAssignmentType]

    tenant_id: str = Field(primary_key=True, max_length=28)
    key_hash: str = Field(primary_key=True, max_length=64)
    body_hash: bytes = Field(sa_type=LargeBinary)
    request_id: str = Field(max_length=36)
    lease_unix_ns: int = Field(sa_type=BigInteger)
    finished_unix_ns: int | None = Field(default=None, sa_type=BigInteger)
    answer: bytes | None = Field(default=None, sa_type=LargeBinary)
    keep_until_unix_ns: int = Field(sa_type=BigInteger, index=True)
