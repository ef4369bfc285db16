"""What engines journaled against what the ledger holds: I1, I8, and the journals' part of I11."""

import itertools
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Protocol

from sqlalchemy import Row, String, bindparam, text
from sqlalchemy.ext.asyncio import AsyncConnection

from tenants.audit.findings import Findings
from tenants.audit.replicas import JournaledTime, check_spans
from tenants.meter import RequestContext

LOST = 0
_AT_ONCE = 2000
_ENTRY_NAMES = uuid.UUID("6f1f3f6e-7a55-5f0e-9d6e-1c6a2f0f7e11")  # as published in the README: fixed for ever
_MARGIN_NS = 3600 * 10**9  # records are not journaled in the order in which they finished
_CONTEXT = (
    *("request_id", "attempt", "tenant_id", "key_id", "operation", "model", "base_model", "adapter_version_id"),
    *("flow_class", "rate_card_id", "admitted_unix_ns", "trace_id", "label", "streamed", "num_choices"),
)
USAGE = (
    *("outcome", "prompt_tokens", "cached_tokens", "output_tokens", "queue_ns", "prefill_ns", "decode_ns"),
    *("post_ns", "network_ns", "first_token_ns", "gpu_ns", "finished_unix_ns", "load_ns", "recompute_ns"),
)
_FINISHED = USAGE.index("finished_unix_ns")
_of_context = attrgetter(*_CONTEXT)
_IDS = bindparam("ids", expanding=True, type_=String)  # of none, PostgreSQL would take them for numbers
_RECORDS = text(f"SELECT {', '.join(_CONTEXT + USAGE)} FROM request_record WHERE request_id IN :ids").bindparams(_IDS)
_ENTRIES = text("SELECT request_id, meter, entry_id, quantity FROM ledger_entry WHERE request_id IN :ids").bindparams(
    _IDS
)
_TOTALS = text(
    "SELECT tenant_id, meter, sum(quantity) AS quantity FROM ledger_entry"
    " WHERE occurred_unix_ns >= :since AND meter IN :meters GROUP BY tenant_id, meter"
).bindparams(bindparam("meters", expanding=True))
METERS = ("input_uncached_tokens", "input_cached_tokens", "output_tokens", "requests")


@dataclass(frozen=True, slots=True)
class Journaled:
    """One record of a journal. ``usage`` has the integers of USAGE, in that order. ``due``: it was acknowledged
    before the snapshot, so the ledger must have it."""

    number: int
    due: bool
    context: RequestContext
    usage: tuple[int, ...]

    @property
    def key(self) -> tuple[str, int]:
        return self.context.request_id, self.context.attempt

    @property
    def finished_unix_ns(self) -> int:
        return self.usage[_FINISHED]

    def quantities(self) -> dict[str, int]:
        """By meter, what is billed of it."""
        outcome, prompt, cached, output = self.usage[:4]
        if outcome != 200 and not (outcome == 499 and output):
            return {}
        metered = zip(METERS, (prompt - cached, cached, output, 1), strict=True)
        return {meter: quantity for meter, quantity in metered if quantity}


class Journal(Protocol):
    """One engine's records. What it has of the rest is complete once it was iterated."""

    @property
    def name(self) -> str: ...
    @property
    def is_whole(self) -> bool:
        """It begins with the first record ever; else older segments were deleted."""
        ...

    @property
    def num_entries(self) -> int: ...
    @property
    def broken(self) -> Sequence[str]:
        """What is wrong with its chain."""
        ...

    @property
    def unfit(self) -> Sequence[str]:
        """Records that no ledger takes."""
        ...

    def __iter__(self) -> Iterator[Journaled | JournaledTime]: ...


async def check_journals(
    connection: AsyncConnection, journals: Sequence[Journal], findings: Findings, *, all_journals: bool
) -> None:
    """Reads every journal once."""
    streams = [_Stream(journal) for journal in journals]
    since = max((stream.starts_unix_ns for stream in streams), default=0)
    totals: Counter[tuple[str, str]] = Counter()
    for stream in streams:
        while chunk := list(itertools.islice(stream.records, _AT_ONCE)):
            times = [record for record in chunk if isinstance(record, JournaledTime)]
            await check_spans(connection, stream.journal.name, times, findings)
            requests = [record for record in chunk if isinstance(record, Journaled)]
            booked = await _check_chunk(connection, stream.journal.name, requests, findings)
            for record in booked:
                if record.finished_unix_ns >= since:
                    totals.update({(record.context.tenant_id, meter): n for meter, n in record.quantities().items()})
        _check_chain(stream.journal, findings)
    if all_journals and journals:
        await _check_totals(connection, totals, since, findings)


