"""Who serves."""

from sqlalchemy import BigInteger
from sqlmodel import Field, SQLModel


class GatewayLease(SQLModel, table=True):
    """A gateway that may hold reservations until ``until_unix_ns``, and longer if it renews this row."""

    __tablename__ = "gateway_lease"  # pyright: ignore[reportAssignmentType]

    name: str = Field(primary_key=True, max_length=128)
    until_unix_ns: int = Field(sa_type=BigInteger)
