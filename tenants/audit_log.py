"""The audit log: every administrative write, in the transaction that makes it, in one hash chain.

An event's hash covers all its fields and the hash before it, so that a changed, removed, inserted or reordered row
breaks the chain there. Rows cut off at the end show against the head; a log rewritten as a whole shows against a
head that somebody printed and kept.
"""

import hashlib
import json
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sqlmodel import col, select
from sqlmodel.ext.asyncio.session import AsyncSession

from tenants.bulk import insert_new
from tenants.database import locked
from tenants.tables import AuditEvent, AuditHead

NO_HASH = "0" * 64
_TAG = b"tenora-audit\x01"
_HEAD_ID = 1
_PAGE = 1000


@dataclass(frozen=True, slots=True)
class Actor:
    """Who did it: an operator's key, or (SERVER) the program itself at its start."""

    key_id: str
    name: str


SERVER = Actor("", "server")


@dataclass(frozen=True, slots=True)
class Change:
    """What was done to what, and how it was before and after; None = not there. Never with a secret in it."""

    action: str
    target: str
    before: Mapping[str, Any] | None
    after: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class Head:
    """The last event's number and hash; (0, NO_HASH) of an empty log."""

    number: int
    hash: str


class AuditLog:
    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def append(self, actor: Actor, change: Change) -> AuditEvent:
        """The next event. Call it last in the transaction: it holds the log's lock until the commit."""
        head = await self._lock()
        event = AuditEvent(
            number=head.number + 1,
            occurred_unix_ns=time.time_ns(),
            actor_key_id=actor.key_id,
            actor=actor.name,
            action=change.action,
            target=change.target,
            before=_canonical(change.before),
            after=_canonical(change.after),
            prev_hash=head.hash,
            hash="",
        )
        event.hash = event_hash(event)
        head.number, head.hash = event.number, event.hash
        self._session.add(event)
        self._session.add(head)
        await self._session.flush()
        return event

    async def page(self, after: int, limit: int) -> list[AuditEvent]:
        """At most ``limit`` events with a higher number, in their order."""
        query = select(AuditEvent).where(col(AuditEvent.number) > after).order_by(col(AuditEvent.number))
        return list((await self._session.exec(query.limit(limit))).all())

    async def head(self) -> Head:
        row = (await self._session.exec(select(AuditHead))).first()
        return Head(row.number, row.hash) if row else Head(0, NO_HASH)

    async def verify(self, known: Iterable[Head] = ()) -> list[str]:
        """Every breach found, in words; empty when the chain is whole and each ``known`` head lies on it."""
        promised = {head for head in [await self.head(), *known] if head.number}
        breaches: list[str] = []
        last = Head(0, NO_HASH)
        async for event in self._events():
            breaches += _breaches(event, last)
            last = Head(event.number, event.hash)
            promised.discard(last)
        breaches += [f"event {head.number} with hash {head.hash[:12]}… is not on the chain" for head in promised]
        if last.number > (await self.head()).number:  # read again: what was written meanwhile has moved it
            breaches.append(f"event {last.number} was not written through the log")
        return breaches

    async def _events(self) -> AsyncIterator[AuditEvent]:
        page = await self.page(-1, _PAGE)
        while page:
            for event in page:
                yield event
            self._session.expunge_all()
            page = await self.page(page[-1].number, _PAGE)

    async def _lock(self) -> AuditHead:
        """The head, for this transaction alone; made at the first event."""
        query = select(AuditHead)
        head = (await locked(self._session, query)).first()
        if head is None:
            await insert_new(self._session, AuditHead, ("head_id", "number", "hash"), [(_HEAD_ID, 0, NO_HASH)])
            head = (await locked(self._session, query)).one()
        return head


def event_hash(event: AuditEvent) -> str:
    """SHA-256, hex, over every field but the hash itself, each with its length before it."""
    fields = (
        str(event.number),
        str(event.occurred_unix_ns),
        event.actor_key_id,
        event.actor,
        event.action,
        event.target,
        event.before,
        event.after,
        event.prev_hash,
    )
    digest = hashlib.sha256(_TAG)
    for field in map(str.encode, fields):
        digest.update(len(field).to_bytes(4, "big") + field)
    return digest.hexdigest()


def _breaches(event: AuditEvent, last: Head) -> list[str]:
    if event.number != last.number + 1:
        return [f"event {last.number + 1} is missing: event {event.number} follows"]
    if event.prev_hash != last.hash:
        return [f"event {event.number} does not follow the one before it"]
    if event.hash != event_hash(event):
        return [f"event {event.number} was changed"]
    return []


def _canonical(value: Mapping[str, Any] | None) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
