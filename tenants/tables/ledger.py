"""Prices, receipts and charges."""

from sqlalchemy import BigInteger, Index, text
from sqlmodel import Field, SQLModel

from tenants.tables.types import MAX_NAME_LENGTH, Picousd

NOT_SUMMED = "meter NOT IN ('input_uncached_tokens', 'input_cached_tokens', 'output_tokens', 'requests')"  # no rollups
COSTLY = "outcome = 0 OR load_ns > 0"  # what cost more, or otherwise, than the rollups' GPU time says: few records


class RateCardVersion(SQLModel, table=True):
    """An immutable version of the prices, in force from ``effective_unix_ns`` until a later one is."""

    __tablename__ = "rate_card"  # pyright: ignore[reportAssignmentType]

    rate_card_id: str = Field(primary_key=True, max_length=28)
    version: int = Field(sa_type=BigInteger, unique=True)
    effective_unix_ns: int = Field(sa_type=BigInteger)
    currency: str = Field(default="USD", max_length=3)
    created_unix_ns: int = Field(sa_type=BigInteger)


class RateCardItem(SQLModel, table=True):
    """The price of one meter for one base model and class; '*' is any."""

    __tablename__ = "rate_card_item"  # pyright: ignore[reportAssignmentType]

    rate_card_id: str = Field(primary_key=True, foreign_key="rate_card.rate_card_id", max_length=28)
    meter: str = Field(primary_key=True, max_length=32)
    model: str = Field(primary_key=True, max_length=MAX_NAME_LENGTH)
    flow_class: str = Field(primary_key=True, max_length=16)
    price_picousd: int = Field(sa_type=Picousd)


class RequestRecord(SQLModel, table=True):
    """The receipt: one row for each dispatch of a request, written once, from the engine's usage record.

    No foreign keys: records outlive what they name. The five phases sum to ``total_ns``.
    """

    __tablename__ = "request_record"  # pyright: ignore[reportAssignmentType]
    __table_args__ = (
        Index(None, "tenant_id", "finished_unix_ns"),
        Index("ix_request_record_costly", "finished_unix_ns", sqlite_where=text(COSTLY), postgresql_where=text(COSTLY)),
    )

    request_id: str = Field(primary_key=True, max_length=36)
    attempt: int = Field(primary_key=True, sa_type=BigInteger)
    tenant_id: str = Field(max_length=28)
    key_id: str = Field(max_length=16)
    operation: str = Field(max_length=16)
    model: str = Field(max_length=80)
    base_model: str = Field(max_length=MAX_NAME_LENGTH)
    adapter_version_id: str = Field(max_length=28)
    flow_class: str = Field(max_length=16)
    rate_card_id: str = Field(max_length=28)
    outcome: int = Field(sa_type=BigInteger)  # HTTP status; 499 the caller left; 0 lost
    billed: bool
    price_picousd: int = Field(sa_type=Picousd)
    prompt_tokens: int = Field(sa_type=BigInteger)
    cached_tokens: int = Field(sa_type=BigInteger)
    output_tokens: int = Field(sa_type=BigInteger)
    queue_ns: int = Field(sa_type=BigInteger)
    prefill_ns: int = Field(sa_type=BigInteger)
    decode_ns: int = Field(sa_type=BigInteger)
    post_ns: int = Field(sa_type=BigInteger)
    network_ns: int = Field(sa_type=BigInteger)
    first_token_ns: int = Field(sa_type=BigInteger)
    gpu_ns: int = Field(sa_type=BigInteger)
    admitted_unix_ns: int = Field(sa_type=BigInteger)
    finished_unix_ns: int = Field(sa_type=BigInteger)
    trace_id: str = Field(max_length=32)
    label: str = Field(max_length=128)
    streamed: bool = False
    num_choices: int = Field(default=1, sa_type=BigInteger)  # prompts × choices of each
    load_ns: int = Field(default=0, sa_type=BigInteger, sa_column_kwargs={"server_default": "0"})
    recompute_ns: int = Field(default=0, sa_type=BigInteger, sa_column_kwargs={"server_default": "0"})

    @property
    def total_ns(self) -> int:
        return self.queue_ns + self.prefill_ns + self.decode_ns + self.post_ns + self.network_ns


class LedgerEntry(SQLModel, table=True):
    """One charge: ``entry_id`` = uuid5(request_id, meter), so a replay can't bill twice, ever. Append-only."""

    __tablename__ = "ledger_entry"  # pyright: ignore[reportAssignmentType]
    __table_args__ = (
        Index(None, "tenant_id", "occurred_unix_ns"),
        Index(None, "request_id"),
        Index(
            "ix_ledger_entry_not_summed",
            *("tenant_id", "occurred_unix_ns"),
            sqlite_where=text(NOT_SUMMED),
            postgresql_where=text(NOT_SUMMED),
        ),
    )

    entry_id: str = Field(primary_key=True, max_length=36)
    request_id: str = Field(max_length=36)
    tenant_id: str = Field(max_length=28)
    key_id: str = Field(max_length=16)
    meter: str = Field(max_length=32)
    model: str = Field(max_length=80)
    base_model: str = Field(max_length=MAX_NAME_LENGTH)
    flow_class: str = Field(max_length=16)
    rate_card_id: str = Field(max_length=28)
    quantity: int = Field(sa_type=BigInteger)
    unit_price_picousd: int = Field(sa_type=Picousd)
    amount_picousd: int = Field(sa_type=Picousd)
    occurred_unix_ns: int = Field(sa_type=BigInteger)
