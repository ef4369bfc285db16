"""Many rows in one statement: for tables that are inserted into, and for sums.

SQLAlchemy's own bulk insert builds a statement of rows × columns parameters; that cost more than the databases did.
"""

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

from sqlmodel.ext.asyncio.session import AsyncSession

_ARRAYS = {str: "text[]", int: "bigint[]", bool: "boolean[]", bytes: "bytea[]"}


async def insert_new(session: AsyncSession, table: Any, columns: tuple[str, ...], rows: Sequence[tuple]) -> int:
    """INSERT … ON CONFLICT DO NOTHING of rows with ``columns``' values, in their order; how many were new."""
    if not rows:
        return 0
    return await _execute(session, table, columns, rows, "DO NOTHING")


async def insert_or_add(
    session: AsyncSession, table: Any, columns: tuple[str, ...], rows: Sequence[tuple], key: tuple[str, ...]
) -> None:
    """INSERT of rows with ``columns``' values, of which those beside the primary ``key`` are added to a row that is
    there. One row a key, in the order of keys, so that two writers never wait for each other in a circle."""
    table_name = table.__tablename__
    changes = ", ".join(f"{name} = {table_name}.{name} + excluded.{name}" for name in columns if name not in key)
    if rows:
        await _execute(session, table, columns, rows, f"({', '.join(key)}) DO UPDATE SET {changes}")


async def insert_or_replace(
    session: AsyncSession, table: Any, columns: tuple[str, ...], rows: Sequence[tuple], key: tuple[str, ...]
) -> None:
    """As ``insert_or_add``, but the new values take the place of those that are there."""
    changes = ", ".join(f"{name} = excluded.{name}" for name in columns if name not in key)
    if rows:
        await _execute(session, table, columns, rows, f"({', '.join(key)}) DO UPDATE SET {changes}")


async def _execute(
    session: AsyncSession, table: Any, columns: tuple[str, ...], rows: Sequence[tuple], on_conflict: str
) -> int:
    connection = await session.connection()
    statement = _statement(table, columns, connection.dialect.name, on_conflict)
    if connection.dialect.name == "postgresql":
        arrays = tuple(list(column) for column in zip(*rows, strict=True))
        return (await connection.exec_driver_sql(statement, arrays)).rowcount
    return (await connection.exec_driver_sql(statement, list(rows))).rowcount


async def insert_telling(
    session: AsyncSession, table: Any, columns: tuple[str, ...], rows: Sequence[tuple], key: tuple[str, ...]
) -> set[tuple]:
    """As ``insert_new`` → the keys of the rows that were new. ``key`` are the primary key's columns, the first ones of
    ``columns``, the first of them text; rows with one key are one row."""
    rows = list({row[: len(key)]: row for row in rows}.values())
    if not rows:
        return set()
    connection = await session.connection()
    if connection.dialect.name == "postgresql":
        statement = f"{_statement(table, columns, 'postgresql', 'DO NOTHING')} RETURNING {', '.join(key)}"
        found = await connection.exec_driver_sql(statement, tuple(list(column) for column in zip(*rows, strict=True)))
        return {tuple(row) for row in found}
    # a writer is alone on SQLite from BEGIN IMMEDIATE on: what is not there now is new
    names = ", ".join(key)
    known = f"SELECT {names} FROM {table.__tablename__} WHERE {key[0]} IN (SELECT value FROM json_each(?))"  # noqa: S608
    there = {tuple(row) for row in await connection.exec_driver_sql(known, (json.dumps([row[0] for row in rows]),))}
    new = [row for row in rows if row[: len(key)] not in there]
    await insert_new(session, table, columns, new)
    return {row[: len(key)] for row in new}


@cache
def _statement(table: Any, columns: tuple[str, ...], dialect: str, on_conflict: str) -> str:
    """PostgreSQL takes one array a column; SQLite's driver repeats a statement of one row."""
    into = f"INSERT INTO {table.__tablename__} ({', '.join(columns)})"
    if dialect == "postgresql":
        arrays = (f"${number}::{_array(table, name)}" for number, name in enumerate(columns, 1))
        return f"{into} SELECT * FROM unnest({', '.join(arrays)}) ON CONFLICT {on_conflict}"  # noqa: S608 (our own names)
    return f"{into} VALUES ({', '.join('?' * len(columns))}) ON CONFLICT {on_conflict}"


def _array(table: Any, name: str) -> str:
    kind = table.__table__.c[name].type
    return _ARRAYS[getattr(kind, "impl_instance", kind).python_type]  # our own types and SQLModel's wrap a plain one
