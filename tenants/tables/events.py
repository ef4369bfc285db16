"""What happened to a tenant's things, and whom of its programs it is told."""

from sqlalchemy import BigInteger, Index, Text
from sqlmodel import Field, SQLModel

from tenants.tables.types import MAX_NAME_LENGTH, StringList, one_of


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


class WebhookEndpoint(SQLModel, table=True):
    """Where a tenant is told of events. ``kinds`` empty: all. Its secret is made from ``secret_name`` (secrets.py) and
    stored nowhere; the old one signs beside it until ``old_secret_until_unix_ns``. ``status``: 'disabled' by its owner,
    'gone' by its answer, 'failing' for days."""

    __tablename__ = "webhook_endpoint"  # pyright: ignore[reportAssignmentType]
    __table_args__ = (one_of("status", "enabled", "disabled", "gone", "failing"),)

    endpoint_id: str = Field(primary_key=True, max_length=28)
    tenant_id: str = Field(foreign_key="tenant.tenant_id", index=True, max_length=28)
    url: str = Field(max_length=2048)
    description: str = Field(default="", max_length=MAX_NAME_LENGTH)
    kinds: list[str] = Field(sa_type=StringList)
    status: str = Field(default="enabled", max_length=16)
    secret_name: str = Field(max_length=64)
    old_secret_name: str = Field(default="", max_length=64)
    old_secret_until_unix_ns: int = Field(default=0, sa_type=BigInteger)
    created_unix_ns: int = Field(sa_type=BigInteger)
    failing_since_unix_ns: int | None = Field(default=None, sa_type=BigInteger)


class WebhookDelivery(SQLModel, table=True):
    """An event on its way to an endpoint. Who tries it first moves ``due_unix_ns`` on: a claim that nobody settles is
    due again by itself. Of a finished one it is the time of its end."""

    __tablename__ = "webhook_delivery"  # pyright: ignore[reportAssignmentType]
    __table_args__ = (
        one_of("state", "pending", "delivered", "failed"),
        Index(None, "state", "due_unix_ns"),
        Index(None, "endpoint_id", "number"),
    )

    event_id: str = Field(primary_key=True, foreign_key="event.event_id", max_length=28)
    endpoint_id: str = Field(primary_key=True, foreign_key="webhook_endpoint.endpoint_id", max_length=28)
    tenant_id: str = Field(max_length=28)
    number: int = Field(sa_type=BigInteger)  # the event's
    state: str = Field(default="pending", max_length=16)
    attempts: int = Field(default=0, sa_type=BigInteger)
    due_unix_ns: int = Field(sa_type=BigInteger)
    last_status: int = Field(default=0, sa_type=BigInteger)  # 0: there was no answer
    last_error: str = Field(default="", max_length=32)
