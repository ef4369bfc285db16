"""The audit: books that hold pass, and each planted breach is found under its own number."""

import random
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import msgspec
import pytest

from tenants import replica_times
from tenants.audit import Audit, Journaled, JournaledTime, audit, begin_snapshot
from tenants.audit.journals import USAGE
from tenants.audit.replicas import SPAN
from tenants.audit_log import SERVER, AuditLog, Change, Head
from tenants.invoices.credit_notes import CreditNoteRepository
from tenants.ledger import Ledger
from tenants.meter import RequestContext
from tenants.pricing import METERS, RateCard, default_prices
from tenants.replica_times import ReplicaSpan
from tenants.settled import SettledRequest
from tenants.tables import RateCardItem, RateCardVersion, RequestRecord, Tenant
from tests.invoicing import issue
from tests.tampering import tamper

START_NS = 1_900_000_000 * 10**9
SECOND = 10**9
OUTCOMES = (200, 200, 200, 499, 400, 503, 0)
PRICES = {key: price * (10_000 if key[0] in METERS else 1) for key, price in default_prices().items()}


@dataclass
class Records:
    """An engine's journal, as a list."""

    records: list[Journaled | JournaledTime]
    name: str = "e0"
    is_whole: bool = True
    num_entries: int = 0
    broken: list[str] = field(default_factory=list)
    unfit: list[str] = field(default_factory=list)

    def __iter__(self) -> Iterator[Journaled | JournaledTime]:
        for record in self.records:
            self.num_entries += 1
            yield record


SPANS = [
    ReplicaSpan(
        "e0", 7, n, "smollm2", START_NS + n * SECOND, SECOND, 500_000_000, 0, 0, 0, 499_000_000, 1_000_000, 9, 9
    )
    for n in range(100)
]


def requests(card_of, num: int = 60) -> list[SettledRequest]:
    """Of two tenants; the second request of a conversation finds what the first one wrote."""
    draw, made, written = random.Random(4), [], {}
    for number in range(num):
        tenant = draw.choice(["ten_a", "ten_b"])
        prompt, output, outcome = draw.randrange(1, 500), draw.randrange(40), draw.choice(OUTCOMES)
        cached = draw.randrange(min(prompt, written.get(tenant, 0)) + 1)
        written[tenant] = max(written.get(tenant, 0), prompt + output)
        admitted_ns = START_NS + number * SECOND
        context = RequestContext(
            tenant_id=tenant,
            key_id=f"key_{tenant[-1]}",
            request_id=str(uuid.UUID(int=number + 1)),
            attempt=0,
            base_model="smollm2",
            model="smollm2",
            adapter_version_id="",
            flow_class=draw.choice(["interactive", "standard"]),
            rate_card_id=card_of(admitted_ns),
            admitted_unix_ns=admitted_ns,
            operation="chat",
            label=f"mine {number}",
        )
        durations = (1, 2, 3, 4, 5, 6, 7)
        made.append(SettledRequest(context, outcome, prompt, cached, output, *durations, admitted_ns + SECOND))
    return made


def journaled(settled: list[SettledRequest]) -> list[Journaled]:
    return [
        Journaled(number, True, each.context, tuple(getattr(each, name) for name in USAGE))
        for number, each in enumerate(settled, 1)
    ]


async def add(session, card: RateCard) -> None:
    """A card with an id of our own choice."""
    numbers = {"version": card.version, "effective_unix_ns": card.effective_unix_ns, "created_unix_ns": 0}
    session.add(RateCardVersion(rate_card_id=card.rate_card_id, **numbers))
    await session.flush()
    for (meter, model, flow_class), price in card.prices.items():
        item = {"meter": meter, "model": model, "flow_class": flow_class, "price_picousd": price}
        session.add(RateCardItem(rate_card_id=card.rate_card_id, **item))


