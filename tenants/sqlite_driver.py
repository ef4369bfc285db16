"""SQLite for SQLAlchemy, over aiosqlite: a statement is one errand for the connection's thread.

The library's own adapter sends four: for a cursor, the statement, its rows, and the end of the cursor. Each wakes a
thread and the loop again, and that cost more than what most of our statements do.
"""

import sqlite3
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import aiosqlite
from sqlalchemy.dialects.sqlite.aiosqlite import (
    AsyncAdapt_aiosqlite_connection,
    AsyncAdapt_aiosqlite_cursor,
    AsyncAdapt_aiosqlite_dbapi,
)
from sqlalchemy.util.concurrency import await_


class _Done(NamedTuple):
    """What is left of a cursor whose rows were fetched."""

    description: Any = None
    rowcount: int = -1
    lastrowid: int | None = None


class _Cursor(AsyncAdapt_aiosqlite_cursor):
    """Has all rows of its statement as soon as that is executed; there is nothing to close."""

    __slots__ = ()

    def __init__(self, adapt_connection: AsyncAdapt_aiosqlite_connection) -> None:
        self._adapt_connection = adapt_connection
        self._connection = adapt_connection._connection
        self._cursor: Any = _Done()
        self._rows = deque()
        self._soft_closed_memoized = {}

    def execute(self, operation: Any, parameters: Any = None) -> None:
        self._run(sqlite3.Cursor.execute, operation, parameters or ())

    def executemany(self, operation: Any, seq_of_parameters: Any) -> None:
        self._run(sqlite3.Cursor.executemany, operation, seq_of_parameters)

    def close(self) -> None:
        self._rows.clear()

    async def _async_soft_close(self) -> None:
        pass

    def _run(self, method: Any, operation: str, parameters: Sequence[Any]) -> None:
        connection: Any = self._connection
        try:
            done, rows = await_(connection._execute(_errand, connection._conn, method, operation, parameters))
        except Exception as error:
            self._adapt_connection._handle_exception(error)
        self._cursor, self._rows = done, deque(rows)


class _Connection(AsyncAdapt_aiosqlite_connection):
    __slots__ = ()

    _cursor_cls = _Cursor

    def rollback(self) -> None:
        """A pool asks for it whenever it gets a connection back."""
        connection: Any = self._connection
        if connection._connection and connection.in_transaction:
            super().rollback()


class SqliteDriver(AsyncAdapt_aiosqlite_dbapi):
    """``create_async_engine(url, module=SqliteDriver())``."""

    def __init__(self) -> None:
        super().__init__(aiosqlite, sqlite3)

    def connect(self, *arguments: Any, **options: Any) -> AsyncAdapt_aiosqlite_connection:
        return _Connection(self, super().connect(*arguments, **options)._connection)


def _errand(
    connection: sqlite3.Connection, method: Any, operation: str, parameters: Sequence[Any]
) -> tuple[_Done, Sequence[Any]]:
    """In the connection's thread."""
    cursor = connection.cursor()
    try:
        method(cursor, operation, parameters)
        rows = cursor.fetchall() if cursor.description else ()
        return _Done(cursor.description, cursor.rowcount, cursor.lastrowid), rows
    finally:
        cursor.close()
