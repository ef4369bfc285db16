"""What the tables share: their metadata, and the column types that SQLite and PostgreSQL keep alike."""

from decimal import Decimal
from typing import Any

from sqlalchemy import JSON, BigInteger, CheckConstraint, Numeric, String
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.engine import Dialect
from sqlalchemy.types import TypeDecorator, TypeEngine
from sqlmodel import SQLModel

MAX_NAME_LENGTH = 64

SQLModel.model_config["defer_build"] = True  # rows are not validated: what would do it, of every table, takes 2 MB
metadata = SQLModel.metadata
metadata.naming_convention = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s",
    "pk": "pk_%(table_name)s",
}


class JsonList(TypeDecorator[list[Any]]):
    """A list: JSONB on PostgreSQL, JSON text on SQLite. Replace the list; a change in place is not seen."""

    impl = JSON
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        return dialect.type_descriptor(JSONB() if dialect.name == "postgresql" else JSON())


class StringList(JsonList):
    """A list of strings."""

    cache_ok = True


class Picousd(TypeDecorator[int]):
    """10⁻¹² USD in a BIGINT. Refuses what is no int (a float would lose money) or does not fit."""

    impl = BigInteger
    cache_ok = True

    def process_bind_param(self, value: int | None, dialect: Dialect) -> int | None:
        if value is not None and type(value) is not int:
            raise TypeError(f"money is int, not {type(value).__name__}")
        if value is not None and not -(1 << 63) <= value < 1 << 63:
            raise OverflowError("a row's amount fits BIGINT")
        return value


class WideInteger(TypeDecorator[int]):
    """An integer of up to 38 digits, for totals: NUMERIC(38, 0) on PostgreSQL; decimal text on SQLite, whose NUMERIC is
    a float. Not to be summed or compared in SQL."""

    impl = String
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        return dialect.type_descriptor(Numeric(38, 0) if dialect.name == "postgresql" else String(40))

    def process_bind_param(self, value: int | None, dialect: Dialect) -> Decimal | str | None:
        if value is None:
            return None
        if type(value) is not int:
            raise TypeError(f"a total is int, not {type(value).__name__}")
        if abs(value) >= 10**38:
            raise OverflowError("a total has at most 38 digits")
        return Decimal(value) if dialect.name == "postgresql" else str(value)

    def process_result_value(self, value: Any, dialect: Dialect) -> int | None:
        return None if value is None else int(value)


def one_of(column: str, *values: str) -> CheckConstraint:
    listed = ", ".join(f"'{value}'" for value in values)
    return CheckConstraint(f"{column} IN ({listed})", name=column)
