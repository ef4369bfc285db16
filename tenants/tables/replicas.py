"""Where the time of the machines went."""

from sqlalchemy import BigInteger
from sqlmodel import Field, SQLModel

from tenants.tables.types import MAX_NAME_LENGTH


class _Accounts(SQLModel):
    """Of an engine process: what its time was, up to ``until_unix_ns``."""

    engine_id: str = Field(primary_key=True, max_length=MAX_NAME_LENGTH)
    incarnation_unix_ns: int = Field(primary_key=True, sa_type=BigInteger)
    model: str = Field(max_length=MAX_NAME_LENGTH)
    until_unix_ns: int = Field(sa_type=BigInteger, index=True)
    wall_ns: int = Field(sa_type=BigInteger)
    attributed_ns: int = Field(sa_type=BigInteger)
    load_ns: int = Field(sa_type=BigInteger)
    recompute_ns: int = Field(sa_type=BigInteger)
    lost_ns: int = Field(sa_type=BigInteger)
    idle_ns: int = Field(sa_type=BigInteger)
    overhead_ns: int = Field(sa_type=BigInteger)
    error_ppm: int = Field(sa_type=BigInteger)
    r2_ppm: int = Field(sa_type=BigInteger)


class ReplicaTime(_Accounts, table=True):
    """A second or so of an engine process, as its journal tells it; the accounts sum to ``wall_ns`` but for a step in
    the air. ``number`` counts from 0 in each process of an engine. Append-only, until its hour is a ReplicaHour: then
    the database lets it go, and does not take it again."""

    __tablename__ = "replica_time"  # pyright: ignore[reportAssignmentType]

    number: int = Field(primary_key=True, sa_type=BigInteger)


class ReplicaHour(_Accounts, table=True):
    """The sums of an engine process's ReplicaTimes ``first_number`` to ``last_number``, of one hour, none missing.
    ``until_unix_ns`` is the last one's, ``error_ppm`` and ``r2_ppm`` are weighted by the time shared. Append-only."""

    __tablename__ = "replica_hour"  # pyright: ignore[reportAssignmentType]

    first_number: int = Field(primary_key=True, sa_type=BigInteger)
    last_number: int = Field(sa_type=BigInteger)
