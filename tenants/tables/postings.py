"""The order in which charges were committed: what exports follow."""

from sqlalchemy import BigInteger, Text
from sqlmodel import Field, SQLModel


class Posting(SQLModel, table=True):
    """What one transaction charged for: the ``request_id`` of its new entries, parted by spaces. Append-only.

    Numbers are 1, 2, … without a gap, in the order of the commits: who has read up to one has missed none below.
    """

    __tablename__ = "posting"  # pyright: ignore[reportAssignmentType]

    number: int = Field(primary_key=True, sa_type=BigInteger, sa_column_kwargs={"autoincrement": False})
    request_ids: str = Field(sa_type=Text)


class PostingHead(SQLModel, table=True):
    """The last number, in one row that every transaction which charges locks until its commit."""

    __tablename__ = "posting_head"  # pyright: ignore[reportAssignmentType]

    head_id: int = Field(primary_key=True, sa_type=BigInteger, sa_column_kwargs={"autoincrement": False})
    number: int = Field(sa_type=BigInteger)
