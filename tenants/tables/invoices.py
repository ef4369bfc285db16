"""Invoices and credit notes. All but the series are append-only, and the database refuses anything else."""

from sqlalchemy import BigInteger, UniqueConstraint
from sqlmodel import Field, SQLModel

from tenants.tables.types import MAX_NAME_LENGTH, Picousd, WideInteger, one_of

MAX_TEXT = 200


class DocumentSeries(SQLModel, table=True):
    """The last number given to a kind of document: whoever issues one locks its row, so that no number is left out."""

    __tablename__ = "document_series"  # pyright: ignore[reportAssignmentType]

    kind: str = Field(primary_key=True, max_length=16)
    number: int = Field(sa_type=BigInteger)


class Invoice(SQLModel, table=True):
    """One a tenant and month. Names and zone are as they were when it was issued. ``paid_cents`` of the total were
    debited from prepaid credit; the rest is due (below zero: owed to the tenant)."""

    __tablename__ = "invoice"  # pyright: ignore[reportAssignmentType]
    __table_args__ = (UniqueConstraint("tenant_id", "period"),)

    invoice_id: str = Field(primary_key=True, max_length=28)
    number: int = Field(sa_type=BigInteger, unique=True)
    tenant_id: str = Field(max_length=28)
    period: str = Field(max_length=10)  # the local date on which the month begins
    start_unix_ns: int = Field(sa_type=BigInteger)
    end_unix_ns: int = Field(sa_type=BigInteger)
    issued_unix_ns: int = Field(sa_type=BigInteger)
    tenant_name: str = Field(max_length=MAX_NAME_LENGTH)
    time_zone: str = Field(max_length=64)
    issuer: str = Field(max_length=MAX_TEXT)
    currency: str = Field(default="USD", max_length=3)
    total_cents: int = Field(sa_type=BigInteger)
    paid_cents: int = Field(default=0, sa_type=BigInteger)


class InvoicePayment(SQLModel, table=True):
    """What an invoice says was debited from prepaid credit for the requests of one invoice's month: its own, or an
    earlier one's that came late. Exact; the invoice shows their sum in cents."""

    __tablename__ = "invoice_payment"  # pyright: ignore[reportAssignmentType]

    invoice_id: str = Field(primary_key=True, foreign_key="invoice.invoice_id", max_length=28)
    month_of: str = Field(primary_key=True, foreign_key="invoice.invoice_id", index=True, max_length=28)
    amount_picousd: int = Field(sa_type=WideInteger)


class InvoiceLine(SQLModel, table=True):
    """``amount_picousd`` is exact, ``amount_cents`` is what is shown of it; each sums over an invoice to its total.

    ``usage``: quantity × unit price for each unit of the meter. ``correction``: the same, for what came late for the
    earlier invoice ``reference``. ``credit``: the credit note ``reference``. ``rounding``: what is left.
    """

    __tablename__ = "invoice_line"  # pyright: ignore[reportAssignmentType]
    __table_args__ = (one_of("kind", "usage", "correction", "credit", "rounding"),)

    invoice_id: str = Field(primary_key=True, foreign_key="invoice.invoice_id", max_length=28)
    number: int = Field(primary_key=True, sa_type=BigInteger)
    kind: str = Field(max_length=16)
    description: str = Field(max_length=MAX_TEXT)
    model: str = Field(default="", max_length=80)
    base_model: str = Field(default="", max_length=MAX_NAME_LENGTH)
    flow_class: str = Field(default="", max_length=16)
    meter: str = Field(default="", max_length=32)
    rate_card_id: str = Field(default="", max_length=28)
    reference: str = Field(default="", max_length=28, index=True)
    start_unix_ns: int = Field(sa_type=BigInteger)
    end_unix_ns: int = Field(sa_type=BigInteger)
    quantity: int = Field(default=0, sa_type=WideInteger)
    unit_price_picousd: int = Field(default=0, sa_type=Picousd)
    amount_picousd: int = Field(sa_type=WideInteger)
    amount_cents: int = Field(sa_type=BigInteger)


class CreditNote(SQLModel, table=True):
    """What is given back of an issued invoice; the tenant's next invoice takes it off."""

    __tablename__ = "credit_note"  # pyright: ignore[reportAssignmentType]

    credit_note_id: str = Field(primary_key=True, max_length=28)
    number: int = Field(sa_type=BigInteger, unique=True)
    invoice_id: str = Field(foreign_key="invoice.invoice_id", index=True, max_length=28)
    tenant_id: str = Field(index=True, max_length=28)
    reason: str = Field(max_length=MAX_TEXT)
    issued_unix_ns: int = Field(sa_type=BigInteger)
    currency: str = Field(default="USD", max_length=3)
    total_cents: int = Field(sa_type=BigInteger)


class CreditNoteLine(SQLModel, table=True):
    """So many cents of one line of that invoice."""

    __tablename__ = "credit_note_line"  # pyright: ignore[reportAssignmentType]

    credit_note_id: str = Field(primary_key=True, foreign_key="credit_note.credit_note_id", max_length=28)
    invoice_line: int = Field(primary_key=True, sa_type=BigInteger, sa_column_kwargs={"autoincrement": False})
    amount_cents: int = Field(sa_type=BigInteger)
