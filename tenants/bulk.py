"""Many rows in one statement: for tables that are only ever inserted into.

SQLAlchemy's own bulk insert builds a statement of rows × columns parameters; that cost more than the databases did.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

from sqlmodel.ext.asyncio.session import AsyncSession

_ARRAYS = {str: "text[]", int: "bigint[]", bool: "boolean[]", bytes: "bytea[]"}


async def insert_new(session: AsyncSession, table: Any, columns: tuple[str, ...], rows: Sequence[tuple]) -> int:
    """INSERT … ON CONFLICT DO NOTHING of rows with ``columns``' values, in their order; how many were new."""
    if not rows:
        return 0
    connection = await session.connection()
    statement = _statement(table, columns, connection.dialect.name)
    arrays = [list(column) for column in zip(*rows, strict=True)]
    postgres = connection.dialect.name == "postgresql"
    done = await connection.exec_driver_sql(statement, tuple(arrays) if postgres else list(rows))
    return done.rowcount


@cache
def _statement(table: Any, columns: tuple[str, ...], dialect: str) -> str:
    """PostgreSQL takes one array a column; SQLite's driver repeats a statement of one row."""
    into = f"INSERT INTO {table.__tablename__} ({', '.join(columns)})"
    if dialect == "postgresql":
        arrays = (f"${number}::{_array(table, name)}" for number, name in enumerate(columns, 1))
        return f"{into} SELECT * FROM unnest({', '.join(arrays)}) ON CONFLICT DO NOTHING"  # noqa: S608 (our own names)
    return f"{into} VALUES ({', '.join('?' * len(columns))}) ON CONFLICT DO NOTHING"


def _array(table: Any, name: str) -> str:
    kind = table.__table__.c[name].type
    return _ARRAYS[getattr(kind, "impl_instance", kind).python_type]  # our own types and SQLModel's wrap a plain one