@dataclass
class Books:
    """An installation's ledger and journal, as its own code writes them: a price change lies in the middle."""

    settled: list[SettledRequest]
    journal: Records

    @classmethod
    async def write(cls, database) -> "Books":
        change_ns = START_NS + 30 * SECOND
        dearer = PRICES | {("output_tokens", "*", "interactive"): 1_234_567_891}
        cards = [RateCard("rc_1", 1, 0, PRICES), RateCard("rc_2", 2, change_ns, dearer)]
        settled = requests(lambda at_ns: cards[at_ns >= change_ns].rate_card_id)
        async with database.transaction() as session:
            for card in cards:
                await add(session, card)
            await Ledger().post(session, settled, {card.rate_card_id: card for card in cards})
            await replica_times.post(session, SPANS)
            session.add_all(Tenant(tenant_id=f"ten_{x}", name=x, created_unix_ns=0, changed_unix_ns=0) for x in "ab")
            await AuditLog(session).append(SERVER, Change("rate_card.create", "rc_1", None, {"version": 1}))
        await cls._invoice(database)
        times = [
            JournaledTime(100 + n, True, tuple(getattr(each, name) for name in SPAN)) for n, each in enumerate(SPANS)
        ]
        return cls(settled, Records([*journaled(settled), *times]))

    @staticmethod
    async def _invoice(database) -> None:
        """March of both tenants; of the first one's some is given back, which its April takes off."""
        march = await issue(database, "ten_a", "2030-03")
        await issue(database, "ten_b", "2030-03")
        async with database.transaction() as session:
            dearest = max(march.lines, key=lambda line: line.amount_cents)
            await CreditNoteRepository(session).issue(march, {dearest.number: 1}, "a slow day", START_NS)
        await issue(database, "ten_a", "2030-04")

    async def audited(self, database, *journals: Records, known=(), leave_out=(), **how) -> dict[str, list[str]]:
        """What was found: invariant → its breaches; those that hold are left out."""
        async with database.session() as session:
            await begin_snapshot(session)
            found: Audit = await audit(session, journals or [self.journal], known, **how)
        unchecked = {finding.invariant for finding in found.findings if not finding.checked}
        assert unchecked <= set(leave_out), unchecked
        return {finding.invariant: finding.examples for finding in found.findings if finding.breaches}


def test_books_that_the_product_wrote_hold_whatever_the_outcomes_and_over_a_price_change(with_database):
    async def body(database):
        books = await Books.write(database)
        assert {each.outcome for each in books.settled} == set(OUTCOMES)
        assert any(each.cached_tokens for each in books.settled)
        assert await books.audited(database) == {}

    with_database(body)


PAID = "(SELECT request_id FROM request_record WHERE outcome = 200 ORDER BY request_id LIMIT 1)"
FAILED = "(SELECT request_id FROM request_record WHERE outcome = 503 ORDER BY request_id LIMIT 1)"
AN_ENTRY = (
    "INSERT INTO ledger_entry (entry_id, request_id, tenant_id, key_id, meter, model, base_model, flow_class,"
    " rate_card_id, quantity, unit_price_picousd, amount_picousd, occurred_unix_ns) SELECT {id}, request_id, tenant_id,"
    " key_id, 'requests', model, base_model, flow_class, rate_card_id, 1, 10000000000, 10000000000, finished_unix_ns"
    " FROM request_record WHERE request_id = {of}"
)
COLUMNS = [column.name for column in RequestRecord.metadata.tables["request_record"].columns]


def a_copy_of(request: str, **changes: str) -> str:
    """Another receipt, but for these columns the same."""
    values = ", ".join(changes.get(name, name) for name in COLUMNS)
    return (
        f"INSERT INTO request_record ({', '.join(COLUMNS)}) SELECT {values} FROM request_record"
        f" WHERE request_id = {request}"
    )


