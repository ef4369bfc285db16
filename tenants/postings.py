"""Numbers of what was charged, in the order of the commits."""

from collections.abc import Sequence

from sqlmodel.ext.asyncio.session import AsyncSession

from tenants.bulk import insert_new
from tenants.tables import Posting

_NEXT = (
    "INSERT INTO posting_head (head_id, number) VALUES (1, 1) "
    "ON CONFLICT (head_id) DO UPDATE SET number = posting_head.number + 1 RETURNING number"
)


async def number_postings(session: AsyncSession, request_ids: Sequence[str]) -> None:
    """Gives what this transaction charges the next number. Call it last: it holds the head's lock until the commit,
    so that a lower number can't become visible after a higher one."""
    if not request_ids:
        return
    connection = await session.connection()
    number = (await connection.exec_driver_sql(_NEXT)).scalar_one()
    await insert_new(session, Posting, ("number", "request_ids"), [(number, " ".join(request_ids))])