class _Stream:
    """A journal's records, and from when on it has all."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.starts_unix_ns = 0
        records = iter(journal)
        read = list(itertools.islice(records, 1))  # only now it knows whether it is whole
        if not journal.is_whole:
            while read and isinstance(read[-1], JournaledTime):
                read += itertools.islice(records, 1)
        if read and isinstance(first := read[-1], Journaled) and not journal.is_whole:
            self.starts_unix_ns = first.finished_unix_ns + _MARGIN_NS
        self.records = itertools.chain(read, records)


async def _check_chunk(
    connection: AsyncConnection, journal: str, chunk: Sequence[Journaled], findings: Findings
) -> list[Journaled]:
    """Those that the ledger has."""
    ids = {"ids": list({record.context.request_id for record in chunk})}
    rows = {(row.request_id, row.attempt): row for row in await connection.execute(_RECORDS, ids)}
    entries: dict[str, dict[str, Row]] = {}
    for row in await connection.execute(_ENTRIES, ids):
        entries.setdefault(row.request_id, {})[row.meter] = row
    booked = []
    for record in chunk:
        findings["I8"].checked += 1
        row = rows.get(record.key)
        if row is not None:
            _check_record(f"record {record.number} of {journal}", record, row, findings)
            _check_entries(f"record {record.number} of {journal}", record, entries, findings)
            booked.append(record)
        elif record.due:
            findings["I8"].breach(f"record {record.number} of {journal} was acknowledged and is not in the ledger")
    return booked


def _check_record(where: str, record: Journaled, row: Row, findings: Findings) -> None:
    if row.outcome == LOST == record.usage[0]:
        return  # a gateway that lost its engine may have told of it first, as far as it saw
    expected = (*_of_context(record.context), *record.usage)
    if tuple(row) != expected:
        named = zip(_CONTEXT + USAGE, row, expected, strict=True)
        wrong = [f"{name} is {found}, not {said}" for name, found, said in named if found != said]
        findings["I8"].breach(f"{where}: the receipt's {', '.join(wrong)}")


def _check_entries(where: str, record: Journaled, entries: dict[str, dict[str, Row]], findings: Findings) -> None:
    """A replay would insert what isn't there."""
    found = entries.get(record.context.request_id, {})
    for meter, quantity in record.quantities().items():
        findings["I1"].checked += 1
        entry = found.get(meter)
        if entry is None:
            findings["I8"].breach(f"{where} would be charged for {meter}, which the ledger lacks")
        elif entry.entry_id != _entry_id(record.context.request_id, meter):
            findings["I8"].breach(f"{where} would be charged for {meter} again: its entry has another id")
        elif entry.quantity != quantity:
            findings["I1"].breach(f"{where}: {entry.quantity} {meter} in the ledger, {quantity} in the journal")


def _check_chain(journal: Journal, findings: Findings) -> None:
    findings["I11"].checked += journal.num_entries
    for words in journal.broken:
        findings["I11"].breach(f"journal {journal.name}: {words}")
    for words in journal.unfit:
        findings["I1"].breach(f"journal {journal.name}: {words}")


async def _check_totals(connection: AsyncConnection, totals: Counter, since: int, findings: Findings) -> None:
    """What the ledger has and no journal."""
    rows: Iterable[Any] = await connection.execute(_TOTALS, {"since": since, "meters": METERS})
    billed = {(row.tenant_id, row.meter): int(row.quantity) for row in rows}
    for tenant_id, meter in sorted(billed.keys() | totals.keys()):
        charged, journaled = billed.get((tenant_id, meter), 0), totals[tenant_id, meter]
        if charged != journaled:
            findings["I1"].breach(f"{tenant_id}: {charged} {meter} in the ledger, {journaled} in the journals")


def _entry_id(request_id: str, meter: str) -> str:
    return str(uuid.uuid5(_ENTRY_NAMES, f"{request_id}/{meter}"))