PLANTED = {
    "a charge that is larger than its quantity says": (
        f"UPDATE ledger_entry SET amount_picousd = amount_picousd + 1 WHERE meter = 'requests' AND request_id = {PAID}",
        {"I4": "1 × 10000000000 is not 10000000001", "I7": "are not those of its receipt"},
    ),
    "a charge at another price than the card's": (
        "UPDATE ledger_entry SET unit_price_picousd = 7, amount_picousd = quantity * 7"
        f" WHERE meter = 'output_tokens' AND request_id = {PAID}",
        {"I4": "at 7 picousd: card", "I7": "are not those of its receipt"},
    ),
    "a price that was changed after it was charged": (
        "UPDATE rate_card_item SET price_picousd = price_picousd + 1 WHERE rate_card_id = 'rc_2'"
        " AND meter = 'input_uncached_tokens'",
        {"I4": "card rc_2 says"},
    ),
    "a version that came into force before it was said to": (
        "UPDATE rate_card SET effective_unix_ns = effective_unix_ns - 5000000000 WHERE rate_card_id = 'rc_2'",
        {"I4": "priced by rc_1"},
    ),
    "more tokens in the ledger than in the journal": (
        "UPDATE ledger_entry SET quantity = quantity + 5, amount_picousd = amount_picousd + 5 * unit_price_picousd"
        f" WHERE meter = 'output_tokens' AND request_id = {PAID}",
        {"I1": "in the journal", "I7": "are not those of its receipt"},
    ),
    "a request that is charged and that no engine ever ran": (
        a_copy_of(PAID, request_id="'forged'", outcome="499", cached_tokens="0", output_tokens="1")
        + "; "
        + AN_ENTRY.format(id="'forged'", of="'forged'"),
        {"I1": "requests in the ledger", "I7": "request forged (499): its 1 entries"},
    ),
    "a request that was resolved twice": (
        a_copy_of(PAID, attempt="attempt + 1"),
        {"I5": "was resolved 2 times"},
    ),
    "a negative quantity": (
        f"UPDATE request_record SET post_ns = -4 WHERE request_id = {FAILED}",
        {"I6": "post_ns is -4", "I8": "post_ns is -4, not 4"},
    ),
    "a charge for a request of ours that failed": (
        AN_ENTRY.format(id="'planted'", of=FAILED),
        {"I7": "is charged for requests, and no billed receipt", "I1": "requests in the ledger"},
    ),
    "a charge that was taken away": (
        f"DELETE FROM ledger_entry WHERE meter = 'output_tokens' AND request_id = {PAID}",
        {"I7": "are not those of its receipt", "I8": "which the ledger lacks", "I1": "output_tokens in the ledger"},
    ),
    "a charge to another tenant": (
        f"UPDATE ledger_entry SET tenant_id = 'ten_c' WHERE meter = 'requests' AND request_id = {PAID}",
        {"I7": "no billed receipt says so", "I1": "ten_c: 1 requests in the ledger, 0 in the journals"},
    ),
    "a receipt that says billed where nothing was": (
        f"UPDATE request_record SET billed = NOT billed WHERE request_id = {FAILED}",
        {"I7": "ended with 503"},
    ),
    "a charge under another name, so that a replay would charge again": (
        f"UPDATE ledger_entry SET entry_id = 'other' WHERE meter = 'requests' AND request_id = {PAID}",
        {"I8": "charged for requests again"},
    ),
    "a receipt that is gone": (
        f"DELETE FROM request_record WHERE request_id = {FAILED}",
        {"I8": "was acknowledged and is not in the ledger"},
    ),
    "a receipt that was changed": (
        f"UPDATE request_record SET label = 'nothing' WHERE request_id = {PAID}",
        {"I8": "label is nothing, not mine"},
    ),
    "more cached tokens than the prompt has": (
        f"UPDATE request_record SET cached_tokens = prompt_tokens + 9000 WHERE request_id = {FAILED}",
        {"I9": "prompt tokens", "I8": "cached_tokens is"},
    ),
    "an invoice's line that is more than the ledger has": (
        "UPDATE invoice_line SET amount_picousd = '99999999999999' WHERE kind = 'usage' AND number = 1",
        {"I2": "is 99999999999999 picousd, in the ledger", "I3": "its total is"},
    ),
    "an invoice of what the ledger lost": (
        "DELETE FROM ledger_entry WHERE meter = 'input_cached_tokens'",
        {"I2": "picousd, in the ledger 0"},
    ),
    "two invoices of one day": (
        "UPDATE invoice SET start_unix_ns = start_unix_ns - 86400000000000 WHERE period = '2030-04-01'",
        {"I2": "of ten_a overlap"},
    ),
    "a total that is a cent too high": (
        "UPDATE invoice SET total_cents = total_cents + 1 WHERE number = 1",
        {"I3": "cents, its total is"},
    ),
    "a line that is rounded the wrong way": (
        "UPDATE invoice_line SET amount_cents = amount_cents + 1 WHERE kind = 'usage' AND number = 1;"
        " UPDATE invoice_line SET amount_cents = amount_cents - 1 WHERE kind = 'rounding'",
        {"I3": "are shown as"},
    ),
    "an invoice that is gone": (
        "DELETE FROM invoice_line WHERE invoice_id = (SELECT invoice_id FROM invoice WHERE number = 2);"
        " DELETE FROM invoice WHERE number = 2",
        {"I3": "2 of 3 numbered invoices are there"},
    ),
    "a credit note that gives back more than was invoiced": (
        "UPDATE credit_note_line SET amount_cents = 1000000; UPDATE credit_note SET total_cents = 1000000;"
        " UPDATE invoice_line SET amount_cents = -1000000 WHERE kind = 'credit'",
        {"I3": "which has less"},
    ),
    "a credit note that was taken off for more than it is": (
        "UPDATE invoice_line SET amount_cents = -2 WHERE kind = 'credit'",
        {"I3": "is not credit note"},
    ),
    "time of a replica that no account has": (
        "UPDATE replica_time SET idle_ns = idle_ns - 490000000 WHERE number < 10",
        {"I10": "e0 since 7: its accounts are", "I8": "was changed in the database"},
    ),
    "a second of a replica that is gone": (
        "DELETE FROM replica_time WHERE number = 3",
        {"I10": "99 of 100 time records", "I8": "a second's accounts, is not in the database"},
    ),
    "an administrative write that was changed": (
        "UPDATE audit_event SET target = 'rc_9'",
        {"I11": "audit log: event 1 was changed"},
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_breach_is_found(with_database, name: str):
    statements, expected = PLANTED[name]

    async def body(database):
        books = await Books.write(database)
        await tamper(database, *statements.split("; "))
        found = await books.audited(database)
        assert expected.keys() <= found.keys(), found
        for invariant, words in expected.items():
            assert any(words in breach for breach in found[invariant]), found

    with_database(body)


# ── journals ─────────────────────────────────────────────────────────────────────────────────────


def test_a_record_on_its_way_is_no_breach_and_one_that_was_acknowledged_and_is_missing_is(with_database):
    async def body(database):
        books = await Books.write(database)
        last = next(each for each in reversed(books.journal.records) if isinstance(each, Journaled))
        coming = replace(last, number=99, due=False, context=msgspec.structs.replace(last.context, request_id="coming"))
        assert await books.audited(database, Records([*books.journal.records, coming])) == {}
        found = await books.audited(database, Records([*books.journal.records, replace(coming, due=True)]))
        assert list(found) == ["I8"]

    with_database(body)


def test_the_journal_of_an_engine_that_had_no_request_is_audited(with_database):
    async def body(database):
        books = await Books.write(database)
        idle = Records([each for each in books.journal.records if isinstance(each, JournaledTime)], "idle")
        assert await books.audited(database, books.journal, idle) == {}

    with_database(body)


def test_a_record_that_says_otherwise_than_the_receipt_is_found(with_database):
    async def body(database):
        books = await Books.write(database)
        records = list(books.journal.records)
        at = next(n for n, record in enumerate(records) if isinstance(record, Journaled) and record.usage[0] == 200)
        usage = dict(zip(USAGE, records[at].usage, strict=True)) | {"output_tokens": 900}
        records[at] = replace(records[at], usage=tuple(usage.values()))
        found = await books.audited(database, Records(records))
        assert any("output_tokens is" in words for words in found["I8"])
        assert any("900" in words for words in found["I1"])

    with_database(body)


def test_a_request_that_was_lost_may_be_told_of_first_by_the_gateway_as_far_as_it_saw(with_database):
    async def body(database):
        books = await Books.write(database)
        records = list(books.journal.records)
        lost = [n for n, record in enumerate(records) if isinstance(record, Journaled) and record.usage[0] == 0]
        for at in lost:
            records[at] = replace(records[at], usage=(0, 1, 0, 1, *records[at].usage[4:]))
        assert await books.audited(database, Records(records)) == {}
        billed = dict(zip(USAGE, records[lost[0]].usage, strict=True)) | {"outcome": 200}
        records[lost[0]] = replace(records[lost[0]], usage=tuple(billed.values()))
        assert "I8" in await books.audited(database, Records(records))

    with_database(body)


def test_what_was_billed_before_the_oldest_record_that_is_kept_is_not_expected_in_the_journals(with_database):
    async def body(database):
        books = await Books.write(database)
        late = Records(books.journal.records[20:])
        assert "I1" in await books.audited(database, late)
        assert await books.audited(database, replace(late, is_whole=False)) == {}
        assert await books.audited(database, late, all_journals=False) == {}

    with_database(body)


def test_a_broken_chain_and_a_record_that_no_ledger_takes_are_breaches(with_database):
    async def body(database):
        books = await Books.write(database)
        journal = replace(books.journal, broken=["journal record 3: is missing"], unfit=["record 4 is in no ledger"])
        found = await books.audited(database, journal)
        assert found["I11"] == ["journal e0: journal record 3: is missing"]
        assert found["I1"] == ["journal e0: record 4 is in no ledger"]

    with_database(body)


# ── prefixes ─────────────────────────────────────────────────────────────────────────────────────


def test_cached_tokens_that_nobody_of_the_tenant_wrote_are_found(with_database):
    """The other tenant's prompt was long enough; a request that had not ended may have been the one that wrote."""

    async def body(database):
        async with database.transaction() as session:
            await add(session, card := RateCard("rc_1", 1, 0, PRICES))
            await AuditLog(session).append(SERVER, Change("rate_card.create", "rc_1", None, {}))
            base = replace(requests(lambda _: "rc_1", 1)[0], outcome=200, prompt_tokens=400, cached_tokens=0)

            def one(number: int, tenant: str, cached: int, after_s: int, lasts_s: int = 1) -> SettledRequest:
                admitted = START_NS + after_s * SECOND
                fields = {"request_id": f"r{number}", "tenant_id": tenant, "admitted_unix_ns": admitted}
                context = msgspec.structs.replace(base.context, **fields)
                end_ns = admitted + lasts_s * SECOND
                return replace(base, context=context, cached_tokens=cached, finished_unix_ns=end_ns)

            settled = [
                one(1, "ten_a", 0, 0),
                one(2, "ten_a", 100, 1),
                one(3, "ten_b", 100, 2, lasts_s=3),
                one(4, "ten_b", 0, 3),
                one(5, "ten_c", 100, 9),
            ]
            await Ledger().post(session, settled, {"rc_1": card})
        found = await Books(settled, Records(journaled(settled))).audited(database, leave_out=["I2", "I3", "I10"])
        assert found == {"I9": ["request r5: 100 cached tokens that no request of its namespace wrote before"]}

    with_database(body)


def test_a_head_that_was_printed_before_must_lie_on_the_audit_log(with_database):
    async def body(database):
        books = await Books.write(database)
        assert "I11" in await books.audited(database, known=[Head(1, "0" * 64)])

    with_database(body)
