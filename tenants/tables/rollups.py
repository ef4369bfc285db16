"""Sums of usage by time: what reports are made of."""

from sqlalchemy import BigInteger
from sqlmodel import Field, SQLModel

from tenants.tables.types import MAX_NAME_LENGTH


class UsageSeries(SQLModel, table=True):
    """What requests are told apart by. ``series_id`` is a hash of the rest: whoever sees one first writes it."""

    __tablename__ = "usage_series"  # pyright: ignore[reportAssignmentType]

    series_id: str = Field(primary_key=True, max_length=24)
    tenant_id: str = Field(index=True, max_length=28)
    key_id: str = Field(max_length=16)
    model: str = Field(max_length=80)
    base_model: str = Field(max_length=MAX_NAME_LENGTH)
    adapter_version_id: str = Field(max_length=28)
    flow_class: str = Field(max_length=16)
    rate_card_id: str = Field(max_length=28)


class UsageRollup(SQLModel, table=True):
    """The sums of a series over one minute, hour or day of UTC, by the time at which requests finished.

    Quantities are those of the ledger's entries, by meter; an amount is quotient × 10⁹ + remainder picousd, each summed
    apart, so that no sum outgrows BIGINT. ``gpu_ns`` is of every record, billed or not.
    """

    __tablename__ = "usage_rollup"  # pyright: ignore[reportAssignmentType]
    __table_args__ = {"sqlite_with_rowid": False}

    series_id: str = Field(primary_key=True, max_length=24)
    width_s: int = Field(primary_key=True, sa_type=BigInteger)
    start_s: int = Field(primary_key=True, sa_type=BigInteger)
    input_uncached_tokens: int = Field(sa_type=BigInteger)
    input_cached_tokens: int = Field(sa_type=BigInteger)
    output_tokens: int = Field(sa_type=BigInteger)
    requests: int = Field(sa_type=BigInteger)
    input_uncached_tokens_quotient: int = Field(sa_type=BigInteger)
    input_uncached_tokens_remainder: int = Field(sa_type=BigInteger)
    input_cached_tokens_quotient: int = Field(sa_type=BigInteger)
    input_cached_tokens_remainder: int = Field(sa_type=BigInteger)
    output_tokens_quotient: int = Field(sa_type=BigInteger)
    output_tokens_remainder: int = Field(sa_type=BigInteger)
    requests_quotient: int = Field(sa_type=BigInteger)
    requests_remainder: int = Field(sa_type=BigInteger)
    gpu_ns: int = Field(sa_type=BigInteger)
