"""What the ledger must hold by itself: I4–I7, I9, each a query for the rows that break it."""

from bisect import bisect_right
from operator import itemgetter
from typing import NamedTuple

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from tenants.audit.findings import Findings
from tenants.audit.journals import METERS

_PAID = "(r.outcome = 200 OR (r.outcome = 499 AND r.output_tokens > 0))"
_SAME = " AND ".join(
    [
        "e.request_id = r.request_id",
        "e.tenant_id || '' = r.tenant_id || ''",  # plainly, SQLite would take the tenant's index
        *(f"e.{name} = r.{name}" for name in ("key_id", "model", "base_model", "flow_class", "rate_card_id")),
    ]
)
_OF_REQUESTS = f"e.meter IN ({', '.join(map(repr, METERS))})"
_ANY = "*"
_WRITTEN_BEFORE = (  # of what is detached: the most that a request of the namespace left
    "coalesce((SELECT max(CAST(d.quantity AS BIGINT)) FROM detached_sum d WHERE d.kind = 'written'"
    " AND d.owner = k.tenant_id AND d.base_model = k.base_model AND d.model = k.adapter), 0)"
)
_UNIT = (
    "CASE WHEN meter LIKE 'adapter!_%' ESCAPE '!' THEN 1000000 ELSE 1 END"  # adapters' prices are a megabyte-second's
)


def _sum_of(meter: str) -> str:
    return f"coalesce(sum(CASE WHEN e.meter = '{meter}' THEN e.quantity ELSE 0 END), 0)"


class Rule(NamedTuple):
    """Rows that ``query`` finds break ``invariant``; ``says`` tells of one by its columns."""

    invariant: str
    table: str
    query: str
    says: str


_RULES = (
    Rule(
        "I4",
        "ledger_entry",
        f"SELECT * FROM ledger_entry WHERE amount_picousd <> CAST(quantity / {_UNIT} AS NUMERIC) * unit_price_picousd"
        f" OR quantity % {_UNIT} <> 0",
        "entry {entry_id}: {quantity} × {unit_price_picousd} is not {amount_picousd}",
    ),
    Rule(
        "I5",
        "request_record",
        f"SELECT r.request_id, count(*) AS times FROM request_record r WHERE {_PAID}"
        " GROUP BY r.request_id HAVING count(*) > 1",
        "request {request_id} was resolved {times} times",
    ),
    Rule(
        "I7",
        "ledger_entry",
        f"SELECT e.request_id, e.meter FROM ledger_entry e WHERE {_OF_REQUESTS} AND NOT EXISTS"
        f" (SELECT 1 FROM request_record r WHERE {_SAME} AND {_PAID})",
        "request {request_id} is charged for {meter}, and no billed receipt says so",
    ),
    Rule(
        "I7",
        "request_record",
        f"SELECT r.request_id, r.outcome, r.price_picousd, count(e.entry_id) AS num_entries"
        f" FROM request_record r LEFT JOIN ledger_entry e ON {_SAME} AND {_OF_REQUESTS} WHERE {_PAID}"
        " GROUP BY r.request_id, r.attempt, r.outcome, r.price_picousd,"  # in parts, the first two are no primary key
        " r.prompt_tokens, r.cached_tokens, r.output_tokens"
        f" HAVING {_sum_of('input_cached_tokens')} <> r.cached_tokens"
        f" OR {_sum_of('input_uncached_tokens')} <> r.prompt_tokens - r.cached_tokens"
        f" OR {_sum_of('output_tokens')} <> r.output_tokens OR {_sum_of('requests')} <> 1"
        " OR coalesce(sum(e.amount_picousd), 0) <> r.price_picousd OR count(e.entry_id) <> 1"
        " + CASE WHEN r.prompt_tokens > r.cached_tokens THEN 1 ELSE 0 END"
        " + CASE WHEN r.cached_tokens > 0 THEN 1 ELSE 0 END + CASE WHEN r.output_tokens > 0 THEN 1 ELSE 0 END",
        "request {request_id} ({outcome}): its {num_entries} entries are not those of its receipt",
    ),
    Rule(
        "I7",
        "request_record",
        "SELECT r.request_id, r.outcome, r.price_picousd FROM request_record r"
        f" WHERE r.billed <> {_PAID} OR (NOT {_PAID} AND r.price_picousd <> 0)",
        "request {request_id} ended with {outcome}: its receipt says {price_picousd} picousd, billed or not",
    ),
    Rule(
        "I9",
        "request_record",
        "SELECT request_id, cached_tokens, prompt_tokens FROM request_record WHERE cached_tokens > prompt_tokens",
        "request {request_id}: {cached_tokens} cached of {prompt_tokens} prompt tokens",
    ),
    # Of one choice, whose prompt is one: what it found was written before it ended, by one request of its namespace.
    # First who has less than that before it in order of admission, then whether another had begun at least.
    Rule(
        "I9",
        "request_record",
        "WITH named AS (SELECT r.*, coalesce(v.sha256, r.adapter_version_id) AS adapter FROM request_record r"
        " LEFT JOIN adapter_version v ON v.adapter_version_id = r.adapter_version_id), known AS (SELECT named.*,"
        " max(prompt_tokens + output_tokens) OVER (PARTITION BY tenant_id, base_model, adapter"
        " ORDER BY admitted_unix_ns ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS written FROM named)"
        " SELECT k.request_id, k.cached_tokens FROM known k WHERE k.num_choices = 1"
        f" AND k.cached_tokens > coalesce(k.written, 0) AND k.cached_tokens > {_WRITTEN_BEFORE}"
        " AND NOT EXISTS (SELECT 1 FROM named o WHERE"
        " o.tenant_id = k.tenant_id AND o.base_model = k.base_model AND o.adapter = k.adapter"
        " AND o.admitted_unix_ns < k.finished_unix_ns AND o.prompt_tokens + o.output_tokens >= k.cached_tokens"
        " AND (o.request_id <> k.request_id OR o.attempt <> k.attempt))",
        "request {request_id}: {cached_tokens} cached tokens that no request of its namespace wrote before",
    ),
)
_NOT_NEGATIVE = {
    "request_record": (
        *("attempt", "outcome", "price_picousd", "prompt_tokens", "cached_tokens", "output_tokens", "queue_ns"),
        *("prefill_ns", "decode_ns", "post_ns", "network_ns", "first_token_ns", "gpu_ns"),
        *("admitted_unix_ns", "finished_unix_ns", "num_choices", "load_ns", "recompute_ns"),
    ),
    "ledger_entry": ("quantity", "unit_price_picousd", "amount_picousd", "occurred_unix_ns"),
    "rate_card_item": ("price_picousd",),
    "replica_time": (
        *("until_unix_ns", "wall_ns", "attributed_ns", "load_ns", "recompute_ns", "lost_ns", "idle_ns"),
        *("overhead_ns", "error_ppm"),
    ),
}
_NOT_NEGATIVE["replica_hour"] = _NOT_NEGATIVE["replica_time"]
_PRICED = (
    "SELECT rate_card_id, meter, base_model, flow_class, unit_price_picousd, count(*) AS num_entries FROM ledger_entry"
    " GROUP BY rate_card_id, meter, base_model, flow_class, unit_price_picousd"
)
_ITEMS = "SELECT rate_card_id, meter, model, flow_class, price_picousd FROM rate_card_item"
_PINNED = (
    "SELECT rate_card_id, min(admitted_unix_ns) AS first_ns, max(admitted_unix_ns) AS last_ns FROM request_record"
    " GROUP BY rate_card_id"
)


