"""What an attacker with the database could do: append-only tables refuse everybody else."""

from sqlalchemy import text
from sqlmodel.ext.asyncio.session import AsyncSession

from tenants.database import Database


async def tamper(database: Database, *statements: str) -> None:
    """Runs the statements in one transaction with the tables' triggers out of the way."""
    async with database.transaction() as session:
        await _lift_triggers(session)
        connection = await session.connection()
        for statement in statements:
            await connection.execute(text(statement))


async def _lift_triggers(session: AsyncSession) -> None:
    connection = await session.connection()
    if connection.dialect.name == "postgresql":
        await connection.exec_driver_sql("SET LOCAL session_replication_role = replica")
        return
    triggers = await connection.exec_driver_sql("SELECT name FROM sqlite_master WHERE type = 'trigger'")
    for (name,) in triggers.all():
        await connection.exec_driver_sql(f"DROP TRIGGER {name}")
