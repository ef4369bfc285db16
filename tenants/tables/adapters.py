"""Versions of adapters, and what their names mean."""

from sqlalchemy import BigInteger, ForeignKeyConstraint, Index, UniqueConstraint
from sqlmodel import Field, SQLModel

from tenants.tables.types import MAX_NAME_LENGTH, StringList


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
