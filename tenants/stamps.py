"""Identifiers of chance, and stamps that say in which order rows changed."""

import re
import secrets
import time

from sqlalchemy import func
from sqlmodel import select
from sqlmodel.ext.asyncio.session import AsyncSession

from tenants.tables import ApiKey, OperatorKey, Tenant


def new_id(kind: str) -> str:
    """``ten_`` (or adv_, rc_) and 24 hex digits of chance."""
    return f"{kind}_{secrets.token_hex(12)}"


def is_id(kind: str, text: str) -> bool:
    """Whether it has the form of one: what a caller sent is not asked of a database that may choke on it."""
    return re.fullmatch(rf"{kind}_[0-9a-f]{{24}}", text) is not None


async def change_stamp(session: AsyncSession) -> int:
    """Now in ns, but later than every stamp given so far, wherever the clock has jumped."""
    latest = 0
    for table in (Tenant, ApiKey, OperatorKey):
        found = (await session.exec(select(func.max(table.changed_unix_ns)))).one()
        latest = max(latest, found or 0)
    return max(time.time_ns(), latest + 1)


async def clock_ns(session: AsyncSession) -> int:
    """Now by the database's clock: those of several hosts may differ by more than a lease. (SQLite serves one host.)"""
    if session.get_bind().dialect.name != "postgresql":
        return time.time_ns()
    seconds = func.extract("epoch", func.clock_timestamp())
    return int((await session.exec(select(seconds))).one() * 10**9)
