"""What adapters are charged by the hour of UTC: keeping their files, and their place on devices.

Storage is counted from the rows of versions, from creation to deletion. Residency is what somebody saw who looked every
few seconds: time nobody looked is not charged. An hour is booked once it is over, each version and meter once for ever
(the names of entries follow from version and hour), at the prices in force when the hour began.
"""

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from sqlmodel import col, or_, select
from sqlmodel.ext.asyncio.session import AsyncSession

from tenants.bulk import add_up, insert_new, insert_telling
from tenants.database import locked
from tenants.ledger import entry_id
from tenants.postings import number_postings
from tenants.pricing import MEGABYTE, AdapterMeter, RateCard
from tenants.repositories import RateCardRepository
from tenants.tables import AdapterMeterHead, AdapterResidency, AdapterVersion, LedgerEntry

HOUR_NS = 3600 * 10**9
LOOK_NS = 10 * 10**9  # how often somebody looks what is resident
SETTLED_NS = 60 * 10**9  # after an hour's end, what was made or deleted in it is committed
MAX_HOURS = 24  # booked in one transaction
_STORAGE: AdapterMeter = "adapter_storage_byte_seconds"
_RESIDENCY: AdapterMeter = "adapter_residency_byte_seconds"
_NS = 10**9
_HEAD = 1
_NAMESPACE = uuid.UUID("0d7c7b1e-52f7-5f7c-9a50-4a3df1c0b5f2")  # ours, fixed for ever: entry ids depend on it
_ENTRY = (
    *("entry_id", "request_id", "tenant_id", "key_id", "meter", "model", "base_model", "flow_class"),
    *("rate_card_id", "quantity", "unit_price_picousd", "amount_picousd", "occurred_unix_ns"),
)


@dataclass(frozen=True, slots=True)
class _Reading:
    """Byte-seconds of a version in an hour, by meter."""

    version: AdapterVersion
    quantities: Mapping[AdapterMeter, int]


