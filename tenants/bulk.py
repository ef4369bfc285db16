"""Many rows in one statement: for tables that are only ever inserted into, or added up.

SQLAlchemy's own bulk insert builds a statement of rows × columns parameters; that cost more than the databases did.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from sqlalchemy import CursorResult, delete, select, tuple_
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlmodel.ext.asyncio.session import AsyncSession

_ARRAYS = {str: "text[]", int: "bigint[]", bool: "boolean[]", bytes: "bytea[]"}


async def insert_new(session: AsyncSession, table: Any, columns: tuple[str, ...], rows: Sequence[tuple]) -> int:
    """INSERT … ON CONFLICT DO NOTHING of rows with ``columns``' values, in their order; how many were new."""
    if not rows:
        return 0
    connection = await session.connection()
    return (await _run(connection, _statement(table, columns, connection.dialect.name), rows)).rowcount


async def absent(session: AsyncSession, table: Any, key: str, values: Sequence[str]) -> set[str]:
    """Which of ``values`` no row has in its text column ``key``, by what is committed or this transaction's own."""
    if not values:
        return set()
    connection = await session.connection()
    postgres = connection.dialect.name == "postgresql"
    wanted = "= ANY($1::text[])" if postgres else "IN (SELECT value FROM json_each(?))"
    query = f"SELECT {key} FROM {table.__tablename__} WHERE {key} {wanted}"  # noqa: S608 (our own names)
    found = await connection.exec_driver_sql(query, (list(values) if postgres else json.dumps(list(values)),))
    return set(values).difference(found.scalars())


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
        statement = f"{_statement(table, columns, 'postgresql')} RETURNING {', '.join(key)}"
        return {tuple(row) for row in await _run(connection, statement, rows)}
    # a writer is alone on SQLite from BEGIN IMMEDIATE on: what is not there now is new
    names = ", ".join(key)
    known = f"SELECT {names} FROM {table.__tablename__} WHERE {key[0]} IN (SELECT value FROM json_each(?))"  # noqa: S608
    there = {tuple(row) for row in await connection.exec_driver_sql(known, (json.dumps([row[0] for row in rows]),))}
    new = [row for row in rows if row[: len(key)] not in there]
    if new:
        await _run(connection, _statement(table, columns, "sqlite"), new)
    return {row[: len(key)] for row in new}


async def add_up(
    session: AsyncSession, table: Any, key: tuple[str, ...], sums: tuple[str, ...], rows: Sequence[tuple]
) -> None:
    """Adds each row's ``sums`` to those of the row with its ``key``, which is made where there is none.

    Rows are (*key, *sums), each key once, in key order: two writers then never wait for each other in a circle.
    """
    if not rows:
        return
    connection, name = await session.connection(), table.__tablename__
    added = ", ".join(f"{each} = {name}.{each} + excluded.{each}" for each in sums)
    on_conflict = f"({', '.join(key)}) DO UPDATE SET {added}"
    await _run(connection, _statement(table, (*key, *sums), connection.dialect.name, on_conflict), rows)


async def taken(
    session: AsyncSession, table: Any, key: tuple[str, ...], keys: Sequence[tuple], nothing: Mapping[str, Any]
) -> dict[tuple, Any]:
    """What the rows with these ``keys`` (each once, in key order) hold in the first column of ``nothing``; they are
    nobody else's until the commit. A row that was not there may be missing, or hold ``nothing`` in its columns."""
    if not keys:
        return {}
    connection = await session.connection()
    names, name, column = ", ".join(f"t.{each}" for each in key), table.__tablename__, next(iter(nothing))
    if connection.dialect.name == "postgresql":
        # first all rows are there, then all are locked: two writers never wait for each other in a circle
        await insert_new(session, table, (*key, *nothing), [(*each, *nothing.values()) for each in keys])
        arrays = ", ".join(f"${number}::{_array(table, each)}" for number, each in enumerate(key, 1))
        query = (
            f"SELECT {names}, t.{column} FROM unnest({arrays}) AS k({', '.join(key)}) "  # noqa: S608 (our own names)
            f"JOIN {name} AS t USING ({', '.join(key)}) ORDER BY {names} FOR UPDATE OF t"
        )
        found = await connection.exec_driver_sql(query, tuple(list(part) for part in zip(*keys, strict=True)))
    else:  # a writer is alone on SQLite from BEGIN IMMEDIATE on
        same = " AND ".join(f"t.{each} = json_extract(k.value, '$[{number}]')" for number, each in enumerate(key))
        query = f"SELECT {names}, t.{column} FROM json_each(?) AS k CROSS JOIN {name} AS t ON {same}"  # noqa: S608
        found = await connection.exec_driver_sql(query, (json.dumps(keys),))
    return {tuple(row[:-1]): row[-1] for row in found}


async def put(
    session: AsyncSession, table: Any, key: tuple[str, ...], values: tuple[str, ...], rows: Sequence[tuple]
) -> None:
    """Inserts rows of (*key, *values), in place of those that are there; each key once, in key order."""
    if not rows:
        return
    connection = await session.connection()
    changes = ", ".join(f"{each} = excluded.{each}" for each in values)
    on_conflict = f"({', '.join(key)}) DO UPDATE SET {changes}"
    await _run(connection, _statement(table, (*key, *values), connection.dialect.name, on_conflict), rows)


async def _run(connection: AsyncConnection, statement: str, rows: Sequence[tuple]) -> CursorResult[Any]:
    """A ``_statement`` on rows of its columns."""
    if connection.dialect.name == "postgresql":
        return await connection.exec_driver_sql(statement, tuple(list(column) for column in zip(*rows, strict=True)))
    return await connection.exec_driver_sql(statement, list(rows))


async def remove(session: AsyncSession, table: Any, *conditions: Any) -> int:
    """Deletes the rows that nobody else is at, the others another time; how many. It never waits for anybody, so it is
    in no circle of those who do."""
    key = table.__table__.primary_key.columns
    free = select(*key).where(*conditions).with_for_update(skip_locked=True)
    done = await session.exec(delete(table).where(tuple_(*key).in_(free)))
    return done.rowcount


@cache
def _statement(table: Any, columns: tuple[str, ...], dialect: str, on_conflict: str = "DO NOTHING") -> str:
    """PostgreSQL takes one array a column; SQLite's driver repeats a statement of one row."""
    into = f"INSERT INTO {table.__tablename__} ({', '.join(columns)})"
    if dialect == "postgresql":
        arrays = (f"${number}::{_array(table, name)}" for number, name in enumerate(columns, 1))
        return f"{into} SELECT * FROM unnest({', '.join(arrays)}) ON CONFLICT {on_conflict}"  # noqa: S608 (our own names)
    return f"{into} VALUES ({', '.join('?' * len(columns))}) ON CONFLICT {on_conflict}"


def _array(table: Any, name: str) -> str:
    kind = table.__table__.c[name].type
    return _ARRAYS[getattr(kind, "impl_instance", kind).python_type]  # our own types and SQLModel's wrap a plain one
