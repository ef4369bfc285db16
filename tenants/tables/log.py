"""What was done: administrative writes, and requests under an Idempotency-Key."""

from sqlalchemy import BigInteger, LargeBinary, Text
from sqlmodel import Field, SQLModel

from tenants.tables.types import MAX_NAME_LENGTH


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
