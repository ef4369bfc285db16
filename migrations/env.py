"""Run by Alembic: connects with our engine and applies the revisions in one transaction."""

import asyncio
from typing import Any, Literal, NamedTuple

from alembic import context
from alembic.autogenerate.api import AutogenContext
from sqlalchemy import Connection
from sqlmodel import AutoString

from tenants import tables
from tenants.database import create_engine


def run(connection: Connection) -> None:
    parts = partitions(connection)
    context.configure(
        connection=connection,
        target_metadata=tables.metadata,
        compare_type=True,
        render_as_batch=connection.dialect.name == "sqlite",  # SQLite changes a table by copying it
        render_item=render_item,
        include_name=lambda name, kind, _: not (kind == "table" and name in parts.children),
        include_object=parts.is_to_be_looked_at,
    )
    with context.begin_transaction():
        context.run_migrations()


class Partitions(NamedTuple):
    """What ops/postgres/partitions.sql has made: parts are no tables of ours, and what they are of has unique keys."""

    parents: frozenset[str] = frozenset()
    children: frozenset[str] = frozenset()

    def is_to_be_looked_at(self, one: Any, _name: str | None, kind: str, *_: Any) -> bool:
        return not (kind == "unique_constraint" and one.table.name in self.parents)


def partitions(connection: Connection) -> Partitions:
    if connection.dialect.name != "postgresql":
        return Partitions()
    rows = connection.exec_driver_sql(
        "SELECT relname, relispartition FROM pg_class WHERE relispartition OR relkind = 'p'"
    )
    named = [(name, is_child) for name, is_child in rows]
    children = frozenset(name for name, is_child in named if is_child)
    return Partitions(frozenset(name for name, _ in named) - children, children)


def render_item(kind: str, item: Any, autogen_context: AutogenContext) -> str | Literal[False]:
    """Our own column types are written by name, not as what they are made of; SQLModel's strings as plain ones."""
    if kind == "type" and isinstance(item, AutoString):
        return f"sa.String(length={item.impl_instance.length})"  # pyright: ignore[reportAttributeAccessIssue]
    if kind == "type" and isinstance(item, tables.JsonList | tables.Picousd | tables.WideInteger):
        return f"tenants.tables.{type(item).__name__}()"
    return False


async def connect_and_run() -> None:
    engine = create_engine(context.config.attributes["url"])
    try:
        async with engine.begin() as connection:
            await connection.run_sync(run)
    finally:
        await engine.dispose()


asyncio.run(connect_and_run())
