"""What came for the ledger and could not be booked."""

from sqlalchemy import BigInteger, Text
from sqlmodel import Field, SQLModel


class UnbookedRecord(SQLModel, table=True):
    """A usage record that is ours and names what nobody has; ``record`` is all of it, as JSON. Append-only."""

    __tablename__ = "unbooked_record"  # pyright: ignore[reportAssignmentType]

    request_id: str = Field(primary_key=True, max_length=36)
    attempt: int = Field(primary_key=True, sa_type=BigInteger)
    tenant_id: str = Field(max_length=28)
    reason: str = Field(max_length=32)
    record: str = Field(sa_type=Text)
    set_aside_unix_ns: int = Field(sa_type=BigInteger)
