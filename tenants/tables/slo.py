"""Objectives and what was counted against them, by minute."""

from sqlalchemy import BigInteger, Index, LargeBinary, UniqueConstraint
from sqlmodel import Field, SQLModel

from tenants.tables.types import MAX_NAME_LENGTH, one_of

_MODEL_LENGTH = 80
_SLIS = ("availability", "ttft", "tpot", "e2e")


class SloObjective(SQLModel, table=True):
    """One version of one objective; immutable. See tenants.slo.objectives.Objective."""

    __tablename__ = "slo_objective"  # pyright: ignore[reportAssignmentType]
    __table_args__ = (
        one_of("sli", *_SLIS),
        UniqueConstraint("tenant_id", "model", "flow_class", "sli", "version"),
    )

    version_id: str = Field(primary_key=True, max_length=28)
    tenant_id: str = Field(max_length=28)
    model: str = Field(max_length=_MODEL_LENGTH)
    flow_class: str = Field(max_length=16)
    sli: str = Field(max_length=16)
    version: int = Field(sa_type=BigInteger)
    effective_unix_ns: int = Field(sa_type=BigInteger)
    threshold_ns: int = Field(sa_type=BigInteger)
    target_ppm: int = Field(sa_type=BigInteger)
    window_days: int = Field(sa_type=BigInteger)
    name: str = Field(max_length=MAX_NAME_LENGTH)
    description: str = Field(default="", max_length=256)
    retired: bool = False
    created_unix_ns: int = Field(sa_type=BigInteger)


class ObjectiveHour(SQLModel, table=True):
    """Exact counts of the requests that ended in an hour of UTC and were judged by that version of an objective; the
    same by minute: tenants.slo.minutes.Minutes as msgpack."""

    __tablename__ = "objective_hour"  # pyright: ignore[reportAssignmentType]

    tenant_id: str = Field(primary_key=True, max_length=28)
    hour_s: int = Field(primary_key=True, sa_type=BigInteger)
    version_id: str = Field(primary_key=True, max_length=28)
    valid: int = Field(sa_type=BigInteger)
    good: int = Field(sa_type=BigInteger)
    minutes: bytes = Field(sa_type=LargeBinary)


class ServiceSum(SQLModel, table=True):
    """What a model and class came to in a minute, a quarter of an hour or a day of UTC, by the time at which requests
    ended: tenants.slo.service.ServiceSums as msgpack."""

    __tablename__ = "service_sum"  # pyright: ignore[reportAssignmentType]

    tenant_id: str = Field(primary_key=True, max_length=28)
    width_s: int = Field(primary_key=True, sa_type=BigInteger)
    start_s: int = Field(primary_key=True, sa_type=BigInteger)
    model: str = Field(primary_key=True, max_length=_MODEL_LENGTH)
    flow_class: str = Field(primary_key=True, max_length=16)
    sums: bytes = Field(sa_type=LargeBinary)


class RefusalMinute(SQLModel, table=True):
    """Requests that no engine took: one process's count of a minute, written as a whole again and again.

    ``model`` is '' where the request was not understood; ``reason`` is the error's code.
    """

    __tablename__ = "refusal_minute"  # pyright: ignore[reportAssignmentType]

    tenant_id: str = Field(primary_key=True, max_length=28)
    minute_s: int = Field(primary_key=True, sa_type=BigInteger)
    model: str = Field(primary_key=True, max_length=_MODEL_LENGTH)
    base_model: str = Field(primary_key=True, max_length=MAX_NAME_LENGTH)
    flow_class: str = Field(primary_key=True, max_length=16)
    status: int = Field(primary_key=True, sa_type=BigInteger)
    reason: str = Field(primary_key=True, max_length=32)
    process_id: str = Field(primary_key=True, max_length=36)
    num_requests: int = Field(sa_type=BigInteger)


class SloIncident(SQLModel, table=True):
    """An alert that was raised, and when it was over (None = not yet)."""

    __tablename__ = "slo_incident"  # pyright: ignore[reportAssignmentType]
    __table_args__ = (Index(None, "tenant_id", "opened_s"),)

    incident_id: str = Field(primary_key=True, max_length=36)
    tenant_id: str = Field(max_length=28)
    model: str = Field(max_length=_MODEL_LENGTH)
    flow_class: str = Field(max_length=16)
    sli: str = Field(max_length=16)
    alert: str = Field(max_length=16)
    opened_s: int = Field(sa_type=BigInteger)
    closed_s: int | None = Field(default=None, sa_type=BigInteger, index=True)


class SloWatch(SQLModel, table=True):
    """The last minute at which alerts were looked at: one row, moved on by compare-and-swap."""

    __tablename__ = "slo_watch"  # pyright: ignore[reportAssignmentType]

    watch_id: int = Field(primary_key=True, sa_type=BigInteger, sa_column_kwargs={"autoincrement": False})
    minute_s: int = Field(sa_type=BigInteger)
