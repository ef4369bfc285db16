"""The audit: books that hold pass, and each planted breach is found under its own number."""

import random
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import msgspec
import pytest
from sqlalchemy import text

from tenants.audit import Audit, Journaled, audit, begin_snapshot
from tenants.audit.journals import USAGE
from tenants.audit_log import SERVER, AuditLog, Change, Head
from tenants.ledger import Ledger, SettledRequest
from tenants.meter import RequestContext
from tenants.pricing import RateCard, default_prices
from tenants.tables import RateCardItem, RateCardVersion

START_NS = 1_900_000_000 * 10**9
SECOND = 10**9
OUTCOMES = (200, 200, 200, 499, 400, 503, 0)


@dataclass
class Records:
    """An engine's journal, as a list."""

    records: list[Journaled]
    name: str = "e0"
    is_whole: bool = True
    num_entries: int = 0
    broken: list[str] = field(default_factory=list)
    unfit: list[str] = field(default_factory=list)

    def __iter__(self) -> Iterator[Journaled]:
        for record in self.records:
            self.num_entries += 1
            yield record


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
        dearer = default_prices() | {("output_tokens", "*", "interactive"): 123_456}
        cards = [RateCard("rc_1", 1, 0, default_prices()), RateCard("rc_2", 2, change_ns, dearer)]
        settled = requests(lambda at_ns: cards[at_ns >= change_ns].rate_card_id)
        async with database.transaction() as session:
            for card in cards:
                await add(session, card)
            await Ledger().post(session, settled, {card.rate_card_id: card for card in cards})
            await AuditLog(session).append(SERVER, Change("rate_card.create", "rc_1", None, {"version": 1}))
        return cls(settled, Records(journaled(settled)))

    async def audited(self, database, *journals: Records, known=(), **how) -> dict[str, list[str]]:
        """What was found: invariant → its breaches; those that hold are left out."""
        async with database.session() as session:
            await begin_snapshot(session)
            found: Audit = await audit(session, journals or [self.journal], known, **how)
        assert all(finding.checked for finding in found.findings), found.findings
        return {finding.invariant: finding.examples for finding in found.findings if finding.breaches}


async def run_sql(database, *statements: str) -> None:
    async with database.transaction() as session:
        for statement in statements:
            done = await (await session.connection()).execute(text(statement))
            assert done.rowcount, f"changed nothing: {statement}"


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
    " key_id, 'requests', model, base_model, flow_class, rate_card_id, 1, 1000000, 1000000, finished_unix_ns"
    " FROM request_record WHERE request_id = {of}"
)
PLANTED = {
    "a charge that is larger than its quantity says": (
        f"UPDATE ledger_entry SET amount_picousd = amount_picousd + 1 WHERE meter = 'requests' AND request_id = {PAID}",
        {"I4": "1 × 1000000 is not 1000001", "I7": "are not those of its receipt"},
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
        "INSERT INTO request_record SELECT 'forged', attempt, tenant_id, key_id, operation, model, base_model,"
        " adapter_version_id, flow_class, rate_card_id, 499, billed, price_picousd, prompt_tokens, 0, 1,"
        " queue_ns, prefill_ns, decode_ns, post_ns, network_ns, first_token_ns, gpu_ns, admitted_unix_ns,"
        f" finished_unix_ns, trace_id, label FROM request_record WHERE request_id = {PAID}; "
        + AN_ENTRY.format(id="'forged'", of="'forged'"),
        {"I1": "requests in the ledger", "I7": "request forged (499): its 1 entries"},
    ),
    "a request that was resolved twice": (
        "INSERT INTO request_record SELECT request_id, attempt + 1, tenant_id, key_id, operation, model, base_model,"
        " adapter_version_id, flow_class, rate_card_id, outcome, billed, price_picousd, prompt_tokens, cached_tokens,"
        " output_tokens, queue_ns, prefill_ns, decode_ns, post_ns, network_ns, first_token_ns, gpu_ns,"
        f" admitted_unix_ns, finished_unix_ns, trace_id, label FROM request_record WHERE request_id = {PAID}",
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
        await run_sql(database, *statements.split("; "))
        found = await books.audited(database)
        assert expected.keys() <= found.keys(), found
        for invariant, words in expected.items():
            assert any(words in breach for breach in found[invariant]), found

    with_database(body)


# ── journals ─────────────────────────────────────────────────────────────────────────────────────


def test_a_record_on_its_way_is_no_breach_and_one_that_was_acknowledged_and_is_missing_is(with_database):
    async def body(database):
        books = await Books.write(database)
        last = books.journal.records[-1]
        coming = replace(last, number=99, due=False, context=msgspec.structs.replace(last.context, request_id="coming"))
        assert await books.audited(database, Records([*books.journal.records, coming])) == {}
        found = await books.audited(database, Records([*books.journal.records, replace(coming, due=True)]))
        assert list(found) == ["I8"]

    with_database(body)


def test_a_record_that_says_otherwise_than_the_receipt_is_found(with_database):
    async def body(database):
        books = await Books.write(database)
        records = list(books.journal.records)
        at = next(n for n, record in enumerate(records) if record.usage[0] == 200)
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
        lost = [n for n, record in enumerate(records) if record.usage[0] == 0]
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
            await add(session, card := RateCard("rc_1", 1, 0, default_prices()))
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
        found = await Books(settled, Records(journaled(settled))).audited(database)
        assert found == {"I9": ["request r5: 100 cached tokens that no request of its namespace wrote before"]}

    with_database(body)


def test_a_head_that_was_printed_before_must_lie_on_the_audit_log(with_database):
    async def body(database):
        books = await Books.write(database)
        assert "I11" in await books.audited(database, known=[Head(1, "0" * 64)])

    with_database(body)
