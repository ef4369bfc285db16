"""What happened to a tenant's things, for its programs to hear of."""

from sqlalchemy import BigInteger, Index, Text
from sqlmodel import Field, SQLModel


class Event(SQLModel, table=True):
    """Append-only. ``number`` counts events of all tenants in the order in which they were told, None until then:
    who reads on from a number misses none, however late the transaction of one committed."""

    __tablename__ = "event"  # pyright: ignore[reportAssignmentType]
    __table_args__ = (Index(None, "tenant_id", "number"),)

    event_id: str = Field(primary_key=True, max_length=28)
    tenant_id: str = Field(max_length=28)
    kind: str = Field(max_length=32)
    data: str = Field(sa_type=Text)  # a JSON object
    endpoint_id: str = Field(default="", max_length=28)  # '': for every endpoint that wants its kind
    occurred_unix_ns: int = Field(sa_type=BigInteger)
    number: int | None = Field(default=None, sa_type=BigInteger, unique=True, index=True)
