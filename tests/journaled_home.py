"""A home as an engine and its gateways leave it: a journal, a ledger and the secrets that seal one for the other."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from uuid import uuid4

import msgspec

import migrations
from engine import wire
from engine.journal import Journal
from gateway.settings import default_database
from tenants.database import Database
from tenants.ledger import Ledger
from tenants.meter import RequestContext, seal, unseal
from tenants.pricing import default_prices
from tenants.repositories import RateCardRepository
from tenants.secrets import Secrets
from tenants.settled import SettledRequest

_FIELDS = [name for name in wire.UsageRecord.__struct_fields__ if name not in ("request_id", "context")]


class JournaledHome:
    """``run`` journals requests, ``book`` delivers them to the ledger, ``acknowledge`` tells the journal so."""

    def __init__(self, home: Path, engine_id: str = "e0-tiny", segment_bytes: int = 1 << 20) -> None:
        home.mkdir(mode=0o700, exist_ok=True)
        self.home, self.url = home, default_database(home)
        self.secrets = Secrets.load_or_create(home / "secrets.json")
        self.journal = Journal(home / "engines" / engine_id, segment_bytes)
        if not (home / "tenora.db").exists():
            migrations.upgrade(self.url)
            self._publish()

    def _publish(self) -> None:
        async def publish(database: Database) -> None:
            async with database.transaction() as session:
                self.card = await RateCardRepository(session).publish(default_prices(), 0, 0)

        self._with_database(publish)

    def _with_database(self, body) -> None:
        async def main() -> None:
            database = Database(self.url)
            await database.start()
            try:
                await body(database)
            finally:
                await database.close()

        asyncio.run(main())

    def run(self, num: int, group: int = 100, **changes) -> list[bytes]:
        """So many answered requests; their payloads."""
        payloads = [self._payload(**changes) for _ in range(num)]
        for start in range(0, num, group):
            self.journal.append(payloads[start : start + group])
        return payloads

    def _payload(self, outcome: int = 200, secrets: Secrets | None = None) -> bytes:
        now_ns = time.time_ns()
        context = RequestContext(
            tenant_id="ten_a",
            key_id="key_a",
            request_id=str(uuid4()),
            attempt=0,
            base_model="tiny",
            model="tiny",
            adapter_version_id="",
            flow_class="standard",
            rate_card_id=self.card.rate_card_id,
            admitted_unix_ns=now_ns,
            operation="completions",
        )
        sealed = seal(context, (secrets or self.secrets).context_key)
        numbers = (outcome, 7, 0, 5, 1, 2, 3, 4, 5, 6, 7, now_ns + 1000)
        return msgspec.msgpack.encode(wire.UsageRecord(f"{context.request_id}:0", sealed, *numbers))

    def book(self, payloads: Sequence[bytes]) -> int:
        """How many were new."""
        settled = [self._settled(payload) for payload in payloads]
        new: list[int] = []

        async def post(database: Database) -> None:
            for start in range(0, len(settled), 5000):
                async with database.transaction() as session:
                    new.append(await Ledger().post(session, settled[start : start + 5000], {}))

        self._with_database(post)
        return sum(new)

    def _settled(self, payload: bytes) -> SettledRequest:
        record = wire.read_record(payload)
        assert isinstance(record, wire.UsageRecord)
        context = unseal(record.context, *self.secrets.every_context_key)
        return SettledRequest(context, **{name: getattr(record, name) for name in _FIELDS})

    def acknowledge(self) -> None:
        """All that is journaled."""
        (last,) = self.journal.entries(self.journal.last - 1, 1)
        assert self.journal.acknowledge(last.number, last.hash)
        self.journal.save_ack()
