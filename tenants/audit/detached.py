"""Months whose receipts and charges were detached: what stays of them is held to their sums, and they are named."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row, text
from sqlalchemy.ext.asyncio import AsyncConnection

_MONTHS = text("SELECT month, first_id, end_id, num_records, num_entries FROM detached_month ORDER BY month")
_SUMS = text(
    "SELECT kind, owner, model, base_model, flow_class, meter, rate_card_id, unit_price_picousd, quantity,"
    " amount_picousd FROM detached_sum WHERE kind IN ('charge', 'debit')"
)
HOLDS = "EXISTS (SELECT 1 FROM detached_month d WHERE {id} >= d.first_id AND {id} < d.end_id)"


@dataclass(frozen=True, slots=True)
class Detached:
    """``charges``: by invoice and line, (quantity, picousd); ``debits``: by invoice, picousd."""

    months: Sequence[Row]
    charges: Mapping[str, Mapping[tuple[Any, ...], tuple[int, int]]]
    debits: Mapping[str, int]

    def holds(self, request_id: str) -> bool:
        return any(month.first_id <= request_id < month.end_id for month in self.months)

    def words(self) -> list[str]:
        """What no audit sees any more, row by row."""
        return [
            f"{month.month}: {month.num_records} receipts and {month.num_entries} charges are detached; invoices and"
            " credit are held to the sums that were kept of them, no row is checked and no journal is compared"
            for month in self.months
        ]


async def read_detached(connection: AsyncConnection) -> Detached:
    charges: dict[str, dict[tuple[Any, ...], tuple[int, int]]] = defaultdict(dict)
    debits: dict[str, int] = defaultdict(int)
    for row in await connection.execute(_SUMS):
        if row.kind == "debit":
            debits[row.owner] += int(row.amount_picousd)
            continue
        key = (row.model, row.base_model, row.flow_class, row.meter, row.rate_card_id, row.unit_price_picousd)
        quantity, amount = charges[row.owner].get(key, (0, 0))
        charges[row.owner][key] = quantity + int(row.quantity), amount + int(row.amount_picousd)
    return Detached((await connection.execute(_MONTHS)).all(), charges, debits)
