"""How far the meters of adapters are read."""

from sqlalchemy import BigInteger
from sqlmodel import Field, SQLModel


class AdapterMeterHead(SQLModel, table=True):
    """One row, which whoever reads a meter locks: the last hour (of UTC, since 1970) that is booked, and when
    somebody last looked what is resident."""

    __tablename__ = "adapter_meter_head"  # pyright: ignore[reportAssignmentType]

    head_id: int = Field(primary_key=True, sa_type=BigInteger, sa_column_kwargs={"autoincrement": False})
    hour: int = Field(sa_type=BigInteger)
    looked_unix_ns: int = Field(sa_type=BigInteger)


class AdapterResidency(SQLModel, table=True):
    """For how long a version lay on devices in one hour, summed over replicas."""

    __tablename__ = "adapter_residency"  # pyright: ignore[reportAssignmentType]

    adapter_version_id: str = Field(primary_key=True, max_length=28)
    hour: int = Field(primary_key=True, sa_type=BigInteger, sa_column_kwargs={"autoincrement": False})
    resident_ns: int = Field(sa_type=BigInteger)