class AdapterHours:
    """Bound to a session, never committing."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def book(self, now_unix_ns: int) -> int:
        """The hours that are over, at most MAX_HOURS of them; how many entries were new. It begins with the hour in
        which it was first called."""
        head = await self._lock(now_unix_ns)
        last = min((now_unix_ns - SETTLED_NS) // HOUR_NS - 1, head.hour + MAX_HOURS)
        new: list[tuple[str, str]] = []
        for hour in range(head.hour + 1, last + 1):
            new += await self._book_hour(hour, (hour + 1) * HOUR_NS)
            head.hour = hour
        self._session.add(head)
        await self._session.flush()
        await number_postings(self._session, _bookings(new))
        return len(new)

    async def close_tenant(self, tenant_id: str, now_unix_ns: int) -> list[str]:
        """Books what a tenant owes up to now, before its versions are forgotten for ever; what is to be numbered
        (postings.py) when all else of the transaction is done."""
        head = await self._lock(now_unix_ns)
        new: list[tuple[str, str]] = []
        for hour in range(head.hour + 1, now_unix_ns // HOUR_NS + 1):
            new += await self._book_hour(hour, min((hour + 1) * HOUR_NS, now_unix_ns), tenant_id)
        return _bookings(new)

    async def look(self, now_unix_ns: int) -> int:
        """For how long the caller's look counts: 0 when another has looked just now, or nobody for long."""
        head = await self._lock(now_unix_ns)
        since = now_unix_ns - head.looked_unix_ns
        if 0 <= since < LOOK_NS * 9 // 10:
            return 0
        head.looked_unix_ns = now_unix_ns
        self._session.add(head)
        await self._session.flush()
        return since if 0 < since <= 3 * LOOK_NS else 0

    async def add_residency(self, replicas: Mapping[str, int], now_unix_ns: int, since_ns: int) -> None:
        """So many replicas had these versions on their devices for the last ``since_ns``."""
        rows = [(version, now_unix_ns // HOUR_NS, num * since_ns) for version, num in sorted(replicas.items())]
        await add_up(self._session, AdapterResidency, ("adapter_version_id", "hour"), ("resident_ns",), rows)

    async def _book_hour(self, hour: int, end_ns: int, tenant_id: str | None = None) -> list[tuple[str, str]]:
        """The new entries' own names and those of what they are of."""
        start_ns = hour * HOUR_NS
        card = _in_force(await RateCardRepository(self._session).list_all(), start_ns)
        if card is None:
            return []
        readings = await self._readings(start_ns, end_ns, tenant_id)
        rows = sorted(row for reading in readings for row in _entries(reading, card, start_ns))
        new = await insert_telling(self._session, LedgerEntry, _ENTRY, rows, ("entry_id",))
        return [row[:2] for row in rows if row[:1] in new]

    async def _readings(self, start_ns: int, end_ns: int, tenant_id: str | None) -> list[_Reading]:
        deleted = col(AdapterVersion.deleted_unix_ns)
        alive = select(AdapterVersion).where(
            col(AdapterVersion.created_unix_ns) < end_ns, or_(deleted.is_(None), deleted > start_ns)
        )
        if tenant_id is not None:
            alive = alive.where(AdapterVersion.tenant_id == tenant_id)
        seen = select(AdapterResidency).where(AdapterResidency.hour == start_ns // HOUR_NS)
        resident = {row.adapter_version_id: row.resident_ns for row in (await self._session.exec(seen)).all()}
        return [
            _Reading(
                version,
                {
                    _STORAGE: stored(version, start_ns, end_ns),
                    _RESIDENCY: whole(version.size_bytes * resident.get(version.adapter_version_id, 0)),
                },
            )
            for version in (await self._session.exec(alive)).all()
        ]

    async def _lock(self, now_unix_ns: int) -> AdapterMeterHead:
        """The head, for this transaction alone; made by the first call."""
        query = select(AdapterMeterHead)
        head = (await locked(self._session, query)).first()
        if head is None:
            row = (_HEAD, now_unix_ns // HOUR_NS - 1, now_unix_ns)
            await insert_new(self._session, AdapterMeterHead, ("head_id", "hour", "looked_unix_ns"), [row])
            head = (await locked(self._session, query)).one()
        return head


def stored(version: AdapterVersion, start_ns: int, end_ns: int) -> int:
    """Byte-seconds that its file was kept in [start, end), in whole megabyte-seconds; what one hour cuts off, the next
    one has: over its life nothing is lost but less than one of them."""

    def until(at_ns: int) -> int:
        end = at_ns if version.deleted_unix_ns is None else min(at_ns, version.deleted_unix_ns)
        return whole(version.size_bytes * max(0, end - version.created_unix_ns))

    return until(end_ns) - until(start_ns)


def _bookings(new: Sequence[tuple[str, str]]) -> list[str]:
    return sorted({booking for _, booking in new})


def whole(byte_ns: int) -> int:
    """Byte-seconds, cut to megabyte-seconds."""
    return byte_ns // (_NS * MEGABYTE) * MEGABYTE


def _entries(reading: _Reading, card: RateCard, start_ns: int) -> Iterator[tuple]:
    version = reading.version
    booking = str(uuid.uuid5(_NAMESPACE, f"{version.adapter_version_id}/{start_ns // HOUR_NS}"))
    sold = {meter for meter, _, _ in card.prices}
    for meter, quantity in reading.quantities.items():
        if quantity and meter in sold:
            price = card.price(meter, version.base_model, "")
            yield (
                *(
                    entry_id(booking, meter),
                    booking,
                    version.tenant_id,
                    "",
                    meter,
                    version.name,
                    version.base_model,
                    "",
                ),
                *(card.rate_card_id, quantity, price, quantity // MEGABYTE * price),
                max(start_ns, version.created_unix_ns),
            )


def _in_force(cards: Sequence[RateCard], unix_ns: int) -> RateCard | None:
    return next((card for card in reversed(cards) if card.effective_unix_ns <= unix_ns), None)
