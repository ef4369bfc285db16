"""Running totals of months with a limit."""

from sqlalchemy import BigInteger
from sqlmodel import Field, SQLModel

from tenants.tables.types import WideInteger


class SpendTotal(SQLModel, table=True):
    """What a tenant with a limit has spent in a period, as far as it is booked: what alerts go by. ``stamp`` is the
    limit's: a total that is older may miss what was booked without one."""

    __tablename__ = "spend_total"  # pyright: ignore[reportAssignmentType]

    tenant_id: str = Field(primary_key=True, max_length=28)
    period: str = Field(primary_key=True, max_length=10)
    stamp: int = Field(sa_type=BigInteger)
    picousd: int = Field(sa_type=WideInteger)
