"""What is kept of months whose receipts and charges were detached from the books (ops/postgres/partitions.sql)."""

from sqlalchemy import BigInteger
from sqlmodel import Field, SQLModel

from tenants.tables.types import MAX_NAME_LENGTH, WideInteger, one_of


class DetachedMonth(SQLModel, table=True):
    """A month of UTC: requests from ``first_id`` up to ``end_id`` are in no table that anybody reads. Append-only."""

    __tablename__ = "detached_month"  # pyright: ignore[reportAssignmentType]

    month: str = Field(primary_key=True, max_length=7)  # YYYY-MM
    first_id: str = Field(max_length=36)
    end_id: str = Field(max_length=36)
    num_records: int = Field(sa_type=BigInteger)
    num_entries: int = Field(sa_type=BigInteger)
    detached_unix_ns: int = Field(sa_type=BigInteger)


class DetachedSum(SQLModel, table=True):
    """What of it the books that stay are held against. Append-only. ``kind`` and whose it is, ``owner``:

    'charge': an invoice's, of one of its lines; 'debit': an invoice's, from prepaid credit; 'written': a tenant's, the
    most tokens (``quantity``) that one request left in the cache of ``model`` (an adapter's hash, '': none).
    """

    __tablename__ = "detached_sum"  # pyright: ignore[reportAssignmentType]
    __table_args__ = (one_of("kind", "charge", "debit", "written"),)

    month: str = Field(primary_key=True, max_length=7, foreign_key="detached_month.month")
    kind: str = Field(primary_key=True, max_length=16)
    owner: str = Field(primary_key=True, max_length=28)
    model: str = Field(default="", primary_key=True, max_length=80)
    base_model: str = Field(default="", primary_key=True, max_length=MAX_NAME_LENGTH)
    flow_class: str = Field(default="", primary_key=True, max_length=16)
    meter: str = Field(default="", primary_key=True, max_length=32)
    rate_card_id: str = Field(default="", primary_key=True, max_length=28)
    unit_price_picousd: int = Field(
        default=0, primary_key=True, sa_type=BigInteger, sa_column_kwargs={"autoincrement": False}
    )
    quantity: int = Field(sa_type=WideInteger)
    amount_picousd: int = Field(sa_type=WideInteger)
