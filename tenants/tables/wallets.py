"""Prepaid credit."""

from sqlalchemy import BigInteger, CheckConstraint, Index
from sqlmodel import Field, SQLModel

from tenants.tables.types import Picousd


class Wallet(SQLModel, table=True):
    """What a tenant has paid for: ``granted`` = free + ``reserved`` (by what runs) + ``spent``. A tenant without one
    pays later."""

    __tablename__ = "wallet"  # pyright: ignore[reportAssignmentType]
    __table_args__ = (
        CheckConstraint("granted_picousd >= 0", name="granted"),
        CheckConstraint("reserved_picousd >= 0", name="reserved"),
        CheckConstraint("spent_picousd >= 0", name="spent"),
    )

    tenant_id: str = Field(primary_key=True, foreign_key="tenant.tenant_id", max_length=28)
    granted_picousd: int = Field(default=0, sa_type=Picousd)
    reserved_picousd: int = Field(default=0, sa_type=Picousd)
    spent_picousd: int = Field(default=0, sa_type=Picousd)
    num_grants: int = Field(default=0, sa_type=BigInteger)


class WalletGrant(SQLModel, table=True):
    """Credit that was bought or given, once a reference. Append-only."""

    __tablename__ = "wallet_grant"  # pyright: ignore[reportAssignmentType]

    tenant_id: str = Field(primary_key=True, foreign_key="tenant.tenant_id", max_length=28)
    reference: str = Field(primary_key=True, max_length=128)
    amount_picousd: int = Field(sa_type=Picousd)
    created_unix_ns: int = Field(sa_type=BigInteger)


class WalletHold(SQLModel, table=True):
    """What one dispatch of a request may cost, reserved before it begins, until its record says what it did: then it is
    resolved, once. ``gateway`` is who may still have it run."""

    __tablename__ = "wallet_hold"  # pyright: ignore[reportAssignmentType]
    __table_args__ = (Index("ix_wallet_hold_open", "gateway", "created_unix_ns"),)

    request_id: str = Field(primary_key=True, max_length=36)
    attempt: int = Field(primary_key=True, sa_type=BigInteger)
    tenant_id: str = Field(max_length=28)
    gateway: str = Field(max_length=128)  # '' once it is resolved
    amount_picousd: int = Field(sa_type=Picousd)
    spent_picousd: int | None = Field(default=None, sa_type=Picousd)
    created_unix_ns: int = Field(sa_type=BigInteger)
    resolved_unix_ns: int | None = Field(default=None, sa_type=BigInteger)
