"""Numbers of what was charged, in the order of the commits, and the way along them: each entry once."""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlmodel import col, select
from sqlmodel.ext.asyncio.session import AsyncSession

from tenants.bulk import insert_new
from tenants.pricing import ADAPTER_METERS, METERS
from tenants.tables import LedgerEntry, Posting

_NEXT = (
    "INSERT INTO posting_head (head_id, number) VALUES (1, 1) "
    "ON CONFLICT (head_id) DO UPDATE SET number = posting_head.number + 1 RETURNING number"
)
_ORDER = {meter: place for place, meter in enumerate((*METERS, *ADAPTER_METERS))}
_POSTINGS_AT_ONCE = 50


@dataclass(frozen=True, slots=True)
class Place:
    """Before the entry with this ``index``, from 0, of posting ``number``. A posting's entries never change, so a place
    means the same for ever."""

    number: int = 1
    index: int = 0


async def number_postings(session: AsyncSession, request_ids: Sequence[str]) -> None:
    """Gives what this transaction charges the next number. Call it last but for the audit log: it holds the head's
    lock until the commit, so that a lower number can't become visible after a higher one."""
    if not request_ids:
        return
    connection = await session.connection()
    number = (await connection.exec_driver_sql(_NEXT)).scalar_one()
    await insert_new(session, Posting, ("number", "request_ids"), [(number, " ".join(request_ids))])


async def entries_from(session: AsyncSession, place: Place, limit: int) -> tuple[list[LedgerEntry], Place]:
    """At most ``limit`` entries from there on, and the place behind them. Fewer: there are no more yet."""
    found: list[LedgerEntry] = []
    while len(found) < limit and (postings := await _postings(session, place.number, limit)):
        entries = await _entries(session, postings)
        for number, of_posting in entries.items():
            rest = of_posting[place.index :][: limit - len(found)]
            found += rest
            whole = place.index + len(rest) >= len(of_posting)  # what is detached has none any more
            place = Place(number + 1) if whole else Place(number, place.index + len(rest))
            if not whole:
                return found, place
    return found, place


async def _postings(session: AsyncSession, number: int, limit: int) -> dict[int, list[str]]:
    """From ``number`` on, by number: at least one, no more than ``limit`` requests if there are several."""
    query = select(Posting).where(col(Posting.number) >= number).order_by(col(Posting.number)).limit(_POSTINGS_AT_ONCE)
    chosen: dict[int, list[str]] = {}
    for posting in (await session.exec(query)).all():
        request_ids = posting.request_ids.split()
        if chosen and sum(map(len, chosen.values())) + len(request_ids) > limit:
            break
        chosen[posting.number] = request_ids
    return chosen


async def _entries(session: AsyncSession, postings: dict[int, list[str]]) -> dict[int, list[LedgerEntry]]:
    """Each posting's, in its order of requests and the order of meters."""
    wanted = [request_id for request_ids in postings.values() for request_id in request_ids]
    of_request: dict[str, list[LedgerEntry]] = {}
    for entry in (await session.exec(select(LedgerEntry).where(col(LedgerEntry.request_id).in_(wanted)))).all():
        of_request.setdefault(entry.request_id, []).append(entry)
    for entries in of_request.values():
        entries.sort(key=lambda entry: _ORDER[entry.meter])
    return {
        number: [entry for request_id in request_ids for entry in of_request.get(request_id, ())]
        for number, request_ids in postings.items()
    }