async def check_books(connection: AsyncConnection, findings: Findings) -> None:
    sizes = {table: await _count(connection, table) for table in _NOT_NEGATIVE}
    for rule in _RULES:
        finding = findings[rule.invariant]
        finding.checked += sizes[rule.table]
        for row in await connection.execute(text(rule.query)):
            finding.breach(rule.says.format(**row._mapping))
    await _check_signs(connection, sizes, findings)
    await _check_prices(connection, findings)
    await _check_versions(connection, findings)


async def _count(connection: AsyncConnection, table: str) -> int:
    return (await connection.execute(text(f"SELECT count(*) FROM {table}"))).scalar_one()


async def _check_signs(connection: AsyncConnection, sizes: dict[str, int], findings: Findings) -> None:
    for table, columns in _NOT_NEGATIVE.items():
        findings["I6"].checked += sizes[table]
        wrong = " OR ".join(f"{column} < 0" for column in columns)
        for row in await connection.execute(text(f"SELECT * FROM {table} WHERE {wrong}")):
            negative = [f"{column} is {row._mapping[column]}" for column in columns if row._mapping[column] < 0]
            findings["I6"].breach(f"{table} {row[0]}: {', '.join(negative)}")


async def _check_prices(connection: AsyncConnection, findings: Findings) -> None:
    """Every unit price that was charged is the card's own; the most exact item wins, the model before the class."""
    items = await connection.execute(
        text("SELECT rate_card_id, meter, model, flow_class, price_picousd FROM rate_card_item")
    )
    prices: dict[tuple[str, ...], int] = {
        (row.rate_card_id, row.meter, row.model, row.flow_class): row.price_picousd for row in items
    }
    for row in await connection.execute(text(_PRICED)):
        wanted = ((row.base_model, row.flow_class), (row.base_model, _ANY), (_ANY, row.flow_class), (_ANY, _ANY))
        keys: list[tuple[str, ...]] = [(row.rate_card_id, row.meter, *item) for item in wanted]
        unlisted = 0 if row.meter.startswith("adapter_") else None
        listed = next((prices[key] for key in keys if key in prices), unlisted)
        if listed != row.unit_price_picousd:
            charged = f"{row.num_entries} entries of {row.meter} ({row.base_model}, {row.flow_class})"
            findings["I4"].breach(
                f"{charged} at {row.unit_price_picousd} picousd: card {row.rate_card_id} says {listed}"
            )


async def _check_versions(connection: AsyncConnection, findings: Findings) -> None:
    """The card that was pinned is the one that was in force at admission."""
    found = await connection.execute(text("SELECT rate_card_id, effective_unix_ns FROM rate_card ORDER BY version"))
    cards = sorted(((row.effective_unix_ns, row.rate_card_id) for row in found), key=itemgetter(0))
    starts = [start for start, _ in cards]
    for row in await connection.execute(text(_PINNED)):
        for admitted_ns in {row.first_ns, row.last_ns}:
            number = bisect_right(starts, admitted_ns)
            in_force = cards[number - 1][1] if number else None
            if in_force != row.rate_card_id:
                findings["I4"].breach(f"priced by {row.rate_card_id} at {admitted_ns}, when {in_force} was in force")
